"""How every attention layer runs: dtypes, strides, copies, checkpointing, compiled, and without needless work."""

import copy
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests.helpers import gradients, relative_error
from tests.nn.layers import LAYERS, POSITIONS, GrowingCache, every_layer, every_position, inputs


@every_layer
@every_position
def test_training_repeats_bit_for_bit(make, positions):
    start, x, memory = make(positions=positions), inputs(dtype=torch.float32), inputs(dtype=torch.float32)

    def train():
        module = copy.deepcopy(start)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        for _ in range(3):
            module(x, memory=memory).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    torch.use_deterministic_algorithms(True)
    try:
        first = train()
        assert all(torch.equal(train(), first) for _ in range(20))
    finally:
        torch.use_deterministic_algorithms(False)


@every_layer
@every_position
def test_mixed_dtypes_run_outside_autocast_and_inside(make, positions):
    module = make(positions=positions)
    x = inputs(dtype=torch.float32)
    exact = copy.deepcopy(module).double()(x.double())
    for module_dtype in (torch.float32, torch.bfloat16, torch.float16):
        for x_dtype in (torch.float32, torch.bfloat16, torch.float16):
            mixed = copy.deepcopy(module).to(module_dtype)
            y = mixed(x.to(x_dtype))
            assert y.dtype == torch.promote_types(module_dtype, x_dtype)
            y.sum().backward()
            assert relative_error(y, exact) < 0.05
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(x).dtype == torch.bfloat16


@every_layer
def test_transposed_and_expanded_inputs_and_gradients(make):
    module = make(positions="rotary").double()
    x = torch.randn(12, 6, 2, dtype=torch.float64).permute(2, 1, 0).requires_grad_()
    y = module(x)
    (strided,) = torch.autograd.grad(y.sum(), x)  # an expanded gradient
    (plain,) = torch.autograd.grad(module(x.contiguous()), x, torch.ones_like(y))
    assert relative_error(strided, plain) < 1e-13


@every_layer
@every_position
def test_pickled_and_deep_copied_layers_are_equal_and_independent(make, positions):
    module, x = make(positions=positions), inputs(dtype=torch.float32)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), module(x))
        assert not {id(p) for p in other.parameters()} & {id(p) for p in module.parameters()}


@every_layer
@every_position
def test_layers_build_on_meta_and_come_to_life(make, positions):
    with torch.device("meta"):
        module = make(positions=positions)
    assert all(p.is_meta for p in module.parameters())
    assert module(torch.empty(2, 5, 12, device="meta")).shape == (2, 5, 12)
    module = module.to_empty(device="cpu")
    module.reset_parameters()
    assert torch.isfinite(module(inputs(dtype=torch.float32))).all()


@every_layer
@every_position
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(make, positions, use_reentrant):
    module, x = make(positions=positions).double(), inputs().requires_grad_()
    tensors = [x, *module.parameters()]
    plain = gradients(module(x), *tensors)
    module.zero_grad()
    x.grad = None
    y = checkpoint(module, x, use_reentrant=use_reentrant)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y.backward(cotangent)
    for a, tensor in zip(plain, tensors, strict=True):
        assert relative_error(tensor.grad, a) < 1e-13


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "positions"), [("switchhead", "rotary"), ("gqa", "relative")])
def test_ten_lengths_compile_at_most_twice(kind, positions):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(LAYERS[kind](positions=positions), fullgraph=True, backend=counter)
    for length in (5, 9, 17, 6, 30, 12, 64, 33, 7, 21):
        compiled(inputs(length=length, dtype=torch.float32).requires_grad_()).sum().backward()
    assert counter.frame_count <= 2


def assert_compiled_equals_eager(module, backend):
    torch.compiler.reset()
    x, memory = (inputs(dtype=torch.float32).requires_grad_() for _ in range(2))
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    tensors = [x, memory, *module.parameters()]
    found, expected = compiled(x, memory=memory), module(x, memory=memory)
    assert relative_error(found, expected) < 1e-5
    for a, b in zip(gradients(found, *tensors), gradients(expected, *tensors), strict=True):
        assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize(
    ("kind", "positions"),  # every layer, and every kind of positions in each of the two ways to project the input
    [("switchhead", positions) for positions in POSITIONS]
    + [("mha", "none"), ("gqa", "rotary"), ("moa", "relative")]
    + [("head-gating", "relative"), ("switchhead-qk-norm", "rotary")],
)
def test_layers_trace_to_one_graph(kind, positions):
    assert_compiled_equals_eager(LAYERS[kind](positions=positions), "aot_eager")


@pytest.mark.slow
def test_a_compiled_layer_equals_the_eager_one():
    assert_compiled_equals_eager(LAYERS["switchhead"](positions="rotary"), "inductor")


@pytest.mark.parametrize("positions", ["none", "rotary"])
@every_layer
def test_plain_causal_attention_carries_no_mask(make, positions):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # refuses masks
        make(positions=positions)(inputs(dtype=torch.float32))


@every_layer
@every_position
def test_widths_padded_inside_change_nothing(make, positions, monkeypatch):
    module, x, memory = make(positions=positions).double(), inputs().requires_grad_(), inputs()
    tensors = [x, *module.parameters()]
    plain = module(x, memory=memory)
    for name in (
        "ops.attention",
        "ops.inputs",
        "nn.projections",
        "nn.switchhead",
        "nn.multihead",
        "nn.moa",
    ):  # as on a GPU
        monkeypatch.setattr(f"switchhead.{name}.aligned_width", lambda width, device: -(-width // 16) * 16)
    padded = module(x, memory=memory)
    assert padded.shape == plain.shape
    assert relative_error(padded, plain) < 1e-12
    for a, b in zip(gradients(padded, *tensors), gradients(plain, *tensors), strict=True):
        assert relative_error(a, b) < 1e-12
    step = module(x[:, :1], cache=(cache := GrowingCache()), position_ids=torch.tensor([0]))
    assert cache.k.shape[-1] == cache.v.shape[-1] == 7
    assert relative_error(step, module(x[:, :1])) < 1e-12


@every_layer
def test_no_state_stays_on_the_module(make):
    module = make(positions="relative")
    before = set(vars(module)), [name for name, _ in module.named_buffers()]
    module(inputs(dtype=torch.float32), memory=inputs(dtype=torch.float32))
    assert (set(vars(module)), [name for name, _ in module.named_buffers()]) == before

"""What holds for every attention layer, with every kind of positions."""

import copy
import itertools
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from switchhead import MultiHeadAttention, Rotary, SwitchHeadAttention
from switchhead.nn import HeadGatedAttention, MoAAttention
from switchhead.ops import document_boundaries
from tests.helpers import gradients, relative_error

LAYERS = {
    "switchhead": lambda **o: SwitchHeadAttention(**{**dict(d_model=12, n_heads=2, n_experts=3, d_head=7, k=2), **o}),
    "mha": lambda **o: MultiHeadAttention(**{**dict(d_model=12, n_heads=4, d_head=7), **o}),
    "gqa": lambda **o: MultiHeadAttention(**{**dict(d_model=12, n_heads=4, d_head=7, n_kv_heads=2), **o}),
    "switchhead-qk-norm": lambda **o: LAYERS["switchhead"](**{"qk_norm": True, **o}),
    "moa": lambda **o: MoAAttention(**{**dict(d_model=12, n_heads=3, n_experts=5, d_head=7), **o}),
    "head-gating": lambda **o: HeadGatedAttention(**{**dict(d_model=12, n_heads=4, d_head=7, k=2), **o}),
}
POSITIONS = ["none", "rotary", "relative"]
SOURCES = ["context", "memory"]
every_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
every_position = pytest.mark.parametrize("positions", POSITIONS)


class GrowingCache:
    """Concatenates, as a dynamic cache does."""

    def __init__(self):
        self.k = self.v = None

    def update(self, k, v):
        self.k = k if self.k is None else torch.cat([self.k, k], 2)
        self.v = v if self.v is None else torch.cat([self.v, v], 2)
        return self.k, self.v


def inputs(batch=2, length=6, dtype=torch.float64):
    return torch.randn(batch, length, 12, dtype=dtype)


@every_layer
@every_position
def test_cached_decoding_matches_full_forward(make, positions):
    module, x = make(positions=positions).double().eval(), inputs(length=17)
    full, cache = module(x), GrowingCache()
    for t in range(17):
        step = module(x[:, t : t + 1], cache=cache, position_ids=torch.tensor([t]))
        assert relative_error(step, full[:, t : t + 1]) < 1e-12, t


@every_layer
@every_position
def test_a_cached_chunk_of_several_tokens_matches_full_forward(make, positions):
    module, x = make(positions=positions).double().eval(), inputs(length=9)
    full, cache = module(x), GrowingCache()
    for first, last in ((0, 4), (4, 5), (5, 9)):
        part = module(x[:, first:last], cache=cache, position_ids=torch.arange(first, last))
        assert relative_error(part, full[:, first:last]) < 1e-12


@every_layer
@every_position
def test_a_chunk_with_memory_matches_one_long_sequence(make, positions):
    module, x = make(positions=positions).double(), inputs(length=8)
    assert relative_error(module(x[:, 5:], memory=x[:, :5]), module(x)[:, 5:]) < 1e-12


@every_layer
@every_position
def test_left_padding_changes_nothing(make, positions):
    module, x = make(positions=positions).double(), inputs(batch=1, length=10)
    short = x[:, 7:]
    padded = torch.cat([torch.randn(1, 7, 12, dtype=torch.float64), short], 1)
    batch = torch.cat([padded, x])
    mask = torch.zeros(2, 10, dtype=torch.bool)
    mask[0, :7] = True
    ids = torch.stack([torch.arange(10) - 7, torch.arange(10)]).clamp(min=0)
    together = module(batch, key_padding_mask=mask, position_ids=ids)
    assert relative_error(together[0, 7:], module(short)[0]) < 1e-12
    assert relative_error(together[1], module(x)[0]) < 1e-12


@every_layer
@every_position
def test_a_causal_layer_does_not_look_ahead(make, positions):
    module, x = make(positions=positions).double(), inputs()
    changed = x.clone()
    changed[:, 4:] = torch.randn(2, 2, 12, dtype=torch.float64)
    assert torch.equal(module(x)[:, :4], module(changed)[:, :4])
    assert not torch.allclose(module(x)[:, 4:], module(changed)[:, 4:])


@every_layer
@every_position
def test_masks_follow_torchs_conventions(make, positions):
    module, x = make(positions=positions, causal=False).double(), inputs()
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    causal = make(positions=positions).double()
    causal.load_state_dict(module.state_dict())
    expected = causal(x)
    additive = torch.zeros(6, 6, dtype=torch.float64).masked_fill(future, -torch.inf)
    heads = module.n_heads
    for mask in (future, additive, future.expand(2 * heads, 6, 6), additive.expand(2, 1, 6, 6), future[None, None]):
        assert relative_error(module(x, attn_mask=mask), expected) < 1e-12
    bias = torch.randn(2, heads, 6, 6, dtype=torch.float64)
    assert not torch.allclose(module(x, attn_mask=bias), module(x))


@every_layer
@every_position
def test_rows_that_see_nothing_give_zeros_and_finite_gradients_for_three_steps(make, positions, poisoned_allocations):
    module = make(positions=positions).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    mask = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    for _ in range(3):
        x = inputs().requires_grad_()
        y = module(x, key_padding_mask=mask)
        assert y[0].eq(0).all()
        assert y[1, :3].eq(0).all()
        assert y[1, 3:].abs().min() > 0
        optimizer.zero_grad()
        y.square().sum().backward()
        assert torch.isfinite(x.grad).all()
        assert all(torch.isfinite(p.grad).all() for p in module.parameters())
        optimizer.step()


@every_layer
@every_position
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("least", [-torch.inf, torch.finfo(torch.float32).min, torch.finfo(torch.float16).min, -1e9])
def test_additive_masks_of_whole_rows_stay_finite_in_every_dtype(make, positions, dtype, least):
    module = make(positions=positions, causal=False).to(dtype)
    mask = torch.zeros(6, 6)
    mask[0], mask[1, 1] = least, least
    x = inputs(dtype=dtype).requires_grad_()
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = module(x, attn_mask=mask)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.isfinite(y).all()
        assert torch.isfinite(grad).all()
        assert y[:, 0].eq(0).all() or least != -torch.inf


@every_layer
@every_position
def test_a_learned_additive_mask_has_gradients(make, positions):
    module, x = make(positions=positions).double(), inputs(length=3).requires_grad_()
    mask = torch.randn(2 * module.n_heads, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, mask: module(x, attn_mask=mask), (x, mask), fast_mode=True)


@every_layer
@every_position
def test_gradients_of_the_whole_layer_pass_gradcheck(make, positions):
    module, x, memory = make(positions=positions).double(), inputs(1, 4).requires_grad_(), inputs(1, 2).requires_grad_()
    names, parameters = zip(*module.named_parameters(), strict=True)
    padding = torch.tensor([[True, False, False, True, False, False]])

    def function(x, memory, *parameters):
        arguments = dict(memory=memory, key_padding_mask=padding)
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x,), arguments)

    assert torch.autograd.gradcheck(function, (x, memory, *parameters), fast_mode=True)


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
@pytest.mark.parametrize("causal", [True, False])
def test_an_empty_context_gives_zeros_and_empty_memory_changes_nothing(make, positions, causal):
    module, x = make(positions=positions, causal=causal).double(), inputs()
    assert module(x, context=x[:, :0]).eq(0).all()
    assert relative_error(module(x, memory=x[:, :0]), module(x)) < 1e-14


@every_layer
@every_position
def test_no_tokens_and_no_sequences_behind_a_memory_give_none(make, positions):
    module, x = make(positions=positions).double(), inputs()
    assert module(x[:, :0], memory=x).shape == (2, 0, 12)
    assert module(x[:0], memory=x[:0]).shape == (0, 6, 12)


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
@every_position
def test_context_and_memory_may_have_other_dtypes_outside_autocast_and_inside(make, positions):
    module, x = make(positions=positions), inputs(dtype=torch.float32)
    other = inputs(dtype=torch.float32)
    exact = {name: copy.deepcopy(module).double()(x.double(), **{name: other.double()}) for name in SOURCES}
    single, brain, half = torch.float32, torch.bfloat16, torch.float16
    mixes = [*itertools.product((single, brain), repeat=3), *itertools.permutations((single, brain, half))]
    for module_dtype, x_dtype, dtype in mixes:
        mixed = copy.deepcopy(module).to(module_dtype)
        for name, expected in exact.items():
            for autocast in (False, True):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    y = mixed(x.to(x_dtype), **{name: other.to(dtype)})
                y.sum().backward()
                assert relative_error(y, expected) < 0.05


@every_layer
@every_position
@pytest.mark.parametrize("length", [1, 0])
def test_one_token_and_no_token(make, positions, length):
    module = make(positions=positions)
    x = torch.randn(2, length, 12, requires_grad=True)
    y = module(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert torch.isfinite(x.grad).all()
    assert module(torch.randn(0, 4, 12)).shape == (0, 4, 12)


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


@every_position
@pytest.mark.parametrize("n_kv_heads", [1, 2])
def test_grouped_queries_equal_heads_with_repeated_keys_and_values(n_kv_heads, positions):
    gqa = LAYERS["gqa"](positions=positions, n_kv_heads=n_kv_heads).double()
    mha = LAYERS["mha"](positions=positions).double()
    state = gqa.state_dict()
    for name in ("k_proj.weight", "v_proj.weight"):
        state[name] = state[name].unflatten(0, (n_kv_heads, 7)).repeat_interleave(4 // n_kv_heads, 0).flatten(0, 1)
    mha.load_state_dict(state)
    x = inputs()
    assert relative_error(gqa(x), mha(x)) < 1e-13


def test_dense_attention_equals_torchs_own():
    ours = MultiHeadAttention(d_model=12, n_heads=3, d_head=4, causal=False).double()
    theirs = torch.nn.MultiheadAttention(12, 3, bias=False, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.q_proj.weight, ours.k_proj.weight, ours.v_proj.weight]))
        theirs.out_proj.weight.copy_(ours.o_proj.weight)
    x, padding = inputs(), torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    mask = torch.rand(6, 6) < 0.3
    mask.fill_diagonal_(False)
    expected, _ = theirs(x, x, x, key_padding_mask=padding, attn_mask=mask)
    assert relative_error(ours(x, key_padding_mask=padding, attn_mask=mask)[:, :4], expected[:, :4]) < 1e-12


def test_explicit_position_ids_shift_nothing_when_all_move_together():
    module, x = LAYERS["switchhead"](positions=Rotary(fraction=0.8)).double(), inputs()
    shifted = module(x, position_ids=torch.arange(6) + 100)
    assert relative_error(shifted, module(x)) < 1e-11
    restarted = module(x, position_ids=torch.tensor([0, 1, 2, 0, 1, 2]))
    assert not torch.allclose(restarted, module(x))


@pytest.mark.parametrize("positions", ["none", "rotary"])
@every_layer
def test_packed_documents_equal_documents_alone(make, positions):
    module, x = make(positions=positions).double(), inputs(batch=2, length=7)
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 0]])
    packed = module(x, position_ids=position_ids, cu_seqlens=document_boundaries(position_ids))
    for row, documents in enumerate([[(0, 3), (3, 7)], [(0, 1), (1, 6), (6, 7)]]):
        for first, last in documents:
            alone = module(x[row : row + 1, first:last])
            assert relative_error(packed[row : row + 1, first:last], alone) < 1e-12


@every_layer
def test_packing_with_what_it_does_not_go_with_is_refused(make):
    x, bounds = inputs(dtype=torch.float32), torch.tensor([0, 6, 12], dtype=torch.int32)
    with pytest.raises(ValueError, match="does not go with memory"):
        make()(x, memory=x, cu_seqlens=bounds)
    with pytest.raises(ValueError, match="does not go with causal=False"):
        make(causal=False)(x, cu_seqlens=bounds)
    with pytest.raises(ValueError, match="does not go with relative positions"):
        make(positions="relative")(x, cu_seqlens=bounds)


@every_layer
def test_bad_inputs_are_named(make):
    module, x = make(positions="rotary"), inputs(dtype=torch.float32)
    cases = [
        (lambda: module(x[0]), r"x must be \[batch, length, d_model=12\]"),
        (lambda: module(x[..., :5]), r"d_model=12"),
        (lambda: module(x.long()), "x must be floating point"),
        (lambda: module(x, context=x.long()), "context must be floating point"),
        (lambda: module(x, memory=x.long()), "memory must be floating point"),
        (lambda: module(x, memory=x, context=x), "exclude each other"),
        (lambda: module(x, memory=x[:1]), r"memory must be \[2, length, 12\]"),
        (lambda: module(x, key_padding_mask=torch.zeros(2, 5, dtype=torch.bool)), r"boolean \[2, 6\]"),
        (lambda: module(x, key_padding_mask=torch.zeros(2, 6)), "must be boolean"),
        (lambda: module(x, attn_mask=torch.zeros(6, 5)), r"attn_mask must be"),
        (lambda: module(x, attn_mask=torch.zeros(6, 6, dtype=torch.long)), r"attn_mask must be boolean"),
        (lambda: module(x, cache=GrowingCache()), "need position_ids"),
        (lambda: module(x, position_ids=torch.arange(5)), r"position_ids must be \[6\]"),
        (lambda: module(x, position_ids=torch.arange(6).expand(3, 6)), r"\[2 or 1, 6\]; got \(3, 6\)"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


def test_head_counts_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="n_kv_heads=3 must divide n_heads=4"):
        MultiHeadAttention(d_model=12, n_heads=4, d_head=7, n_kv_heads=3)


class Adapter(torch.nn.Module):
    """A projection with something added to its output, as adapters for fine-tuning are built."""

    def __init__(self, base):
        super().__init__()
        self.base, self.weight = base, base.weight

    def forward(self, x):
        return self.base(x) + 1


class Reversed(torch.nn.Module):
    def forward(self, weight):
        return weight.flip(-1)


@every_layer
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_an_adapter_in_place_of_a_projection_is_refused_and_one_on_its_weight_has_effect(make, name):
    module, x = make().double(), inputs()
    before = module(x)
    torch.nn.utils.parametrize.register_parametrization(getattr(module, name), "weight", Reversed())
    assert relative_error(module(x), before) > 0.01
    setattr(module, name, Adapter(getattr(module, name)))
    with pytest.raises(TypeError, match=r"Adapter stands in place of a projection .*parametrize"):
        module(x)

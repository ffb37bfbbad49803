from contextlib import nullcontext

import pytest
import torch
import torch._dynamo.testing

from switchhead.ops import reference
from switchhead.ops.triton import moe_linear as module
from switchhead.ops.triton import operator
from switchhead.ops.triton.moe_linear import moe_linear
from switchhead.routing import Routing
from tests.helpers import check_operator, gradients, of_other_strides, relative_error

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def operands(
    tokens, heads, experts, k, d_in, d_out, *, per_head=False, pooled=False, dtype=torch.float32, device="cpu"
):
    x = torch.randn(tokens, *([heads] if per_head else []), d_in, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(1 if pooled else heads, experts, d_in, d_out, device=device, dtype=dtype, requires_grad=True)
    indices = torch.rand(tokens, heads, experts, device=device).argsort(-1)[..., :k]
    gates = torch.rand(tokens, heads, k, device=device, requires_grad=True)
    return x, weight, Routing(gates, indices, experts)


def assert_agrees(x, weight, routing, reduce) -> None:
    """Result and every gradient against float64."""
    y = moe_linear(x, weight, routing, reduce=reduce)
    gates = routing.gates
    x64, weight64, gates64 = (t.detach().double().requires_grad_() for t in (x, weight, gates))
    expected = reference.moe_linear(
        x64, weight64, Routing(gates64, routing.expert_indices, routing.n_experts), reduce=reduce
    )
    assert y.shape == expected.shape
    tolerance = TOLERANCE[y.dtype]
    assert relative_error(y, expected) < tolerance
    inputs, inputs64 = (
        ((x, weight), (x64, weight64)) if reduce is None else ((x, weight, gates), (x64, weight64, gates64))
    )
    cotangent = torch.randn_like(expected)
    found = gradients(y, *inputs, cotangent=cotangent)
    for name, a, b in zip(
        ("x", "weight", "gates"), found, gradients(expected, *inputs64, cotangent=cotangent), strict=False
    ):
        assert relative_error(a, b) < tolerance, name


@pytest.fixture
def without_decoding(monkeypatch):
    """The kernels for many tokens, at a size that the interpreter can run."""
    monkeypatch.setattr(module, "DECODE_TOKENS", 0)


CASES = {
    "joint sets of two heads": dict(tokens=40, heads=2, experts=5, k=2, d_in=48, d_out=20),
    "few experts, odd widths": dict(tokens=17, heads=2, experts=4, k=2, d_in=41, d_out=76),
    "an odd number of heads": dict(tokens=9, heads=3, experts=3, k=1, d_in=16, d_out=16),
    "one expert": dict(tokens=5, heads=1, experts=1, k=1, d_in=24, d_out=16),
    "every expert": dict(tokens=12, heads=2, experts=3, k=3, d_in=16, d_out=24),
    "more sets than groups": dict(tokens=10, heads=1, experts=16, k=4, d_in=16, d_out=16),
    "a shared pool": dict(tokens=10, heads=3, experts=4, k=1, d_in=16, d_out=24, pooled=True),
}


@pytest.mark.parametrize("reduce", ["k", "heads", None])
@pytest.mark.parametrize("case", CASES)
def test_kernels_agree_with_the_definition(case, reduce, device, without_decoding, poisoned_allocations):
    assert_agrees(*operands(**CASES[case], per_head=reduce == "heads", device=device), reduce)


@pytest.mark.parametrize("reduce", ["k", "heads", None])
def test_heads_may_share_rows_or_have_their_own(reduce, device, without_decoding):
    """The other way round than in the layer."""
    assert_agrees(*operands(10, 2, 3, 2, 16, 24, per_head=reduce != "heads", device=device), reduce)


@pytest.mark.parametrize(
    "case", ["joint sets of two heads", "few experts, odd widths", "every expert", "a shared pool"]
)
@pytest.mark.parametrize("tokens", [0, 12])
def test_rows_may_be_padded(tokens, case, device, without_decoding, poisoned_allocations):
    sizes = CASES[case] | dict(tokens=tokens, d_in=CASES[case]["d_in"] - 7)
    x, weight, routing = operands(**sizes, per_head=True, device=device)
    padded = torch.nn.functional.pad(x, (0, 7)).detach().requires_grad_()
    found, expected = (moe_linear(rows, weight, routing, reduce="heads") for rows in (padded, x))
    torch.testing.assert_close(found, expected)
    of_padded, *found = gradients(found, padded, weight, routing.gates)
    of_x, *expected = gradients(expected, x, weight, routing.gates)
    assert not of_padded[..., x.shape[-1] :].any()
    torch.testing.assert_close([of_padded[..., : x.shape[-1]], *found], [of_x, *expected])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduce", ["k", "heads"])
def test_16_bit_operands(reduce, dtype, device, without_decoding):
    assert_agrees(*operands(20, 2, 3, 2, 32, 16, per_head=reduce == "heads", dtype=dtype, device=device), reduce)


@pytest.mark.parametrize("reduce", ["k", "heads", None])
def test_a_handful_of_tokens_reads_chosen_experts_only(reduce, device):
    x, weight, routing = operands(3, 2, 4, 2, 20, 24, device=device)
    routing.expert_indices.copy_(routing.expert_indices % 2 * 0 + torch.arange(2, device=device))
    with torch.no_grad():
        expected = moe_linear(x, weight, routing, reduce=reduce)
        weight[:, 2:] = torch.nan
        assert torch.equal(moe_linear(x, weight, routing, reduce=reduce), expected)
    with torch.no_grad():
        want = reference.moe_linear(x, weight, routing, reduce=reduce)
    assert relative_error(expected, want) < 1e-6


def test_an_unused_expert_has_zero_gradient(device, without_decoding, poisoned_allocations):
    x, weight, routing = operands(20, 2, 4, 2, 16, 16, device=device)
    routing.expert_indices.copy_(torch.tensor([3, 1], device=device))
    (grad,) = gradients(moe_linear(x, weight, routing, reduce="k"), weight)
    assert not grad[:, [0, 2]].any()
    assert grad[:, [1, 3]].isfinite().all()


def test_a_bad_row_spoils_only_experts_that_saw_it(device, without_decoding):
    x, weight, routing = operands(20, 1, 4, 1, 16, 16, device=device)
    routing.expert_indices.copy_(torch.arange(20, device=device).view(20, 1, 1) % 4)
    with torch.no_grad():
        x[0] = torch.nan  # expert 0
    y = moe_linear(x, weight, routing, reduce="k")
    (grad,) = gradients(y, weight)
    assert y[1:].isfinite().all()
    assert grad[:, 1:].isfinite().all()


def test_strided_operands_and_gradients(device, without_decoding):
    x, weight, routing = operands(20, 2, 3, 2, 24, 16, device=device)
    strided = torch.randn(48, 20, device=device)[::2].T.requires_grad_()
    swapped = torch.randn(2, 3, 16, 24, device=device).transpose(2, 3).requires_grad_()
    assert_agrees(strided, swapped, routing, "k")
    y = moe_linear(x, weight, routing, reduce="k")
    expanded = torch.ones(1, device=device).expand_as(y)
    found = torch.autograd.grad(y, (x, weight, routing.gates), expanded, retain_graph=True)
    contiguous = torch.autograd.grad(y, (x, weight, routing.gates), expanded.clone())
    for a, b in zip(found, contiguous, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("reduce", ["k", "heads", None])
def test_no_tokens(reduce, device):
    x, weight, routing = operands(0, 2, 3, 2, 8, 16, device=device)
    y = moe_linear(x, weight, routing, reduce=reduce)
    grad_x, grad_weight = gradients(y, x, weight)
    assert y.numel() == grad_x.numel() == 0
    assert not grad_weight.any()


def test_weights_keep_their_dtype(device, without_decoding):
    """float32 parameters under autocast: cast inside, gradients in float32."""
    x, weight, routing = operands(20, 1, 3, 2, 16, 16, device=device)
    with torch.autocast(device, torch.bfloat16):
        y = moe_linear(x, weight, routing, reduce="k")
    assert y.dtype == torch.bfloat16
    assert gradients(y, weight)[0].dtype == torch.float32


def test_only_needed_gradients_are_computed(device, without_decoding):
    x, weight, routing = operands(20, 1, 3, 2, 16, 16, device=device)
    frozen = Routing(routing.gates.detach(), routing.expert_indices, 3)
    y = moe_linear(x.detach(), weight, frozen, reduce="k")
    assert (
        relative_error(gradients(y, weight)[0], gradients(moe_linear(x, weight, routing, reduce="k"), weight)[0]) == 0
    )


def test_float64_is_refused(device):
    x, weight, routing = operands(3, 1, 3, 2, 16, 16, device=device)
    with pytest.raises(ValueError, match="float64"):
        moe_linear(x.double(), weight, routing, reduce="k")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [3, 40])
def test_operands_need_not_be_on_the_current_gpu(tokens):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert_agrees(*operands(tokens, 2, 3, 2, 16, 24, device="cuda:1"), "k")


def test_operators_run_on_the_device_of_their_operands(monkeypatch, device):
    devices = []
    monkeypatch.setattr(operator, "on_device", lambda device: devices.append(device.type) or nullcontext())
    x, weight, routing = operands(3, 2, 3, 2, 16, 24, device=device)
    gradients(moe_linear(x, weight, routing, reduce="k"), x)
    assert devices == [device] * 2  # forward and backward


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("reduce", ["k", "heads", "none"])
def test_what_a_compiler_is_told_holds(reduce, tokens, device):
    x, weight, routing = operands(tokens, 2, 3, 1, 16, 8, per_head=reduce == "heads", device=device)
    tensors, indices = of_other_strides(x, weight, routing.gates), routing.expert_indices
    options = (reduce, torch.float32)
    check_operator(module._forward, (*tensors, indices, *options, reduce == "k"))
    tensors = tuple(t.detach() for t in tensors)
    out, kept = module._forward(*tensors, indices, *options, reduce == "k")
    for needs in ((True, True, False), (False, False, True)):
        arguments = (torch.randn_like(out), *tensors, indices, kept, *options, *needs)
        check_operator(module._backward, arguments, differentiable=False)


def test_ten_lengths_compile_at_most_twice_and_without_a_break(device):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def step(x, weight, gates, indices):
        return moe_linear(x, weight, Routing(gates, indices, 3), reduce="k").sum()

    for tokens in range(2, 12):
        x, weight, routing = operands(tokens, 1, 3, 1, 16, 16, device=device)
        loss = step(x, weight, routing.gates, routing.expert_indices)
        grads = torch.autograd.grad(loss, (x, weight, routing.gates))
        eager = moe_linear(x, weight, routing, reduce="k").sum()
        for a, b in zip(grads, torch.autograd.grad(eager, (x, weight, routing.gates)), strict=True):
            assert torch.equal(a, b)
    assert counter.frame_count <= 2

import pytest
import torch

from switchhead.ops import router as reference
from switchhead.ops.triton import router as module
from switchhead.ops.triton.router import _route, _route_backward, route
from tests.helpers import check_operator, gradients, of_other_strides, relative_error


@pytest.fixture(autouse=True, params=["tiles of tokens", "a program for each token and head"])
def kernel(request, monkeypatch):
    monkeypatch.setattr(module, "_FEW_TOKENS", 0 if request.param == "tiles of tokens" else 100)


def operands(tokens=20, heads=2, experts=4, d_model=48, *, dtype=torch.float32, device="cpu"):
    x = torch.randn(tokens, d_model, device=device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(heads, experts, d_model, device=device) / d_model**0.5).requires_grad_()
    return x, weight


def assert_agrees(x, weight, k, **options) -> None:
    gates, indices = route(x, weight, k, **options)
    x64, weight64 = (t.detach().double().requires_grad_() for t in (x, weight))
    expected = reference.route(x64, weight64, k, **options)
    assert torch.equal(indices.long(), expected.expert_indices)
    assert relative_error(gates, expected.gates) < 1e-6
    cotangent = torch.randn_like(expected.gates)
    grad_x, grad_weight = gradients(gates, x, weight, cotangent=cotangent)
    expected_x, expected_weight = gradients(expected.gates, x64, weight64, cotangent=cotangent)
    assert grad_x.dtype == x.dtype
    assert (
        relative_error(grad_x, expected_x) < {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[x.dtype]
    )
    assert relative_error(grad_weight, expected_weight) < 1e-6


@pytest.mark.parametrize("gating", ["sigmoid", "softmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gates_and_gradients_have_float32_precision(dtype, gating, device):
    assert_agrees(*operands(dtype=dtype, device=device), 2, gating=gating)


@pytest.mark.parametrize("gating", ["sigmoid", "softmax"])
def test_dropped_experts_are_not_chosen_while_others_remain(gating, device):
    x, weight = operands(40, 3, 5, 41, device=device)
    dropped = torch.rand(40, 3, 5, device=device) < 0.4
    dropped[0] = True  # none remains: gates are 0
    assert_agrees(x, weight, 3, gating=gating, dropped=dropped)


@pytest.mark.parametrize(("heads", "experts", "k"), [(1, 1, 1), (1, 64, 4), (3, 3, 3)])
def test_any_number_of_experts(heads, experts, k, device):
    assert_agrees(*operands(10, heads, experts, device=device), k)


def test_ties_go_to_the_lowest_index(device):
    x, weight = operands(device=device)
    same = weight.detach()[:, :1].expand_as(weight)
    _, indices = route(x, same, 3)
    assert torch.equal(indices, torch.arange(3, device=device, dtype=torch.int32).expand_as(indices))


def test_routers_over_the_same_tokens_run_as_one(device):
    x, weight = operands(heads=4, device=device)
    gates, indices = route(x, weight, 2)
    parts = [route(x, part, 2) for part in weight.split(2)]
    assert torch.equal(gates, torch.cat([part[0] for part in parts], 1))
    assert torch.equal(indices, torch.cat([part[1] for part in parts], 1))


def test_indices_stay_in_range_when_scores_are_not_numbers(device):
    x, weight = operands(device=device)
    with torch.no_grad():
        x[3] = torch.nan
    _, indices = route(x, weight, 2)
    assert ((indices >= 0) & (indices < 4)).all()


@pytest.mark.filterwarnings("ignore:overflow encountered")  # NumPy's, in the interpreter
@pytest.mark.parametrize("gating", ["sigmoid", "softmax"])
def test_scores_of_minus_infinity_choose_every_expert_once_with_gate_zero(gating, device):
    x = torch.full((3, 48), 1e30, device=device)
    weight = torch.full((2, 4, 48), -1e30, device=device)
    weight[1, 2] = 0.0
    gates, indices = route(x, weight, 3, gating=gating)
    assert indices.sort(-1).values.diff(dim=-1).gt(0).all()
    assert gates[:, 0].eq(0).all()
    assert indices[:, 1, 0].eq(2).all()
    assert gates[:, 1, 0].gt(0).all()
    assert gates[:, 1, 1:].eq(0).all()


def test_no_tokens(device):
    x, weight = operands(tokens=0, device=device)
    gates, _ = route(x, weight, 2)
    assert not gradients(gates, weight)[0].any()


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("tokens", [0, 5])
def test_what_a_compiler_is_told_holds(tokens, softmax, device):
    x, weight = of_other_strides(*operands(tokens, device=device))
    check_operator(_route, (x, weight, 2, softmax, None))
    x, weight = x.detach(), weight.detach()
    outputs = _route(x, weight, 2, softmax, None)
    for needs in ((True, True), (True, False), (False, True)):
        arguments = (torch.randn_like(outputs[0]), x, weight, *outputs, softmax, *needs)
        check_operator(_route_backward, arguments, differentiable=False)

import pytest
import torch

from switchhead.ops.inputs import project_inputs
from switchhead.ops.triton.inputs import _project_inputs, _project_inputs_backward
from tests.helpers import check_operator, of_other_strides, relative_error

CASES = {
    "two sides": dict(routers=4, heads=2, experts=4, k=2, d=8),
    "one router for both": dict(routers=2, heads=2, experts=5, k=3, d=12),
    "values alone, every expert, odd width": dict(routers=3, heads=3, experts=3, k=3, d=11),
    "odd width of the model": dict(routers=4, heads=2, experts=4, k=2, d=8, d_model=21),
    "no token": dict(routers=4, heads=2, experts=4, k=2, d=8, tokens=0),
    "one token": dict(routers=4, heads=2, experts=4, k=2, d=8, tokens=1),
}


def run(backend, device, *, routers, heads, experts, k, d, tokens=37, d_model=24, dtype=torch.float32, dropout=0.0):
    generator = torch.Generator().manual_seed(1)

    def draw(*shape, fan_in=1):
        return (torch.randn(shape, generator=generator) / fan_in**0.5).to(device)

    x, plain = draw(tokens, d_model), draw(20, d_model, fan_in=24)
    weights = draw(routers, experts, d_model, fan_in=24), draw(heads, experts, d_model, d, fan_in=24)
    inputs = [t.requires_grad_() for t in (x, plain, *weights)]
    dropped = (draw(tokens, routers, experts).abs() < dropout) if dropout else None
    x = x.to(dtype)
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=dtype != torch.float32):
        rows, values, routing = project_inputs(x, *inputs[1:], k, dropped=dropped, backend=backend)
    outputs = [rows, values, routing.gates]
    loss = sum((t.float() * draw(*t.shape)).sum() for t in outputs)
    return dict(
        zip(["rows", "values", "gates", "grad x", "grad plain", "grad routers", "grad values"],
            [*outputs, *torch.autograd.grad(loss, inputs)], strict=True)
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's sigmoid of minus infinity
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("dropout", [0.0, 0.7])
def test_the_fused_operator_equals_its_parts(case, dropout, device, poisoned_allocations):
    expected, found = (run(backend, device, dropout=dropout, **case) for backend in ("reference", "triton"))
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        assert found[name].dtype == value.dtype, name
        assert relative_error(found[name], value) < 1e-5, name


def test_bfloat16_errors_are_at_most_twice_those_of_plain_torch(device):
    case = CASES["two sides"]
    exact = run("reference", device, **case)
    plain, found = (run(backend, device, dtype=torch.bfloat16, **case) for backend in ("gated", "triton"))
    for name, value in exact.items():
        assert relative_error(found[name], value) <= max(2 * relative_error(plain[name], value), 1e-6), name


@pytest.mark.parametrize("tokens", [0, 5])
def test_what_a_compiler_is_told_holds(tokens, device):
    shapes = ((tokens, 21), (20, 21), (4, 3, 21), (2, 3, 21, 5))
    tensors = of_other_strides(*(torch.randn(shape, device=device, requires_grad=True) for shape in shapes))
    check_operator(_project_inputs, (*tensors, 2, None))
    tensors = [t.detach() for t in tensors]
    outputs = _project_inputs(*tensors, 2, None)
    grads = (torch.randn_like(t) for t in outputs[:3])
    check_operator(_project_inputs_backward, (*grads, *tensors, *outputs[2:]), differentiable=False)


def test_outputs_that_nobody_differentiates_cost_nothing(device):
    x = torch.randn(8, 24, device=device)
    weights = [torch.randn(shape, device=device, requires_grad=True) for shape in ((4, 24), (2, 4, 24), (2, 4, 24, 8))]
    rows, *_ = project_inputs(x, *weights, 2, backend="triton")
    grads = torch.autograd.grad(rows.sum(), weights, allow_unused=True)
    assert relative_error(grads[0], x.sum(0).expand(4, 24)) < 1e-5
    assert all(grad is None or grad.eq(0).all() for grad in grads[1:])

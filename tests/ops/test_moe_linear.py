import pytest
import torch

from switchhead.ops import choose_backend, grouped, moe_linear
from switchhead.ops.gated import moe_linear as gated
from switchhead.routing import Routing
from tests.helpers import check_operator, gradients, of_other_strides, random_routing, relative_error

BACKENDS = ["gated", "grouped"]
REDUCTIONS = ["k", "heads", None]


@pytest.fixture(autouse=True, params=["choices", "sets"])
def rows_of_grouped(request, monkeypatch):
    """The grouped backend groups single choices, or sets of them, whatever the number of tokens."""
    monkeypatch.setattr(grouped, "_ROWS_OF_A_SET", 0 if request.param == "sets" else 10**9)


def by_loops(x, weight, routing, reduce):
    """The definition, one slot at a time."""
    tokens, heads, k = routing.gates.shape
    y = torch.zeros(tokens, heads, k, weight.shape[-1], dtype=x.dtype)
    for n in range(tokens):
        for h in range(heads):
            for j in range(k):
                row = x[n] if x.ndim == 2 else x[n, h]
                y[n, h, j] = row @ weight[h % weight.shape[0], routing.expert_indices[n, h, j]]
    if reduce is None:
        return y
    y = y * routing.gates[..., None]
    return y.sum(2) if reduce == "k" else y.sum((1, 2))


def operands(tokens=7, heads=3, experts=5, k=2, d_in=4, d_out=6, *, per_head=False, pool=False, **routing):
    x = torch.randn(tokens, *([heads] if per_head else []), d_in, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(1 if pool else heads, experts, d_in, d_out, dtype=torch.float64, requires_grad=True)
    return x, weight, random_routing(tokens, heads, experts, k, **routing)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_every_backend_computes_the_definition(backend, reduce, pool, per_head):
    x, weight, routing = operands(per_head=per_head, pool=pool)
    y = moe_linear(x, weight, routing, reduce=reduce, backend=backend)
    assert relative_error(y, by_loops(x, weight, routing, reduce)) < 1e-13


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_padding_of_rows_changes_nothing(backend):
    x, weight, routing = operands(per_head=True)
    padded = torch.nn.functional.pad(x, (0, 3)).detach().requires_grad_()
    found = moe_linear(padded, weight, routing, reduce="heads", backend=backend, padding=3)
    expected = moe_linear(x, weight, routing, reduce="heads", backend=backend)
    torch.testing.assert_close(found, expected)
    of_padded, of_x = (gradients(y, rows)[0] for y, rows in ((found, padded), (expected, x)))
    torch.testing.assert_close(of_padded, torch.nn.functional.pad(of_x, (0, 3)))
    assert not of_padded[..., -3:].any()


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_gradients_pass_gradcheck(backend, reduce):
    x, weight, routing = operands(tokens=4, heads=2, experts=3, per_head=True)
    indices = routing.expert_indices

    def function(x, weight, gates):
        return moe_linear(x, weight, Routing(gates, indices, 3), reduce=reduce, backend=backend)

    inputs = (x, weight, routing.gates)
    if reduce is None:  # gates take no part
        assert torch.autograd.gradcheck(lambda x, w: function(x, w, routing.gates.detach()), inputs[:2])
    else:
        assert torch.autograd.gradcheck(function, inputs)


SHAPES = {
    "one token": dict(tokens=1),
    "no tokens": dict(tokens=0),
    "all experts": dict(k=5),
    "one expert": dict(experts=1, k=1),
    "more experts than a word has bits": dict(experts=70),
    "odd widths": dict(d_in=41, d_out=76),
    "skewed": dict(tokens=40, skew=3.0),
    "more rows than a chunk": dict(tokens=1500, heads=1, experts=2, k=1),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_agree_with_reference_in_values_and_gradients(backend, reduce, shape, poisoned_allocations):
    x, weight, routing = operands(**shape)
    inputs = [x, weight] if reduce is None else [x, weight, routing.gates]
    expected = moe_linear(x, weight, routing, reduce=reduce, backend="reference")
    found = moe_linear(x, weight, routing, reduce=reduce, backend=backend)
    assert found.shape == expected.shape
    assert relative_error(found, expected) < 1e-12
    for name, a, b in zip(
        ["x", "weight", "gates"], gradients(found, *inputs), gradients(expected, *inputs), strict=False
    ):
        assert relative_error(a, b) < 1e-12, name


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_an_expert_nobody_chose_has_a_gradient_of_exactly_zero(backend, poisoned_allocations):
    x, weight, _ = operands(tokens=9, heads=2, experts=4, k=1)
    everyone_to_first = Routing(torch.rand(9, 2, 1, dtype=torch.float64), torch.zeros(9, 2, 1, dtype=torch.long), 4)
    y = moe_linear(x, weight, everyone_to_first, reduce="k", backend=backend)
    (grad,) = gradients(y, weight)
    assert grad[:, 1:].eq(0).all()
    assert grad[:, 0].abs().min() > 0


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_views_give_the_same_result_as_contiguous_tensors(backend):
    routing = random_routing(6, 2, 3, 2)
    wide = torch.randn(2, 5, 6, 12, dtype=torch.float64)
    x = wide[0, 0].T[::2, :].expand(2, 6, 6).transpose(0, 1)  # [6, 2, 6], expanded and transposed
    weight = torch.randn(3, 2, 8, 6, dtype=torch.float64).permute(1, 0, 3, 2)
    found = moe_linear(x, weight, routing, reduce="heads", backend=backend)
    expected = moe_linear(x.contiguous(), weight.contiguous(), routing, reduce="heads", backend=backend)
    assert relative_error(found, expected) < 1e-14


@pytest.mark.parametrize("backend", BACKENDS)
def test_expanded_output_gradients_are_accepted(backend):
    x, weight, routing = operands()
    a = torch.autograd.grad(moe_linear(x, weight, routing, reduce="k", backend=backend).sum(), (x, weight))
    ones = torch.ones(7, 3, 6, dtype=torch.float64)
    b = torch.autograd.grad(moe_linear(x, weight, routing, reduce="k", backend=backend), (x, weight), ones)
    assert all(relative_error(p, q) < 1e-14 for p, q in zip(a, b, strict=True))


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("reduce", ["k", "heads", "none"])
def test_what_a_compiler_is_told_of_grouped_holds(reduce, tokens, strided):
    x, weight, routing = operands(tokens=tokens, per_head=reduce == "heads")
    tensors = (x, weight, routing.gates)
    if strided:
        tensors = of_other_strides(*tensors)
    check_operator(grouped._grouped, (*tensors, routing.expert_indices, reduce, True))
    tensors = tuple(t.detach() for t in tensors)
    y, kept = grouped._grouped(*tensors, routing.expert_indices, reduce, True)
    arguments = (torch.randn_like(y), *tensors, routing.expert_indices, kept, reduce)
    check_operator(grouped._grouped_backward, arguments, differentiable=False)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_result_dtype_is_the_promotion_outside_autocast_and_autocasts_inside(backend, weight_dtype, x_dtype):
    x, weight, routing = operands(dtype=torch.float32)
    x, weight = x.detach().to(x_dtype).requires_grad_(), weight.detach().to(weight_dtype).requires_grad_()
    y = moe_linear(x, weight, routing, reduce="k", backend=backend)
    assert y.dtype == torch.promote_types(x_dtype, weight_dtype)
    y.sum().backward()
    assert (x.grad.dtype, weight.grad.dtype) == (x_dtype, weight_dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert moe_linear(x, weight, routing, reduce="k", backend=backend).dtype == torch.bfloat16
        y64 = moe_linear(x.double(), weight.double(), routing, reduce="k", backend=backend)
        assert y64.dtype == torch.float64


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_low_precision_error_is_at_most_twice_that_of_plain_torch(backend, reduce):
    x, weight, routing = operands(tokens=64, heads=2, experts=4, d_in=32, d_out=24)
    exact = moe_linear(x, weight, routing, reduce=reduce, backend="reference")
    low = (x.detach().bfloat16(), weight.detach().bfloat16())
    gates = Routing(routing.gates.detach().float(), routing.expert_indices, routing.n_experts)
    plain = gated(*low, Routing(gates.gates.bfloat16(), gates.expert_indices, 4), reduce=reduce)
    found = moe_linear(*low, gates, reduce=reduce, backend=backend)
    assert relative_error(found, exact) <= 2 * relative_error(plain, exact)


def test_meta_tensors_give_the_shape_of_the_result():
    routing = Routing(torch.empty(5, 2, 2, device="meta"), torch.empty(5, 2, 2, dtype=torch.long, device="meta"), 4)
    x, weight = torch.empty(5, 8, device="meta"), torch.empty(2, 4, 8, 3, device="meta")
    for reduce, shape in (("k", (5, 2, 3)), ("heads", (5, 3)), (None, (5, 2, 2, 3))):
        for backend in BACKENDS:
            assert moe_linear(x, weight, routing, reduce=reduce, backend=backend).shape == shape


def test_bad_arguments_are_named():
    x, weight, routing = operands()
    with pytest.raises(ValueError, match=r"x must be \[7, 4\]"):
        moe_linear(x[:, :3], weight, routing, reduce="k")
    with pytest.raises(ValueError, match=r"weight must be \[3 or 1, 5, d_in, d_out\]"):
        moe_linear(x, weight[:2], routing, reduce="k")
    with pytest.raises(ValueError, match="padding must be 0 to 0 for d_in=4 and reduce='k'; got 2"):
        moe_linear(x, weight, routing, reduce="k", padding=2)
    with pytest.raises(ValueError, match="padding must be 0 to 12 for d_in=4 and reduce='heads'; got 13"):
        moe_linear(x, weight, routing, reduce="heads", padding=13)
    with pytest.raises(ValueError, match="reduce='sum' is unknown"):
        moe_linear(x, weight, routing, reduce="sum")
    with pytest.raises(ValueError, match="backend='fast' is unknown"):
        moe_linear(x, weight, routing, reduce="k", backend="fast")
    with pytest.raises(ValueError, match="floating point"):
        moe_linear(torch.zeros(7, 4, dtype=torch.long), weight, routing, reduce="k")
    with pytest.raises(ValueError, match="one device"):
        moe_linear(x.to("meta"), weight, routing, reduce="k")
    with pytest.raises(ValueError, match="one shape"):
        Routing(routing.gates, routing.expert_indices[:, :1], 5)
    with pytest.raises(ValueError, match="floating point gates and int32 or int64"):
        Routing(routing.gates, routing.gates, 5)


def test_auto_gives_a_reason_and_runs_what_it_names():
    x, weight, routing = operands()
    choice = choose_backend(x, weight, routing)
    assert choice.backend in BACKENDS
    assert "4 x 6" in choice.reason  # E / k would be high enough
    auto = moe_linear(x, weight, routing, reduce="k")
    assert torch.equal(auto, moe_linear(x, weight, routing, reduce="k", backend=choice.backend))

import pytest
import torch

from switchhead.ops.availability import as_on_a_gpu
from switchhead.ops.inputs import project_inputs
from switchhead.ops.rotary import rotary_table
from switchhead.ops.triton import inputs
from switchhead.ops.triton.inputs import _project_inputs, _project_inputs_backward
from tests.helpers import check_operator, of_other_strides, relative_error

CASES = {
    "two sides": dict(routers=4, heads=2, experts=4, k=2, d=8),
    "one expert for a token": dict(routers=4, heads=2, experts=4, k=1, d=8),
    "more sets than groups": dict(routers=2, heads=1, experts=10, k=5, d=8),
    "one router for both": dict(routers=2, heads=2, experts=5, k=3, d=12),
    "values alone, every expert, odd width": dict(routers=3, heads=3, experts=3, k=3, d=11),
    "odd width of the model": dict(routers=4, heads=2, experts=4, k=2, d=8, d_model=21),
    "rotated": dict(routers=4, heads=2, experts=4, k=2, d=11, rotated=3),
    "the paper's 47M": dict(routers=4, heads=2, experts=5, k=2, d=76, d_model=412, rotated=38, tokens=20),
    "heads of 41 channels": dict(routers=4, heads=2, experts=5, k=3, d=41, d_model=412, rotated=20, tokens=20),
    "no token": dict(routers=4, heads=2, experts=4, k=2, d=8, tokens=0),
    "one token": dict(routers=4, heads=2, experts=4, k=2, d=8, tokens=1),
}


def run(
    backend,
    device,
    *,
    routers,
    heads,
    experts,
    k,
    d,
    tokens=36,
    d_model=24,
    dtype=torch.float32,
    dropout=0.0,
    rotated=0,
):
    generator = torch.Generator().manual_seed(1)

    def draw(*shape, fan_in=1):
        return (torch.randn(shape, generator=generator) / fan_in**0.5).to(device)

    x, *plain = draw(tokens, d_model), *(draw(heads * d, d_model, fan_in=24) for _ in range(2))
    weights = draw(routers, experts, d_model, fan_in=24), draw(heads, experts, d_model, d, fan_in=24)
    inputs = [t.requires_grad_() for t in (x, *plain, *weights)]
    dropped = (draw(tokens, routers, experts).abs() < dropout) if dropout else None
    rotation = rotary_table(torch.arange(max(tokens // 2, 1), device=device), rotated, 10.0, torch.float32)
    x = x.to(dtype)
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=dtype != torch.float32):
        *projected, sides = project_inputs(
            x, *inputs[1:], k, rotation=rotation if rotated else None, dropped=dropped, backend=backend
        )
    outputs = [*(rows[..., :d] for rows in projected), torch.cat([side.gates for side in sides], dim=1)]
    loss = sum((t.float() * draw(*t.shape)).sum() for t in outputs)
    names = ["queries", "keys", "values", "gates", "of x", "of queries", "of keys", "of routers", "of values"]
    return dict(zip(names, [*outputs, *torch.autograd.grad(loss, inputs)], strict=True))


@pytest.mark.parametrize(("experts", "k"), [(4, 2), (5, 3)])  # kernels on the chosen experts, and products with all
@pytest.mark.parametrize(("d", "width"), [(20, 32), (11, 16), (7, 16)])
@pytest.mark.parametrize("tokens", [36, 1])
def test_rotated_heads_are_as_wide_as_attention_wants_them(
    tokens, d, width, experts, k, device, monkeypatch, poisoned_allocations
):
    case = dict(routers=4, heads=2, experts=experts, k=k, d=d, tokens=tokens, rotated=d // 2)
    expected = run("reference", device, **case)
    made = []
    fused = inputs._project_inputs
    monkeypatch.setattr(inputs, "_project_inputs", lambda *args: made.append(fused(*args)) or made[-1])
    with as_on_a_gpu():
        found = run("triton", device, **case)
    for rows in made[0][:3]:  # queries, keys, values
        assert rows.shape[-1] == width
        assert not rows[..., d:].any()
    for name, value in expected.items():
        assert relative_error(found[name], value) < 1e-5, name


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's sigmoid of minus infinity
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("dropout", [0.0, 0.7])
def test_the_fused_operator_equals_its_parts(kind, dropout, device, poisoned_allocations):
    case = CASES[kind]
    if dropout and case.get("d_model") == 412 and device == "cpu":
        pytest.skip("interpreted slowly; smaller models drop experts too")
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


def operands(tokens, device, dtype=torch.float32):
    shapes = ((tokens, 21), (10, 21), (10, 21), (4, 3, 21), (2, 3, 21, 5))
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("tokens", [0, 6])
@pytest.mark.parametrize("is_memory", [False, True])
def test_what_a_compiler_is_told_holds(tokens, is_memory, device):
    tensors = of_other_strides(*operands(tokens, device))
    if is_memory:
        tensors = [tensors[0].detach(), None, *tensors[2:]]
    table = rotary_table(torch.arange(3, device=device), 2, 10.0, torch.float32)
    options = (2, *table, torch.float32, 8, True, None)
    check_operator(_project_inputs, (*tensors, *options))
    x, *weights = (t if t is None else t.detach() for t in tensors)
    q, k, v, gates, indices, kept, copy = _project_inputs(x, *weights, *options)
    grads = (torch.randn_like(t) for t in (q, k, v, gates))
    arguments = (*grads, copy, *weights, *table, gates, indices, kept, v, torch.float32, not is_memory)
    check_operator(_project_inputs_backward, arguments, differentiable=False)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_tokens_of_a_memory_need_neither_queries_nor_a_gradient(tokens, backend, device):
    x, queries, keys, routers, values = operands(tokens, device)
    weights = (keys, routers[2:], values)  # the source side's routers
    q, k, v, (side,) = project_inputs(x.detach(), None, *weights, 2, backend=backend)
    _, *expected, (_, expected_side) = project_inputs(x, queries, keys, routers, values, 2, backend="reference")
    assert q is None
    assert torch.equal(side.expert_indices, expected_side.expert_indices)
    cotangents = [torch.randn(tokens, 2, 5, device=device) for _ in range(2)]

    def of_weights(rows):
        loss = sum((r[..., :5] * c).sum() for r, c in zip(rows, cotangents, strict=True))
        return torch.autograd.grad(loss, (keys, routers, values))

    pairs = zip((k, v, *of_weights((k, v))), (*expected, *of_weights(expected)), strict=True)
    for found, wanted in pairs:
        assert relative_error(found[..., : wanted.shape[-1]], wanted) < 1e-5


def router_gradients(score, dtype, device, backends):
    """Gradients of routers that give all experts nearly one score; scaled up as float16 needs it."""
    x, queries, keys, routers, values = (t.detach() for t in operands(40, device))
    routers = 0.1 * routers
    x[:, 0], routers[:, :, 0] = 1.0, score
    for backend, to in backends:
        leaf = routers.to(torch.promote_types(to, torch.float32), copy=True).requires_grad_()
        rows = (t.to(to) for t in (x, queries, keys))
        rows = project_inputs(*rows, leaf, values.to(to), 2, backend=backend)[2][..., :5].double()
        cotangent = 2.0**10 * torch.linspace(-1, 1, rows.numel(), device=device).view_as(rows)
        yield torch.autograd.grad((rows * cotangent).sum(), leaf)[0]


@pytest.mark.parametrize(
    ("dtype", "score"),
    [(torch.float32, -14.0), (torch.float32, -60.0), (torch.bfloat16, -60.0), (torch.float16, -14.0)],
)
def test_gradients_of_routers_with_small_gates_are_as_accurate_as_plain_torchs(score, dtype, device):
    """The row of the first slot may come from dividing a sum by the slot's gate."""
    backends = ("reference", torch.float64), ("gated", dtype), ("triton", dtype)
    exact, plain, found = router_gradients(score, dtype, device, backends)
    assert relative_error(found, exact) <= 2 * relative_error(plain, exact) + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_gradients_repeat_bit_for_bit(dtype, device, poisoned_allocations):
    case = CASES["rotated"] | {"tokens": 600 if device == "cuda" else 60}  # the interpreter runs one program at a time
    first, second = (run("triton", device, dtype=dtype, **case) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(second[name], value), name


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("score", [-88.0, -100.0, -200.0])
def test_gradients_of_routers_vanish_with_their_gates(score, dtype, device):
    (found,) = router_gradients(score, dtype, device, [("triton", dtype)])
    assert found.abs().max() < 1e-25


def test_tables_of_any_strides_rotate_alike(device):
    tensors = [t.detach() for t in operands(6, device)]
    table = rotary_table(torch.arange(3, device=device), 4, 10.0, torch.float32)
    parts = tuple(t[:, 1:3] for t in table)
    found = project_inputs(*tensors, 2, rotation=parts, backend="triton")
    expected = project_inputs(*tensors, 2, rotation=tuple(t.contiguous() for t in parts), backend="triton")
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_bad_arguments_are_named(device):
    x, queries, keys, routers, values = operands(6, device)
    with pytest.raises(ValueError, match=r"routers \[H or 2 \* H, E, D\].*got \(6, 20\)"):
        project_inputs(x[:, :20], queries, keys, routers, values, 2)
    with pytest.raises(ValueError, match=r"\(3, 3, 21\) and"):
        project_inputs(x, queries, keys, routers[:3], values, 2)
    with pytest.raises(ValueError, match="k=4 experts cannot be chosen out of 3"):
        project_inputs(x, queries, keys, routers, values, 4)
    with pytest.raises(ValueError, match="not float64"):
        project_inputs(x, queries, keys, routers.double(), values, 2, backend="triton")
    for positions, half in ((4, 2), (3, 3)):
        table = rotary_table(torch.arange(positions, device=device), half, 10.0, torch.float32)
        with pytest.raises(ValueError, match=r"divisor of the 6 tokens and half at most 2"):
            project_inputs(x, queries, keys, routers, values, 2, rotation=table)


def test_a_second_derivative_is_refused(device):
    tensors = operands(4, device)
    rows, *_ = project_inputs(*tensors, 2, backend="triton")
    (grad,) = torch.autograd.grad(rows.square().sum(), tensors[1], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        grad.sum().backward()


@pytest.mark.parametrize("tokens", [63, 64, 65])
def test_inference_mode_and_no_grad_give_the_values_of_training(tokens, device):
    tensors = operands(tokens, device)
    *expected, _ = project_inputs(*tensors, 2, backend="triton")
    for without_gradients in (torch.no_grad(), torch.inference_mode()):
        with without_gradients:
            *found, _ = project_inputs(*tensors, 2, backend="triton")
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_equals_training(dtype, device):
    tensors = operands(3, device, dtype)
    *trained, _ = project_inputs(*tensors, 2, backend="triton")
    with torch.no_grad():
        *decoded, _ = project_inputs(*tensors, 2, backend="triton")
    for found, expected in zip(decoded, trained, strict=True):
        assert relative_error(found, expected) < (1e-6 if dtype == torch.float32 else 8e-3)


def test_outputs_that_nobody_differentiates_cost_nothing(device):
    x, *weights = operands(8, device)
    queries, *_ = project_inputs(x, *weights, 2, backend="triton")
    grads = torch.autograd.grad(queries.sum(), weights, allow_unused=True)
    assert relative_error(grads[0], x.sum(0).expand(10, 21)) < 1e-5
    assert all(grad is None or grad.eq(0).all() for grad in grads[1:])

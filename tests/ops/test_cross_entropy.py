import pytest
import torch
from torch.nn import functional as F

from switchhead.ops import chunked_cross_entropy, cross_entropy
from switchhead.ops.cross_entropy import _forward
from tests.helpers import check_operator, gradients, relative_error

POSITIONS, WIDTH, VOCABULARY = 37, 12, 53


def inputs(dtype=torch.float64, bias=True, positions=POSITIONS):
    hidden = torch.randn(positions, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.randint(VOCABULARY, (positions,))
    targets[::5] = -100
    return hidden, weight, torch.randn(VOCABULARY, dtype=dtype, requires_grad=True) if bias else None, targets


def plain(hidden, weight, bias, targets, **options):
    return F.cross_entropy(F.linear(hidden, weight, bias), targets, **options)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk_length", [1, 10, 37, 100])
def test_values_and_gradients_are_those_of_the_plain_loss(chunk_length, reduction, bias):
    hidden, weight, bias, targets = inputs(bias=bias)
    tensors = [t for t in (hidden, weight, bias) if t is not None]
    found = chunked_cross_entropy(hidden, weight, bias, targets, chunk_length=chunk_length, reduction=reduction)
    expected = plain(hidden, weight, bias, targets, reduction=reduction)
    assert found.shape == expected.shape
    assert relative_error(found, expected) < 1e-13
    for a, b in zip(gradients(found, *tensors), gradients(expected, *tensors), strict=True):
        assert relative_error(a, b) < 1e-12


def test_gradients_pass_gradcheck():
    *tensors, targets = inputs(positions=7)
    assert torch.autograd.gradcheck(lambda *t: chunked_cross_entropy(*t, targets, chunk_length=3), tensors)


def test_another_class_may_be_ignored_and_all_ignored_is_the_plain_losss_nan():
    hidden, weight, bias, targets = inputs()
    found = chunked_cross_entropy(hidden, weight, bias, targets.clamp(min=0), chunk_length=8, ignore_index=0)
    assert relative_error(found, plain(hidden, weight, bias, targets.clamp(min=0), ignore_index=0)) < 1e-13
    nothing = torch.full_like(targets, -100)
    assert chunked_cross_entropy(hidden, weight, bias, nothing, chunk_length=8).isnan()
    assert chunked_cross_entropy(hidden, weight, bias, nothing, chunk_length=8, reduction="sum") == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_narrow_dtypes_err_no_more_than_twice_the_plain_loss(dtype, autocast):
    *exact, targets = inputs()
    tensors = [t.detach().to(torch.float32 if autocast else dtype).requires_grad_() for t in exact]
    with torch.autocast("cpu", torch.bfloat16 if dtype == torch.float32 else dtype, enabled=autocast):
        found = chunked_cross_entropy(*tensors, targets, chunk_length=10)
        rough = plain(*tensors, targets)
    assert found.dtype == torch.float32
    expected = plain(*exact, targets)
    results = [(found, *gradients(found, *tensors)), (rough, *gradients(rough, *tensors))]
    for a, b, c in zip(*results, (expected, *gradients(expected, *exact)), strict=True):
        luck = 1e-3 if a.ndim == 0 else 1e-6  # one number may come out right by chance
        assert relative_error(a, c) <= 2 * relative_error(b, c) + luck


def test_extreme_scores_stay_finite():
    hidden, weight, bias, targets = inputs(torch.float32)
    with torch.no_grad():
        weight.mul_(1e4)
    found, expected = (
        chunked_cross_entropy(hidden, weight, bias, targets, chunk_length=8),
        plain(hidden, weight, bias, targets),
    )
    assert relative_error(found, expected) < 1e-5
    assert all(g.isfinite().all() for g in gradients(found, hidden, weight, bias))


def test_scores_exist_for_one_chunk_at_a_time_and_are_not_kept(monkeypatch):
    hidden, weight, bias, targets = inputs()
    shapes, kept = [], []
    scores = cross_entropy._scores
    monkeypatch.setattr(cross_entropy, "_scores", lambda *t: shapes.append(t[0].shape[0]) or scores(*t))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        loss = chunked_cross_entropy(hidden, weight, bias, targets, chunk_length=10)
    loss.backward()
    assert shapes == [10, 10, 10, 7] * 2  # forward, and once more in backward
    inputs_and_one_number_a_position = {tuple(t.shape) for t in (hidden, weight, bias, targets)}
    assert set(kept) <= inputs_and_one_number_a_position | {()}


def test_the_operator_is_what_a_compiler_is_told():
    hidden, weight, bias, targets = inputs(torch.float32)
    check_operator(_forward, (hidden, weight, bias, targets, 10, -100))
    check_operator(_forward, (hidden, weight, None, targets, 10, -100))


def test_it_compiles_to_one_graph_for_any_number_of_positions():
    torch.compiler.reset()
    compiled = torch.compile(
        lambda *t: chunked_cross_entropy(*t, chunk_length=8), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for positions in (9, 20, 33):
        *tensors, targets = inputs(torch.float32, positions=positions)
        found, expected = compiled(*tensors, targets), plain(*tensors, targets)
        assert relative_error(found, expected) < 1e-5
        for a, b in zip(gradients(found, *tensors), gradients(expected, *tensors), strict=True):
            assert relative_error(a, b) < 1e-5


def test_no_positions_have_no_loss():
    hidden, weight, bias, targets = inputs(positions=0)
    total = chunked_cross_entropy(hidden, weight, bias, targets, chunk_length=8, reduction="sum")
    assert total == 0
    assert all(g.eq(0).all() for g in gradients(total, hidden, weight, bias))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(chunk_length=0), "chunk_length=0 must be at least 1"),
        (dict(reduction="max"), "reduction='max' is unknown"),
        (
            dict(targets=torch.zeros(3, dtype=torch.long)),
            r"targets \[positions\]; got \(37, 12\), \(53, 12\) and \(3,\)",
        ),
        (dict(weight=torch.zeros(53, 11)), "needs hidden"),
    ],
)
def test_bad_arguments_are_named(change, message):
    hidden, weight, bias, targets = inputs()
    arguments = dict(hidden=hidden, weight=weight, bias=bias, targets=targets, chunk_length=8) | change
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(**arguments)

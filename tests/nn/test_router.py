"""The router module: options that `switchhead.ops.route` does not know."""

import pytest
import torch
from torch import nn

from switchhead import SwitchHeadAttention
from switchhead.nn import Router
from switchhead.nn.reference import switchhead_reference
from switchhead.ops import route
from tests.helpers import gradients, relative_error


def router(**options):
    return Router(**{**dict(d_model=10, n_heads=2, n_experts=5, k=3), **options}).double()


def tokens(n=40):
    return torch.randn(n, 10, dtype=torch.float64)


@pytest.mark.parametrize("gating", ["sigmoid", "softmax", "softmax_chosen"])
def test_threshold_zero_is_exactly_top_k(gating):
    module, x = router(gating=gating, threshold=0.0), tokens()
    found, expected = module(x), route(x, module.weight, 3, gating=gating)
    assert torch.equal(found.gates, expected.gates)
    assert torch.equal(found.expert_indices, expected.expert_indices)
    assert found.average_k() == 3


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.9])
def test_a_threshold_keeps_the_gates_above_it_and_no_gradient_of_others(threshold):
    plain, dynamic, x = router(), router(threshold=threshold), tokens()
    dynamic.load_state_dict(plain.state_dict())
    all_k, used = plain(x), dynamic(x)
    above = all_k.gates > threshold
    assert 0 < above.sum() < above.numel()
    assert torch.equal(used.gates, torch.where(above, all_k.gates, 0.0))
    assert torch.equal(used.expert_indices, all_k.expert_indices)
    assert used.average_k().item() == pytest.approx(above.sum().item() / (40 * 2))
    (found,) = gradients(used.gates, dynamic.weight, cotangent=torch.ones_like(used.gates))
    (expected,) = gradients(all_k.gates, plain.weight, cotangent=above.double())
    assert relative_error(found, expected) < 1e-13


def test_softmax_over_the_chosen_sums_to_one_and_matches_its_definition():
    module, x = router(gating="softmax_chosen"), tokens()
    routing = module(x)
    scores = torch.einsum("nd,hed->nhe", x, module.weight)
    expected = scores.gather(-1, routing.expert_indices).softmax(-1)
    assert relative_error(routing.gates, expected) < 1e-13
    for a, b in zip(gradients(routing.gates, module.weight), gradients(expected, module.weight), strict=True):
        assert relative_error(a, b) < 1e-12


@pytest.mark.parametrize("gating", ["sigmoid", "softmax", "softmax_chosen"])
def test_a_token_whose_experts_were_all_dropped_has_gates_and_gradients_of_zero(gating):
    module, x = router(gating=gating, expert_dropout=0.9), tokens(200)
    gates = module(x).gates
    nothing = gates.eq(0).all(-1)
    assert nothing.any()
    (gradient,) = torch.autograd.grad(gates.sum(), module.weight)
    assert gradient.isfinite().all()


def test_scores_are_those_that_chose_whatever_the_padding():
    module, x = router(), tokens()
    scores, routing = module.scores(x), module(x)
    assert torch.equal(scores.sort(dim=-1, descending=True, stable=True).indices[..., :3], routing.expert_indices)
    assert relative_error(module.scores(nn.functional.pad(x, (0, 6))), scores) < 1e-13
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module.float().scores(x.bfloat16()).dtype == torch.float32


def test_normalised_rows_have_one_norm_and_keep_the_deviation():
    module = Router(d_model=300, n_heads=1, n_experts=20, k=2, normalize_rows=True, init_scale=0.5)
    norms = module.weight.norm(dim=-1)
    assert (norms / norms.mean() - 1).abs().max() < 1e-6
    assert module.weight.std().item() == pytest.approx(0.5 / 300**0.5, rel=0.03)


@pytest.mark.parametrize("experts", ["vo", "qkvo", "o"])
@pytest.mark.parametrize("shared", [False, True])
def test_dynamic_k_in_a_layer_is_the_paper_without_the_weak_experts(shared, experts, monkeypatch):
    sizes = dict(d_model=10, n_heads=2, n_experts=4, d_head=5, k=3, positions="rotary")
    module = SwitchHeadAttention(
        **sizes, shared_selection=shared, expert_projections=experts, router_threshold=0.5
    ).double()
    x = torch.randn(2, 5, 10, dtype=torch.float64, requires_grad=True)
    monkeypatch.setattr("switchhead.nn.reference._choose", without_weak_experts)
    found, expected = module(x), switchhead_reference(module, x)
    tensors = [x, *module.parameters()]
    assert relative_error(found, expected) < 1e-12
    for a, b in zip(gradients(found, *tensors), gradients(expected, *tensors), strict=True):
        assert relative_error(a, b) < 1e-11


def without_weak_experts(layer, side, token, h, softmax_gating):
    """In place of the reference's choice: the experts whose gate exceeds one half, at most k."""
    router = layer.destination_router if side == "destination" or layer.shared_selection else layer.source_router
    if router is None:
        return []
    gates = [(1 / (1 + torch.exp(-(token @ row))), e) for e, row in enumerate(router.weight[h])]
    best = sorted(gates, key=lambda pair: -pair[0].item())[: layer.k]
    return [(e, gate) for gate, e in best if gate > 0.5] or [(0, token.new_zeros(()))]


def test_dynamic_k_is_off_by_default_and_then_changes_no_bit():
    sizes = dict(d_model=10, n_heads=2, n_experts=4, d_head=5, k=3, positions="rotary")
    plain, zero = SwitchHeadAttention(**sizes), SwitchHeadAttention(**sizes, router_threshold=0.0)
    zero.load_state_dict(plain.state_dict())
    x = torch.randn(2, 5, 10)
    assert torch.equal(plain(x), zero(x))


@pytest.mark.parametrize("threshold", [-0.1, 1.0])
def test_thresholds_that_gates_cannot_have_are_refused(threshold):
    with pytest.raises(ValueError, match=f"router threshold={threshold} must be at least 0"):
        router(threshold=threshold)

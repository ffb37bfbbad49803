"""Naive head gating against equations 4-6 as loops; what all attention layers share is in test_attention.py."""

import pytest
import torch

from switchhead.nn import HeadGatedAttention, MultiHeadAttention
from tests.helpers import gradients, relative_error


def layer(**options):
    return HeadGatedAttention(**{**dict(d_model=10, n_heads=4, d_head=5, k=2), **options}).double()


def head_by_head(module, x):
    """`[B, H, T, D]`: what dense attention with one head alone gives, by a layer that knows no gates."""
    outputs = []
    for h in range(module.n_heads):
        rows = slice(h * module.d_head, (h + 1) * module.d_head)
        positions = module.positions
        one = MultiHeadAttention(d_model=10, n_heads=1, d_head=5, positions=positions).double()
        state = {f"{p}_proj.weight": getattr(module, f"{p}_proj").weight[rows] for p in "qkv"}
        state["o_proj.weight"] = module.o_proj.weight[:, rows]
        if hasattr(module, "position_proj"):
            state["position_proj.weight"] = module.position_proj.weight[rows]
            state |= {name: getattr(module, name)[h : h + 1] for name in ("content_bias", "position_bias")}
            state["scale"] = module.scale
        outputs.append(torch.func.functional_call(one, state, (x,)))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("gating", ["sigmoid", "softmax"])
@pytest.mark.parametrize("positions", ["none", "rotary", "relative"])
def test_each_query_uses_the_gated_best_heads_of_dense_attention(positions, gating):
    module = layer(positions=positions, gating=gating)
    x = torch.randn(2, 5, 10, dtype=torch.float64, requires_grad=True)
    heads = head_by_head(module, x)
    rows = []
    for b in range(2):
        for t in range(5):
            scores = [row @ x[b, t] for row in module.router.weight[0]]
            best = sorted(range(4), key=lambda h: -scores[h].item())[:2]
            total = sum(torch.exp(score) for score in scores)
            gates = {h: torch.exp(scores[h]) / total if gating == "softmax" else torch.sigmoid(scores[h]) for h in best}
            rows.append(sum(gate * heads[b, h, t] for h, gate in gates.items()))
    expected = torch.stack(rows).view(2, 5, 10)
    found, tensors = module(x), [x, *module.parameters()]
    assert relative_error(found, expected) < 1e-12
    for a, b in zip(gradients(found, *tensors), gradients(expected, *tensors), strict=True):
        assert relative_error(a, b) < 1e-11


def test_a_reset_draws_the_router_too_with_its_own_deviation():
    module = HeadGatedAttention(d_model=256, n_heads=16, d_head=8, k=2, init_scale=0.5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
    module.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    assert module.router.weight.std().item() == pytest.approx(0.5 / 256**0.5, rel=0.05)


def test_more_heads_than_there_are_cannot_be_chosen():
    with pytest.raises(ValueError, match="k=5 heads cannot be chosen out of n_heads=4"):
        layer(k=5)
    with pytest.raises(ValueError, match="gating='softmax_chosen' is unknown"):
        layer(gating="softmax_chosen")

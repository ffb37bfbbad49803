"""Naive head gating: dense heads of which each query uses a few (the paper's equations 4-6, without a table)."""

from __future__ import annotations

from switchhead.recipes.base import Recipe
from switchhead.recipes.registry import experiment
from switchhead.recipes.transformer_xl import c4_262m_dense, wikitext103_47m_dense


@experiment()
def wikitext103_47m_head_gating() -> Recipe:
    """Four of ten heads for each query."""
    return wikitext103_47m_dense().with_model(attention="head_gating", num_experts_per_tok=4)


@experiment()
def c4_262m_head_gating() -> Recipe:
    """Four of sixteen heads for each query."""
    return c4_262m_dense().with_model(attention="head_gating", num_experts_per_tok=4)

"""Mixture of attention heads, which SwitchHead is compared with (table 1).

The paper does not print these models' sizes. Head width and number of experts are fitted to its multiply-accumulates
(at 262M the number of experts is a guess: the figures do not determine it), the feed-forward is as wide as makes the
model as large as its dense twin, and the weights of the auxiliary losses are a guess.
"""

from __future__ import annotations

from switchhead.accounting import count_parameters, match_d_ff
from switchhead.recipes.base import Recipe
from switchhead.recipes.registry import experiment
from switchhead.recipes.transformer_xl import wikitext103_47m_dense, wikitext103_262m_dense


@experiment(table="1")
def wikitext103_47m_moa_h2() -> Recipe:
    """Two of ten experts active. Guesses: weights of the auxiliary losses; d_ff by matching parameters."""
    return _47m(active_heads=2)


@experiment(table="1")
def wikitext103_47m_moa_h4() -> Recipe:
    """Four of ten experts active. Guesses: weights of the auxiliary losses; d_ff by matching parameters."""
    return _47m(active_heads=4)


@experiment(table="1")
def wikitext103_47m_moa_h6() -> Recipe:
    """Six of ten experts active. Guesses: weights of the auxiliary losses; d_ff by matching parameters."""
    return _47m(active_heads=6)


@experiment(table="1")
def wikitext103_47m_moa_h8() -> Recipe:
    """Eight of ten experts active. Guesses: weights of the auxiliary losses; d_ff by matching parameters."""
    return _47m(active_heads=8)


@experiment(table="1")
def wikitext103_262m_moa_h2() -> Recipe:
    """Two of 16 experts active. Guesses: 16, d_head out of 143-148, auxiliary losses; d_ff by matching parameters."""
    return _262m(active_heads=2)


@experiment(table="1")
def wikitext103_262m_moa_h4() -> Recipe:
    """Four of 16 experts active. Guesses: 16, d_head out of 143-148, auxiliary losses; d_ff by matching parameters."""
    return _262m(active_heads=4)


@experiment(table="1")
def wikitext103_262m_moa_h8() -> Recipe:
    """Eight of 16 experts active. Guesses: 16, d_head out of 143-148, auxiliary losses; d_ff by matching parameters."""
    return _262m(active_heads=8)


def _47m(active_heads: int) -> Recipe:
    return _moa(wikitext103_47m_dense(), active_heads=active_heads, n_experts=10, d_head=88)


def _262m(active_heads: int) -> Recipe:
    return _moa(wikitext103_262m_dense(), active_heads=active_heads, n_experts=16, d_head=144)


def _moa(dense: Recipe, *, active_heads: int, n_experts: int, d_head: int) -> Recipe:
    moa = dense.with_model(
        attention="moa",
        num_attention_heads=active_heads,
        num_experts=n_experts,
        head_dim=d_head,
        switch_loss_weight=0.01,
        router_z_loss_weight=0.001,
    )
    parameters = count_parameters(dense.model).total
    return moa.with_model(intermediate_size=match_d_ff(moa.model, parameters=parameters))

"""Which projections have experts: every choice among q, k, v and o (table 6).

All vary wikitext103-47m-switchhead at equal size. Head width and feed-forward width depend on how many projections have
experts; where two of them do, they are the base's.
"""

from __future__ import annotations

from switchhead.recipes.base import Recipe
from switchhead.recipes.registry import experiment
from switchhead.recipes.transformer_xl import wikitext103_47m_switchhead

_ONE = {"head_dim": 112, "intermediate_size": 2065}
_THREE = {"head_dim": 56, "intermediate_size": 2115}
_FOUR = {"head_dim": 48, "intermediate_size": 2060}


@experiment(table="6")
def wikitext103_47m_switchhead_experts_vo() -> Recipe:
    """Experts for values and outputs."""
    return wikitext103_47m_switchhead().with_model(expert_projections="vo")


@experiment(table="6")
def wikitext103_47m_switchhead_experts_o() -> Recipe:
    """Experts for outputs."""
    return wikitext103_47m_switchhead().with_model(expert_projections="o", **_ONE)


@experiment(table="6")
def wikitext103_47m_switchhead_experts_kvo() -> Recipe:
    """Experts for keys, values and outputs."""
    return wikitext103_47m_switchhead().with_model(expert_projections="kvo", **_THREE)


@experiment(table="6")
def wikitext103_47m_switchhead_experts_qvo() -> Recipe:
    """Experts for queries, values and outputs."""
    return wikitext103_47m_switchhead().with_model(expert_projections="qvo", **_THREE)


@experiment(table="6")
def wikitext103_47m_switchhead_experts_kqvo() -> Recipe:
    """Experts for keys, queries, values and outputs."""
    return wikitext103_47m_switchhead().with_model(expert_projections="kqvo", **_FOUR)


@experiment(table="6")
def wikitext103_47m_switchhead_experts_kq() -> Recipe:
    """Experts for keys and queries."""
    return wikitext103_47m_switchhead().with_model(expert_projections="kq")


@experiment(table="6")
def wikitext103_47m_switchhead_experts_ko() -> Recipe:
    """Experts for keys and outputs."""
    return wikitext103_47m_switchhead().with_model(expert_projections="ko")


@experiment(table="6")
def wikitext103_47m_switchhead_experts_qo() -> Recipe:
    """Experts for queries and outputs."""
    return wikitext103_47m_switchhead().with_model(expert_projections="qo")


@experiment(table="6")
def wikitext103_47m_switchhead_experts_kqo() -> Recipe:
    """Experts for keys, queries and outputs."""
    return wikitext103_47m_switchhead().with_model(expert_projections="kqo", **_THREE)


@experiment(table="6")
def wikitext103_47m_switchhead_experts_v() -> Recipe:
    """Experts for values."""
    return wikitext103_47m_switchhead().with_model(expert_projections="v", **_ONE)


@experiment(table="6")
def wikitext103_47m_switchhead_experts_kv() -> Recipe:
    """Experts for keys and values."""
    return wikitext103_47m_switchhead().with_model(expert_projections="kv")


@experiment(table="6")
def wikitext103_47m_switchhead_experts_qv() -> Recipe:
    """Experts for queries and values."""
    return wikitext103_47m_switchhead().with_model(expert_projections="qv")


@experiment(table="6")
def wikitext103_47m_switchhead_experts_kqv() -> Recipe:
    """Experts for keys, queries and values."""
    return wikitext103_47m_switchhead().with_model(expert_projections="kqv", **_THREE)


@experiment(table="6")
def wikitext103_47m_switchhead_experts_k() -> Recipe:
    """Experts for keys."""
    return wikitext103_47m_switchhead().with_model(expert_projections="k", **_ONE)


@experiment(table="6")
def wikitext103_47m_switchhead_experts_q() -> Recipe:
    """Experts for queries."""
    return wikitext103_47m_switchhead().with_model(expert_projections="q", **_ONE)

"""What a configuration means for its layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from switchhead.hf import SwitchHeadConfig


def key_value_heads(config: SwitchHeadConfig) -> int:
    """Heads that have keys and values of their own; MoA's experts share one."""
    if config.attention == "moa":
        return 1
    return config.num_key_value_heads or config.num_attention_heads


def expert_projections(config: SwitchHeadConfig) -> set[str]:
    """Projections of a SwitchHead layer that have experts; with a single expert only the output keeps its gate."""
    projections = set(config.expert_projections)
    return projections & {"o"} if config.num_experts == 1 else projections


def experts(config: SwitchHeadConfig) -> tuple[int, int]:
    """E and k of attention, whatever its experts are.

    SwitchHead: experts of a projection and head, and how many of them a token uses. MoA: experts of the layer, and the
    active heads. Head gating: heads, and how many of them a query uses.
    """
    if config.attention == "moa":
        return _known(config.num_experts), config.num_attention_heads
    if config.attention == "head_gating":
        return config.num_attention_heads, _known(config.num_experts_per_tok)
    return _known(config.num_experts), _known(config.num_experts_per_tok)


def ffn_experts(config: SwitchHeadConfig) -> tuple[int, int, int]:
    """Experts of a sigma-MoE layer, how many of them a token uses, and their width."""
    return (
        _known(config.ffn_num_experts),
        _known(config.ffn_num_experts_per_tok),
        _known(config.ffn_expert_size),
    )


def routers(config: SwitchHeadConfig) -> int:
    """Routers of a SwitchHead layer: one for each side with expert projections, or a single one for both.

    The source router serves keys and values, the destination router queries and outputs.
    """
    projections = expert_projections(config)
    sides = bool(projections & set("kv")) + bool(projections & set("qo"))
    return min(sides, 1) if config.shared_selection else sides


def _known(value: int | None) -> int:
    assert value is not None  # the configuration has filled it in
    return value

"""What a configuration means for an attention layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from switchhead.hf import SwitchHeadConfig


def key_value_heads(config: SwitchHeadConfig) -> int:
    """Heads that have keys and values of their own."""
    return config.num_key_value_heads or config.num_attention_heads


def expert_projections(config: SwitchHeadConfig) -> set[str]:
    """Projections of a SwitchHead layer that have experts; with a single expert only the output keeps its gate."""
    projections = set(config.expert_projections)
    return projections & {"o"} if config.num_experts == 1 else projections


def experts(config: SwitchHeadConfig) -> tuple[int, int]:
    """Experts of a SwitchHead projection and head, and how many of them a token uses: E and k."""
    assert config.num_experts is not None  # the configuration has filled them in
    assert config.num_experts_per_tok is not None
    return config.num_experts, config.num_experts_per_tok


def routers(config: SwitchHeadConfig) -> int:
    """Routers of a SwitchHead layer: one for each side with expert projections, or a single one for both.

    The source router serves keys and values, the destination router queries and outputs.
    """
    projections = expert_projections(config)
    sides = bool(projections & set("kv")) + bool(projections & set("qo"))
    return min(sides, 1) if config.shared_selection else sides

"""Which kinds of attention, positions, feed-forward and norm a configuration can name, and how each is built.

A new kind is one entry here: its name, its builder, and the configuration fields that it alone reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import nn

from switchhead.nn import MLP, MultiHeadAttention, Relative, Rotary, SwitchHeadAttention
from switchhead.nn.positions import Positions

if TYPE_CHECKING:
    from switchhead.hf.configuration import SwitchHeadConfig


Built = TypeVar("Built")


@dataclass(frozen=True)
class Kind(Generic[Built]):
    """One choice of a configuration field.

    Attributes:
        build: makes the part from a configuration.
        fields: configuration fields that mean nothing to the other kinds.
    """

    build: Callable[[SwitchHeadConfig], Built]
    fields: tuple[str, ...] = ()


def _init_scale(config: SwitchHeadConfig) -> float:
    """Initial standard deviations shrink with depth (the authors' choice)."""
    return math.sqrt(2 / config.num_hidden_layers)


def _switchhead(config: SwitchHeadConfig) -> nn.Module:
    assert config.num_experts is not None
    assert config.num_experts_per_tok is not None
    return SwitchHeadAttention(
        d_model=config.hidden_size,
        n_heads=config.num_attention_heads,
        n_experts=config.num_experts,
        d_head=config.head_dim,
        k=config.num_experts_per_tok,
        positions=POSITIONS[config.positions].build(config),
        expert_projections=config.expert_projections,
        shared_selection=config.shared_selection,
        gating=config.gating,
        expert_dropout=config.expert_dropout,
        init_scale=_init_scale(config),
    )


def _multi_head(config: SwitchHeadConfig) -> nn.Module:
    return MultiHeadAttention(
        d_model=config.hidden_size,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        d_head=config.head_dim,
        positions=POSITIONS[config.positions].build(config),
        init_scale=_init_scale(config),
    )


def _rotary(config: SwitchHeadConfig) -> Rotary:
    return Rotary(fraction=config.rotary_fraction, base=config.rope_theta)


def _mlp(config: SwitchHeadConfig) -> nn.Module:
    return MLP(
        d_model=config.hidden_size,
        d_ff=config.intermediate_size,
        dropout=config.dropout,
        init_scale=_init_scale(config),
    )


def _layernorm(config: SwitchHeadConfig) -> nn.Module:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


ATTENTION: Mapping[str, Kind[nn.Module]] = {
    "switchhead": Kind(
        _switchhead,
        fields=(
            "num_experts",
            "num_experts_per_tok",
            "expert_projections",
            "shared_selection",
            "gating",
            "expert_dropout",
        ),
    ),
    "mha": Kind(_multi_head, fields=("num_key_value_heads",)),
}
POSITIONS: Mapping[str, Kind[Positions]] = {
    "none": Kind(lambda config: None),
    "rotary": Kind(_rotary, fields=("rotary_fraction", "rope_theta")),
    "relative": Kind(lambda config: Relative()),
}
FEED_FORWARD: Mapping[str, Kind[nn.Module]] = {"mlp": Kind(_mlp, fields=("intermediate_size",))}
NORM: Mapping[str, Kind[nn.Module]] = {"layernorm": Kind(_layernorm, fields=("layer_norm_eps",))}

KINDS: Mapping[str, Mapping[str, Kind]] = {
    "attention": ATTENTION,
    "positions": POSITIONS,
    "feed_forward": FEED_FORWARD,
    "norm": NORM,
}

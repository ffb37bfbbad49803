"""Which kinds of attention, positions, feed-forward and norm a configuration can name, and how each is built.

A new kind is one entry here: its name, its builder, and the configuration fields that it alone reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import nn

from switchhead.nn import (
    MLP,
    HeadGatedAttention,
    MoAAttention,
    MultiHeadAttention,
    Relative,
    Rotary,
    SigmaMoE,
    SwiGLU,
    SwitchHeadAttention,
)
from switchhead.nn.positions import Positions

if TYPE_CHECKING:
    from switchhead.hf.configuration import SwitchHeadConfig


Built = TypeVar("Built")


@dataclass(frozen=True)
class Kind(Generic[Built]):
    """One choice of a configuration field.

    Attributes:
        build: makes the part from a configuration.
        fields: configuration fields that mean nothing to kinds without them.
        losses: auxiliary losses, by names whose weights are the fields `{name}_weight`.
    """

    build: Callable[[SwitchHeadConfig], Built]
    fields: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()


def _init_scale(config: SwitchHeadConfig) -> float:
    """Initial standard deviations shrink with depth (the authors' choice)."""
    return math.sqrt(2 / config.num_hidden_layers)


def _switchhead(config: SwitchHeadConfig) -> nn.Module:
    assert config.num_experts is not None
    assert config.num_experts_per_tok is not None
    assert config.gating is not None
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
        router_threshold=config.router_threshold,
        expert_norm_init=config.expert_norm_init,
        qk_norm=config.qk_norm,
        init_scale=_init_scale(config),
    )


def _multi_head(config: SwitchHeadConfig) -> nn.Module:
    return MultiHeadAttention(
        d_model=config.hidden_size,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        d_head=config.head_dim,
        positions=POSITIONS[config.positions].build(config),
        qk_norm=config.qk_norm,
        init_scale=_init_scale(config),
    )


def _moa(config: SwitchHeadConfig) -> nn.Module:
    assert config.num_experts is not None
    assert config.gating is not None
    return MoAAttention(
        d_model=config.hidden_size,
        n_heads=config.num_attention_heads,
        n_experts=config.num_experts,
        d_head=config.head_dim,
        positions=POSITIONS[config.positions].build(config),
        gating=config.gating,
        expert_dropout=config.expert_dropout,
        router_threshold=config.router_threshold,
        qk_norm=config.qk_norm,
        init_scale=_init_scale(config),
    )


def _head_gating(config: SwitchHeadConfig) -> nn.Module:
    assert config.num_experts_per_tok is not None
    assert config.gating is not None
    return HeadGatedAttention(
        d_model=config.hidden_size,
        n_heads=config.num_attention_heads,
        d_head=config.head_dim,
        k=config.num_experts_per_tok,
        positions=POSITIONS[config.positions].build(config),
        gating=config.gating,
        expert_dropout=config.expert_dropout,
        router_threshold=config.router_threshold,
        qk_norm=config.qk_norm,
        init_scale=_init_scale(config),
    )


def _rotary(config: SwitchHeadConfig) -> Rotary:
    return Rotary(fraction=config.rotary_fraction, base=config.rope_theta)


def _dense_feed_forward(config: SwitchHeadConfig) -> nn.Module:
    layer = {"mlp": MLP, "swiglu": SwiGLU}[config.feed_forward]
    return layer(
        d_model=config.hidden_size,
        d_ff=config.intermediate_size,
        bias=config.use_bias,
        dropout=config.dropout,
        init_scale=_init_scale(config),
    )


def _sigma_moe(config: SwitchHeadConfig) -> nn.Module:
    assert config.ffn_num_experts is not None
    assert config.ffn_num_experts_per_tok is not None
    assert config.ffn_expert_size is not None
    return SigmaMoE(
        d_model=config.hidden_size,
        n_experts=config.ffn_num_experts,
        expert_size=config.ffn_expert_size,
        k=config.ffn_num_experts_per_tok,
        gating=config.ffn_gating,
        expert_dropout=config.ffn_expert_dropout,
        router_threshold=config.ffn_router_threshold,
        synchronize=config.ffn_synchronize_entropy,
        init_scale=_init_scale(config),
    )


def _layernorm(config: SwitchHeadConfig) -> nn.Module:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


def _rmsnorm(config: SwitchHeadConfig) -> nn.Module:
    return nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


_ROUTER_FIELDS = ("gating", "expert_dropout", "router_threshold")
_MOA_LOSSES = ("cv_loss", "switch_loss", "router_z_loss")

ATTENTION: Mapping[str, Kind[nn.Module]] = {
    "switchhead": Kind(
        _switchhead,
        fields=(
            "num_experts",
            "num_experts_per_tok",
            "expert_projections",
            "shared_selection",
            "expert_norm_init",
            *_ROUTER_FIELDS,
        ),
    ),
    "mha": Kind(_multi_head, fields=("num_key_value_heads",)),
    "moa": Kind(
        _moa,
        fields=("num_experts", *(f"{name}_weight" for name in _MOA_LOSSES), *_ROUTER_FIELDS),
        losses=_MOA_LOSSES,
    ),
    "head_gating": Kind(_head_gating, fields=("num_experts_per_tok", *_ROUTER_FIELDS)),
}
POSITIONS: Mapping[str, Kind[Positions]] = {
    "none": Kind(lambda config: None),
    "rotary": Kind(_rotary, fields=("rotary_fraction", "rope_theta")),
    "relative": Kind(lambda config: Relative()),
}
FEED_FORWARD: Mapping[str, Kind[nn.Module]] = {
    "mlp": Kind(_dense_feed_forward, fields=("intermediate_size",)),
    "swiglu": Kind(_dense_feed_forward, fields=("intermediate_size",)),
    "sigma_moe": Kind(
        _sigma_moe,
        fields=(
            "ffn_num_experts",
            "ffn_num_experts_per_tok",
            "ffn_expert_size",
            "ffn_expert_dropout",
            "ffn_gating",
            "ffn_router_threshold",
            "ffn_entropy_loss_weight",
            "ffn_synchronize_entropy",
        ),
        losses=("ffn_entropy_loss",),
    ),
}
NORM: Mapping[str, Kind[nn.Module]] = {
    "layernorm": Kind(_layernorm, fields=("layer_norm_eps",)),
    "rmsnorm": Kind(_rmsnorm, fields=("rms_norm_eps",)),
}

KINDS: Mapping[str, Mapping[str, Kind]] = {
    "attention": ATTENTION,
    "positions": POSITIONS,
    "feed_forward": FEED_FORWARD,
    "norm": NORM,
}

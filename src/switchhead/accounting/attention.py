"""What an attention layer costs: multiply-accumulates, numbers kept, and the key-value cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from switchhead.accounting.layout import expert_projections, experts, key_value_heads, routers

if TYPE_CHECKING:
    from switchhead.hf import SwitchHeadConfig

Convention = Literal["consistent", "published"]


@dataclass(frozen=True, kw_only=True)
class AttentionCost:
    """Cost of one attention layer for one sequence.

    Attributes:
        macs: multiply-accumulate operations of the forward pass.
        floats: numbers the layer has to hold (projections, attention matrices, projected positions), of any dtype.
    """

    macs: int
    floats: int


def attention_cost(
    config: SwitchHeadConfig, *, chunk_length: int, convention: Convention = "consistent"
) -> AttentionCost:
    """Multiply-accumulates and floats of one attention layer, in closed form.

    The equations are those of the paper's section on resources, with `S = chunk_length + config.memory_length` in
    place of its `C T`. Every head costs its own projections, scores and weighted sum; a projection made of experts
    costs k of them and k scalings; relative positions add one projection of S positions.

    Args:
        config: the model.
        chunk_length: tokens of the sequence, T.
        convention: `"consistent"` holds the equations as printed for every architecture and counts every router.
            `"published"` reproduces the figures in the paper's tables, which project only T relative positions for
            SwitchHead and count its routers as if there were a single head.

    Raises:
        ValueError: an unknown convention, or an attention kind that has no equation.
    """
    if convention not in get_args(Convention):
        raise ValueError(f"unknown convention {convention!r}; choose one of {', '.join(get_args(Convention))}")
    if chunk_length < 1:
        raise ValueError(f"chunk_length must be at least 1; got {chunk_length}")
    if config.attention == "mha":
        return _multi_head(config, chunk_length)
    if config.attention == "switchhead":
        return _switchhead(config, chunk_length, convention)
    raise ValueError(f"no cost equation for attention {config.attention!r}; known: mha, switchhead")


def key_value_numbers(config: SwitchHeadConfig) -> int:
    """Numbers that a key-value cache keeps for each token in each layer.

    One key and one value of `head_dim` channels for each key-value head. Experts are mixed before the cache, so their
    number does not enter.
    """
    return key_value_heads(config) * 2 * config.head_dim


def _multi_head(config: SwitchHeadConfig, chunk_length: int) -> AttentionCost:
    heads, kv_heads = config.num_attention_heads, key_value_heads(config)
    d_head, d_model = config.head_dim, config.hidden_size
    source_length = chunk_length + config.memory_length
    projected = 2 * (heads + kv_heads) * chunk_length * d_head  # queries, outputs; keys, values
    positions = heads * source_length * d_head if config.positions == "relative" else 0
    scores = 2 * heads * chunk_length * source_length  # before and after the softmax
    return AttentionCost(
        macs=(projected + 2 * positions) * d_model + scores * d_head,
        floats=projected + 2 * positions + scores,
    )


def _switchhead(config: SwitchHeadConfig, chunk_length: int, convention: Convention) -> AttentionCost:
    heads, d_head, d_model = config.num_attention_heads, config.head_dim, config.hidden_size
    n_experts, k = experts(config)
    source_length = chunk_length + config.memory_length
    n_mixed = len(expert_projections(config))
    projected = heads * chunk_length * d_head  # one projection
    scores = 2 * heads * chunk_length * source_length
    if convention == "published":
        positions = projected
        routing = routers(config) * n_experts * d_model * source_length
    else:
        positions = heads * source_length * d_head
        routing = routers(config) * heads * n_experts * d_model * chunk_length
    if config.positions != "relative":
        positions = 0
    macs = (4 - n_mixed) * projected * d_model
    macs += n_mixed * k * projected * (d_model + 1)  # each chosen expert's result is scaled by its gate
    macs += 2 * positions * d_model + scores * d_head + routing
    return AttentionCost(macs=macs, floats=4 * projected + 2 * positions + scores)

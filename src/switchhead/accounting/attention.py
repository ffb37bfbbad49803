"""What an attention layer costs by its equation: multiply-accumulates, numbers kept, and the key-value cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from switchhead.accounting.cost import Convention, Cost, check_counting
from switchhead.accounting.layout import expert_projections, experts, key_value_heads, routers
from switchhead.accounting.trace import trace_attention

if TYPE_CHECKING:
    from switchhead.hf import SwitchHeadConfig


def attention_cost(config: SwitchHeadConfig, *, chunk_length: int, convention: Convention = "consistent") -> Cost:
    """Multiply-accumulates and floats of one attention layer for one sequence.

    The equations are the paper's 11 to 15, with `S = chunk_length + config.memory_length` in place of its `C T`. Every
    head costs its own projections, scores and weighted sum; a projection made of experts costs k of them and k
    scalings; relative positions add one projection of S positions.

    Args:
        config: the model.
        chunk_length: tokens of the sequence, T.
        convention: `"consistent"` holds the equations as printed for every architecture and counts every router.
            `"published"` reproduces the figures in the paper's tables, which project only T relative positions for
            SwitchHead and count its routers as if there were a single head. `"executed"` runs this package's layer on
            tensors without memory and counts: matrix products of the forward pass, and the numbers that PyTorch
            keeps for the backward pass. Keys, values and source routers of the memory are computed too.

    Raises:
        ValueError: an unknown convention, or an attention kind that has no equation.
    """
    check_counting(convention, chunk_length)
    if config.attention not in _EQUATIONS:
        raise ValueError(f"no cost equation for attention {config.attention!r}; known: {', '.join(_EQUATIONS)}")
    if convention == "executed":
        return trace_attention(config, chunk_length)
    return _EQUATIONS[config.attention](config, chunk_length, convention)


def key_value_numbers(config: SwitchHeadConfig) -> int:
    """Numbers that a key-value cache keeps for each token in each layer.

    One key and one value of `head_dim` channels for each key-value head. Experts are mixed before the cache, so their
    number does not enter.
    """
    return key_value_heads(config) * 2 * config.head_dim


def _multi_head(config: SwitchHeadConfig, chunk_length: int, convention: Convention) -> Cost:
    heads, kv_heads = config.num_attention_heads, key_value_heads(config)
    d_head, d_model = config.head_dim, config.hidden_size
    source_length = chunk_length + config.memory_length
    projected = 2 * (heads + kv_heads) * chunk_length * d_head  # queries, outputs; keys, values
    positions = heads * source_length * d_head if config.positions == "relative" else 0
    scores = 2 * heads * chunk_length * source_length  # before and after the softmax
    return Cost(
        macs=(projected + 2 * positions) * d_model + scores * d_head,
        floats=projected + 2 * positions + scores,
    )


def _switchhead(config: SwitchHeadConfig, chunk_length: int, convention: Convention) -> Cost:
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
    return Cost(macs=macs, floats=4 * projected + 2 * positions + scores)


def _moa(config: SwitchHeadConfig, chunk_length: int, convention: Convention) -> Cost:
    n_experts, heads = experts(config)
    d_head, d_model = config.head_dim, config.hidden_size
    source_length = chunk_length + config.memory_length
    projected = (2 * heads + 2) * chunk_length * d_head  # the chosen queries and outputs; one key, one value
    positions = source_length * d_head if config.positions == "relative" else 0
    scores = 2 * heads * chunk_length * source_length
    macs = (projected + 2 * positions) * d_model + scores * d_head + n_experts * d_model * chunk_length
    if convention == "published":
        macs += 2 * heads * chunk_length * d_head  # scaling by the gates
        positions = min(positions, chunk_length * d_head)
    return Cost(macs=macs, floats=projected + 2 * positions + scores)


def _head_gating(config: SwitchHeadConfig, chunk_length: int, convention: Convention) -> Cost:
    """The dense layer, since a head that one query skips serves another; a router, and k heads scaled by gates."""
    heads, k = experts(config)
    dense = _multi_head(config, chunk_length, convention)
    extra = heads * config.hidden_size + k * config.head_dim
    return Cost(macs=dense.macs + chunk_length * extra, floats=dense.floats)


_EQUATIONS: Mapping[str, Callable[[SwitchHeadConfig, int, Convention], Cost]] = {
    "mha": _multi_head,
    "switchhead": _switchhead,
    "moa": _moa,
    "head_gating": _head_gating,
}

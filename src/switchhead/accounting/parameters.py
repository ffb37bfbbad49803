"""How many numbers a model learns, and how many of them one token uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from switchhead.accounting.layout import expert_projections, experts, key_value_heads, routers

if TYPE_CHECKING:
    from switchhead.hf import SwitchHeadConfig


class Count(NamedTuple):
    """Parameters of one part of a model, and those of them that take part in one token's result."""

    total: int
    active: int


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model by part.

    Attributes:
        parts: `embedding`, `projections` (those without experts), `experts`, `routers`, `positions`, `feed_forward`,
            `norms`, `output`, each summed over all layers.
    """

    parts: Mapping[str, Count]

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(part.total for part in self.parts.values())

    @property
    def active(self) -> int:
        """Parameters that one token uses: k of E experts, everything else in full (the embedding table too)."""
        return sum(part.active for part in self.parts.values())


def count_parameters(config: SwitchHeadConfig) -> ParameterCount:
    """Count the parameters of `SwitchHeadForCausalLM(config)` without building it.

    Raises:
        ValueError: a kind of attention, feed-forward or norm that has no formula.
    """
    n_layers, d_model, d_ff = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    embedding = config.vocab_size * d_model
    parts = {"embedding": _dense(embedding)}
    for name, count in _attention(config).items():
        parts[name] = Count(n_layers * count.total, n_layers * count.active)
    if config.feed_forward != "mlp":
        raise ValueError(f"no parameter formula for feed_forward {config.feed_forward!r}; known: mlp")
    parts["feed_forward"] = _dense(n_layers * (2 * d_model * d_ff + d_ff + d_model))
    if config.norm != "layernorm":
        raise ValueError(f"no parameter formula for norm {config.norm!r}; known: layernorm")
    parts["norms"] = _dense((2 * n_layers + 1) * 2 * d_model)
    parts["output"] = _dense(config.vocab_size if config.tie_word_embeddings else embedding + config.vocab_size)
    return ParameterCount(parts)


def _dense(count: int) -> Count:
    return Count(count, count)


def _attention(config: SwitchHeadConfig) -> dict[str, Count]:
    """Parts of one attention layer; projections have no bias."""
    heads, d_head, d_model = config.num_attention_heads, config.head_dim, config.hidden_size
    matrix = d_head * d_model
    position_matrices = heads * matrix if config.positions == "relative" else 0
    if config.attention == "mha":
        # Relative positions come with a content and a position bias for each head, and one learned temperature.
        position_biases = 2 * heads * d_head + 1 if config.positions == "relative" else 0
        return {
            "projections": _dense(2 * (heads + key_value_heads(config)) * matrix),
            "positions": _dense(position_matrices + position_biases),
        }
    if config.attention == "switchhead":
        n_experts, k = experts(config)
        n_mixed = len(expert_projections(config))
        return {
            "projections": _dense((4 - n_mixed) * heads * matrix),
            "experts": Count(n_mixed * heads * n_experts * matrix, n_mixed * heads * k * matrix),
            "routers": _dense(routers(config) * heads * n_experts * d_model),
            "positions": _dense(position_matrices),
        }
    raise ValueError(f"no parameter formula for attention {config.attention!r}; known: mha, switchhead")

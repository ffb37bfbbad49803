"""How many numbers a model learns, and how many of them one token uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from switchhead.accounting.layout import expert_projections, experts, ffn_experts, key_value_heads, routers

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
            `norms`, `output`, each summed over all layers. `feed_forward` has the experts and the router of sigma-MoE.
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
    n_layers, d_model = config.num_hidden_layers, config.hidden_size
    if config.norm not in ("layernorm", "rmsnorm"):
        raise ValueError(f"no parameter formula for norm {config.norm!r}; known: layernorm, rmsnorm")
    norm = d_model if config.norm == "rmsnorm" else 2 * d_model
    layer = _attention(config) | {"feed_forward": _feed_forward(config)}
    norms = (2 * n_layers + 1) * norm + (n_layers * 2 * config.head_dim if config.qk_norm else 0)
    table, bias = config.vocab_size * d_model, config.vocab_size if config.use_bias else 0
    return ParameterCount(
        {"embedding": _dense(table)}
        | {name: Count(n_layers * part.total, n_layers * part.active) for name, part in layer.items()}
        | {"norms": _dense(norms), "output": _dense(bias if config.tie_word_embeddings else table + bias)}
    )


def _dense(count: int) -> Count:
    return Count(count, count)


def _feed_forward(config: SwitchHeadConfig) -> Count:
    d_model, d_ff = config.hidden_size, config.intermediate_size
    if config.feed_forward == "sigma_moe":
        n_experts, k, width = ffn_experts(config)
        router = n_experts * d_model
        return Count(router + n_experts * 2 * width * d_model, router + k * 2 * width * d_model)
    if config.feed_forward not in ("mlp", "swiglu"):
        raise ValueError(
            f"no parameter formula for feed_forward {config.feed_forward!r}; known: mlp, swiglu, sigma_moe"
        )
    inner = d_ff if config.feed_forward == "mlp" else 2 * d_ff  # SwiGLU has a gate beside the values
    return _dense((inner + d_ff) * d_model + (inner + d_model if config.use_bias else 0))


def _attention(config: SwitchHeadConfig) -> dict[str, Count]:
    """Parts of one attention layer; projections have no bias."""
    heads, d_head, d_model = config.num_attention_heads, config.head_dim, config.hidden_size
    matrix = d_head * d_model
    relative = config.positions == "relative"
    position_matrices = heads * matrix if relative else 0
    # With relative positions dense heads have a content and a position bias each, and the layer a temperature.
    position_biases = 2 * heads * d_head + 1 if relative else 0
    if config.attention == "mha":
        return {
            "projections": _dense(2 * (heads + key_value_heads(config)) * matrix),
            "positions": _dense(position_matrices + position_biases),
        }
    n_experts, k = experts(config) if config.attention in ("switchhead", "moa", "head_gating") else (0, 0)
    if config.attention == "switchhead":
        n_mixed = len(expert_projections(config))
        return {
            "projections": _dense((4 - n_mixed) * heads * matrix),
            "experts": Count(n_mixed * heads * n_experts * matrix, n_mixed * heads * k * matrix),
            "routers": _dense(routers(config) * heads * n_experts * d_model),
            "positions": _dense(position_matrices),
        }
    if config.attention == "moa":
        return {
            "projections": _dense(2 * matrix),  # one key, one value
            "experts": Count(2 * n_experts * matrix, 2 * k * matrix),
            "routers": _dense(n_experts * d_model),
            "positions": _dense(matrix + 1 if relative else 0),  # shared like the keys; a temperature
        }
    if config.attention == "head_gating":
        return {
            # A query uses the queries and outputs of k heads; keys and values it finds computed, for others use them.
            "projections": Count(4 * heads * matrix, 2 * (heads + k) * matrix),
            "routers": _dense(heads * d_model),
            "positions": _dense(position_matrices + position_biases),
        }
    raise ValueError(
        f"no parameter formula for attention {config.attention!r}; known: mha, switchhead, moa, head_gating"
    )

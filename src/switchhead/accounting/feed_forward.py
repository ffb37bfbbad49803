"""What a feed-forward layer costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from switchhead.accounting.cost import Convention, Cost, check_counting
from switchhead.accounting.layout import ffn_experts
from switchhead.accounting.trace import trace_feed_forward

if TYPE_CHECKING:
    from switchhead.hf import SwitchHeadConfig


def feed_forward_cost(config: SwitchHeadConfig, *, chunk_length: int, convention: Convention = "consistent") -> Cost:
    """Multiply-accumulates and floats of one feed-forward layer for one sequence.

    The paper prints no such figures: `"published"` is `"consistent"`, which counts as for attention, every matrix
    product, gate and result of one; `"executed"` as in `attention_cost`.

    Raises:
        ValueError: an unknown convention, or a feed-forward kind that has no equation.
    """
    check_counting(convention, chunk_length)
    if config.feed_forward not in ("mlp", "swiglu", "sigma_moe"):
        raise ValueError(f"no cost equation for feed_forward {config.feed_forward!r}; known: mlp, swiglu, sigma_moe")
    if convention == "executed":
        return trace_feed_forward(config, chunk_length)
    d_model = config.hidden_size
    if config.feed_forward == "sigma_moe":
        n_experts, k, width = ffn_experts(config)
        macs = n_experts * d_model + k * width * d_model + k * width * (d_model + 1)  # router; both projections
        return Cost(macs=chunk_length * macs, floats=chunk_length * (k * width + d_model))
    inner = 2 if config.feed_forward == "swiglu" else 1
    width = config.intermediate_size
    return Cost(macs=chunk_length * (inner + 1) * width * d_model, floats=chunk_length * (inner * width + d_model))

"""Mixture-of-Experts attention: SwitchHead, its baselines and language models."""

from switchhead.nn import (
    HeadGatedAttention,
    MoAAttention,
    MultiHeadAttention,
    Relative,
    Rotary,
    SigmaMoE,
    SwitchHeadAttention,
)
from switchhead.ops import moe_linear, route
from switchhead.routing import Routing

__version__ = "0.1.0"

__all__ = [
    "HeadGatedAttention",
    "MoAAttention",
    "MultiHeadAttention",
    "Relative",
    "Rotary",
    "Routing",
    "SigmaMoE",
    "SwitchHeadAttention",
    "moe_linear",
    "route",
]

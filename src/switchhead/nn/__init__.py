"""Modules: attention layers, feed-forward layers, their parts, and the block around them."""

from switchhead.nn.attention import AuxLosses, Cache
from switchhead.nn.block import Block
from switchhead.nn.feed_forward import MLP, SwiGLU
from switchhead.nn.head_gating import HeadGatedAttention
from switchhead.nn.moa import MoAAttention
from switchhead.nn.moe_linear import MoELinear
from switchhead.nn.multihead import MultiHeadAttention
from switchhead.nn.norm import QKNorm
from switchhead.nn.positions import Relative, Rotary
from switchhead.nn.router import Router
from switchhead.nn.sigma_moe import SigmaMoE
from switchhead.nn.switchhead import SwitchHeadAttention

__all__ = [
    "MLP",
    "AuxLosses",
    "Block",
    "Cache",
    "HeadGatedAttention",
    "MoAAttention",
    "MoELinear",
    "MultiHeadAttention",
    "QKNorm",
    "Relative",
    "Rotary",
    "Router",
    "SigmaMoE",
    "SwiGLU",
    "SwitchHeadAttention",
]

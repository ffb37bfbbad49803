"""Modules: attention layers, their parts, and the block around them."""

from switchhead.nn.attention import Cache
from switchhead.nn.block import Block
from switchhead.nn.feed_forward import MLP
from switchhead.nn.moe_linear import MoELinear
from switchhead.nn.multihead import MultiHeadAttention
from switchhead.nn.positions import Relative, Rotary
from switchhead.nn.router import Router
from switchhead.nn.switchhead import SwitchHeadAttention

__all__ = [
    "MLP",
    "Block",
    "Cache",
    "MoELinear",
    "MultiHeadAttention",
    "Relative",
    "Rotary",
    "Router",
    "SwitchHeadAttention",
]

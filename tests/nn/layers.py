"""Every attention layer, in a small size, for tests of what holds for all of them."""

import pytest
import torch

from switchhead import MultiHeadAttention, SwitchHeadAttention
from switchhead.nn import HeadGatedAttention, MoAAttention

LAYERS = {
    "switchhead": lambda **o: SwitchHeadAttention(**{**dict(d_model=12, n_heads=2, n_experts=3, d_head=7, k=2), **o}),
    "mha": lambda **o: MultiHeadAttention(**{**dict(d_model=12, n_heads=4, d_head=7), **o}),
    "gqa": lambda **o: MultiHeadAttention(**{**dict(d_model=12, n_heads=4, d_head=7, n_kv_heads=2), **o}),
    "switchhead-qk-norm": lambda **o: LAYERS["switchhead"](**{"qk_norm": True, **o}),
    "moa": lambda **o: MoAAttention(**{**dict(d_model=12, n_heads=3, n_experts=5, d_head=7), **o}),
    "head-gating": lambda **o: HeadGatedAttention(**{**dict(d_model=12, n_heads=4, d_head=7, k=2), **o}),
}
POSITIONS = ["none", "rotary", "relative"]
SOURCES = ["context", "memory"]
every_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
every_position = pytest.mark.parametrize("positions", POSITIONS)


def inputs(batch=2, length=6, dtype=torch.float64):
    return torch.randn(batch, length, 12, dtype=dtype)


class GrowingCache:
    """Concatenates, as a dynamic cache does."""

    def __init__(self):
        self.k = self.v = None

    def update(self, k, v):
        self.k = k if self.k is None else torch.cat([self.k, k], 2)
        self.v = v if self.v is None else torch.cat([self.v, v], 2)
        return self.k, self.v

"""Cosines and sines of rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("switchhead::rotary_table", mutates_args=())
def rotary_table(positions: Tensor, half: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`cos` and `sin` of `position * base ** (-i / half)`, `[..., T, half]`.

    An operator of its own, so that a compiler does not inline it: sines for every element of every head cost more than
    the attention they serve.
    """
    exponents = torch.arange(half, device=positions.device, dtype=dtype) / max(half, 1)
    angles = positions.contiguous()[..., None].to(dtype) * base**-exponents  # strides as the fake's
    return angles.cos(), angles.sin()


@rotary_table.register_fake
def _(positions: Tensor, half: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (*positions.shape, half)
    return positions.new_empty(shape, dtype=dtype), positions.new_empty(shape, dtype=dtype)

"""Cosines and sines of rotary positions."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from switchhead.ops.availability import is_gpu, triton_obstacle


def rotary_table(positions: Tensor, half: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`cos` and `sin` of `position * base ** (-i / half)`, `[..., T, half]`."""
    if is_gpu(positions.device) and dtype == torch.float32 and triton_obstacle(positions.device, dtype) is None:
        from switchhead.ops.triton.rotary import rotary_table as run

        return run(positions, half, base)
    return _rotary_table(positions, half, base, dtype)


def rotate(
    x: Float[Tensor, "*batch T heads d"], cos: Float[Tensor, "*batch T half"], sin: Float[Tensor, "*batch T half"]
) -> Float[Tensor, "*batch T heads d"]:
    """Turn channel i < half of every head with channel i + half; the rest pass."""
    cos, sin = cos[..., None, :], sin[..., None, :]  # broadcast over heads
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([turned[0].to(x.dtype), turned[1].to(x.dtype), rest], dim=-1)


@torch.library.custom_op("switchhead::rotary_table", mutates_args=())
def _rotary_table(positions: Tensor, half: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """An operator of its own, so that a compiler does not inline it.

    Sines for every element of every head cost more than the attention they serve.
    """
    exponents = torch.arange(half, device=positions.device, dtype=dtype) / max(half, 1)
    angles = positions.contiguous()[..., None].to(dtype) * base**-exponents  # strides as the fake's
    return angles.cos(), angles.sin()


@_rotary_table.register_fake
def _(positions: Tensor, half: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (*positions.shape, half)
    return positions.new_empty(shape, dtype=dtype), positions.new_empty(shape, dtype=dtype)

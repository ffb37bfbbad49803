"""Rotary positions: their cosines and sines in one launch, and the rotation of queries and keys in another."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from switchhead.ops.triton.operator import operator, visible

_BLOCK = 256


@operator("switchhead::rotary_table_kernel")
def rotary_table(positions: Tensor, half: int, base: float) -> tuple[Tensor, Tensor]:
    """`switchhead.ops.rotary.rotary_table` in float32, from angles in float64."""
    shape = (*positions.shape, half)
    cos, sin = (torch.empty(shape, dtype=torch.float32, device=positions.device) for _ in range(2))
    if half > 0:
        visible(_rotary_table_kernel)[(triton.cdiv(cos.numel(), _BLOCK),)](
            positions.contiguous(), cos, sin, cos.numel(), half, -math.log2(base) / half, _BLOCK
        )
    return cos, sin


@triton.jit(do_not_specialize=["size"])
def _rotary_table_kernel(
    positions_ptr,  # int [N]
    cos_ptr,  # float32 [N, HALF]
    sin_ptr,  # float32 [N, HALF]
    size,
    HALF: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions_ptr + at // HALF, mask=at < size, other=0).to(tl.float64)
    angle = position * tl.exp2((at % HALF).to(tl.float64) * STEP)
    tl.store(cos_ptr + at, tl.cos(angle).to(tl.float32), mask=at < size)
    tl.store(sin_ptr + at, tl.sin(angle).to(tl.float32), mask=at < size)


def rotate_heads(
    x: Tensor, cos: Tensor | None, sin: Tensor | None, *, out: Tensor | None = None, first: int = 0, back: bool = False
) -> None:
    """Rotate as `switchhead.ops.rotary.rotate` does, in place or into columns of another matrix.

    Args:
        x: `[N, H, d]`; any strides where `out` is given.
        cos, sin: float32 `[R, half]`; token n stands at position n modulo R. None: only copy.
        out: matrix of N rows; `[N, H * d]` is written into its columns `first ..`. None: x itself is changed.
        first: see `out`.
        back: turn the other way, which is the derivative.
    """
    tokens, heads, d = x.shape
    positions, half = (1, 0) if cos is None else cos.shape
    rest = d - 2 * half if out is not None else 0
    block = 16
    visible(_rotate_heads_kernel)[(triton.cdiv(tokens * heads, block),)](
        x, out, cos, sin, tokens * heads, *x.stride(), 0 if out is None else out.stride(0), first, positions,
        heads, d, half, rest, back, block, triton.next_power_of_2(max(half, 1)), triton.next_power_of_2(max(rest, 1)),
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows", "n_positions"])
def _rotate_heads_kernel(
    x_ptr,  # [N, H, D]
    out_ptr,  # [N, >= first + H * D], or None: x
    cos_ptr,  # float32 [R, HALF] or None
    sin_ptr,  # float32 [R, HALF] or None
    n_rows, stride_n, stride_h, stride_d, stride_out, first, n_positions,
    H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, BACK: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = (row < n_rows)[:, None]
    token, head = row // H, row % H
    source = x_ptr + (token * stride_n + head * stride_h)[:, None]
    if out_ptr is not None:
        target = out_ptr + (token * stride_out + first + head * D)[:, None]
        stride_target = 1
    else:
        target = source
        stride_target = stride_d
    if HALF > 0:  # a thread holds both channels of a pair, so that it may change them in place
        i = tl.arange(0, BLOCK_HALF)[None, :]
        inside = valid & (i < HALF)
        at = (token % n_positions * HALF)[:, None] + i
        cos = tl.load(cos_ptr + at, mask=inside, other=0.0)
        sin = tl.load(sin_ptr + at, mask=inside, other=0.0)
        if BACK:
            sin = -sin
        left = tl.load(source + i * stride_d, mask=inside, other=0.0).to(tl.float32)
        right = tl.load(source + (HALF + i) * stride_d, mask=inside, other=0.0).to(tl.float32)
        dtype = x_ptr.dtype.element_ty
        tl.store(target + i * stride_target, (left * cos - right * sin).to(dtype), mask=inside)
        tl.store(target + (HALF + i) * stride_target, (right * cos + left * sin).to(dtype), mask=inside)
    if REST > 0:
        i = D - REST + tl.arange(0, BLOCK_REST)[None, :]
        inside = valid & (i < D)
        tl.store(target + i * stride_target, tl.load(source + i * stride_d, mask=inside, other=0.0), mask=inside)

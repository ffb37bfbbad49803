"""Rotary positions: their cosines and sines in one launch, and the rotation of queries and keys in another."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    x: Sequence[Tensor],
    out: Sequence[Tensor],
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    width: int,
    back: bool = False,
) -> None:
    """Rotate as `switchhead.ops.rotary.rotate` does, queries and keys at once.

    Args:
        x: one or two `[N, H, d]`, of any strides.
        out: as many tensors `[N, H, width]`, contiguous, which may be x; or one matrix of N rows, into whose columns
            all are written side by side from the first on.
        cos, sin: float32 `[R, half]`; token n stands at position n modulo R. None: only copy.
        width: columns of a head in `out`. Where it is more than d zeros follow, where it is less the last are left out.
        back: turn the other way, which is the derivative.
    """
    (first, *others), (target, *other_targets) = x, out
    second, other_target = others[0] if others else None, other_targets[0] if other_targets else None
    tokens, heads, d = first.shape
    positions, half = (1, 0) if cos is None else cos.shape
    rest = width - 2 * half
    block = 16
    visible(_rotate_heads_kernel)[(triton.cdiv(tokens * heads, block),)](
        first, second, target, other_target, cos, sin, tokens * heads, *first.stride(),
        *((0,) * 3 if second is None else second.stride()), target.stride(0), positions,
        heads, d, width, half, rest, back, block,
        triton.next_power_of_2(max(half, 1)), triton.next_power_of_2(max(rest, 1)),
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows", "n_positions"])
def _rotate_heads_kernel(
    first_ptr,  # [N, H, D]
    second_ptr,  # [N, H, D] or None
    out_ptr,  # [N, >= H * WIDTH]
    second_out_ptr,  # [N, >= H * WIDTH], or None: behind the first's columns
    cos_ptr,  # float32 [R, HALF] or None
    sin_ptr,  # float32 [R, HALF] or None
    n_rows, stride_n, stride_h, stride_d, stride_second_n, stride_second_h, stride_second_d, stride_out, n_positions,
    H: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    BACK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = (row < n_rows)[:, None]
    token, head = row // H, row % H
    sources = (first_ptr + (token * stride_n + head * stride_h)[:, None],)
    strides = (stride_d,)
    targets = (out_ptr + (token * stride_out + head * WIDTH)[:, None],)
    if second_ptr is not None:
        sources = sources + (second_ptr + (token * stride_second_n + head * stride_second_h)[:, None],)
        strides = strides + (stride_second_d,)
        if second_out_ptr is not None:
            targets = targets + (second_out_ptr + (token * stride_out + head * WIDTH)[:, None],)
        else:
            targets = targets + (out_ptr + (token * stride_out + (H + head) * WIDTH)[:, None],)
    SIDES: tl.constexpr = 1 if second_ptr is None else 2
    dtype = out_ptr.dtype.element_ty
    if HALF > 0:
        i = tl.arange(0, BLOCK_HALF)[None, :]
        inside = valid & (i < HALF)
        at = (token % n_positions * HALF)[:, None] + i
        cos = tl.load(cos_ptr + at, mask=inside, other=0.0)
        sin = tl.load(sin_ptr + at, mask=inside, other=0.0)
        if BACK:
            sin = -sin
        pairs = ()
        for s in tl.static_range(SIDES):  # all loads before all stores, which the compiler may not reorder
            left = tl.load(sources[s] + i * strides[s], mask=inside, other=0.0).to(tl.float32)
            right = tl.load(sources[s] + (HALF + i) * strides[s], mask=inside, other=0.0).to(tl.float32)
            pairs = pairs + ((left, right),)
        for s in tl.static_range(SIDES):
            left, right = pairs[s]
            tl.store(targets[s] + i, (left * cos - right * sin).to(dtype), mask=inside)
            tl.store(targets[s] + HALF + i, (right * cos + left * sin).to(dtype), mask=inside)
    if REST > 0:
        i = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        inside = valid & (i < WIDTH)
        for s in tl.static_range(SIDES):
            rest = tl.load(sources[s] + i * strides[s], mask=inside & (i < D), other=0.0)
            tl.store(targets[s] + i, rest, mask=inside)

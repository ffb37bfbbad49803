"""Gradients of expert matrices: for each expert the sum over its tokens of an outer product.

Experts have unequal numbers of tokens, so the sum is cut into equal pieces: all steps of all output tiles form one
line, and program i takes the i-th part of it. A tile that falls to several programs has several partial sums; a second
kernel adds them in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from switchhead.ops.triton.grouping import Groups
from switchhead.ops.triton.operands import pad_to
from switchhead.ops.triton.tuning import Tile


def weight_grad(
    wide: Tensor,
    rows: Tensor,
    groups: Groups,
    out: Tensor,
    *,
    wide_in: bool,
    shared: int,
    precision: str,
    tile: Tile,
    programs: int,
) -> None:
    """`out[e] = sum over slots of expert e of outer(wide[slot // shared], rows[slot])`; zero for an unused expert.

    Args:
        wide: aligned rows `[slots / shared, d_wide]`.
        rows: `[slots, d_narrow_padded]`, scaled by their gates; slots of a head ascend by expert.
        out: contiguous `[matrices, d_in, d_out]`, any float dtype.
        wide_in: the wide side is `d_in`.
    """
    n_wide, n_narrow = out.shape[1:] if wide_in else (out.shape[2], out.shape[1])
    matrices = out.shape[0]
    wide_blocks, narrow_blocks = triton.cdiv(n_wide, tile.m), triton.cdiv(n_narrow, tile.n)
    output_tiles = matrices * wide_blocks * narrow_blocks
    # Program i and output tile t meet in piece i + t: the path through both is monotone, so no two meetings share one.
    partial = torch.empty(programs + output_tiles, tile.m, tile.n, dtype=torch.float32, device=out.device)
    sizes = (matrices, pad_to(triton.next_power_of_2(matrices), 2), wide_blocks, narrow_blocks)
    _partial_sums_kernel[(programs,)](
        wide, rows, groups.order, groups.offsets, partial, wide.stride(0), shared, wide.shape[1], rows.shape[1], *sizes,
        precision, tile.m, tile.n, tile.k, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    strides = (out.stride(1), out.stride(2)) if wide_in else (out.stride(2), out.stride(1))
    lines = min(32, tile.m)
    _add_pieces_kernel[(output_tiles, tile.m // lines)](
        groups.offsets, partial, out, programs, out.stride(0), *strides, n_wide, n_narrow, *sizes,
        tile.m, tile.n, tile.k, lines,
    )  # fmt: skip


@triton.jit
def _steps(offsets_ptr, GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, BLOCK_K: tl.constexpr):
    """Steps that each group needs, and the number of those of all groups up to and including it."""
    g = tl.arange(0, GROUPS_PADDED)
    first = tl.load(offsets_ptr + g, mask=g < GROUPS, other=0)
    end = tl.load(offsets_ptr + g + 1, mask=g < GROUPS, other=0)
    steps = (end - first + BLOCK_K - 1) // BLOCK_K
    return steps, tl.cumsum(steps, 0)


@triton.jit
def _partial_sums_kernel(
    wide_ptr,  # [slots / SHARED, WIDE]
    rows_ptr,  # [slots, NARROW]
    order_ptr,  # int32 [slots]
    offsets_ptr,  # int32 [GROUPS + 1]
    partial_ptr,  # float32 [pieces, BLOCK_M, BLOCK_N]
    stride_wide,
    SHARED: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, WIDE_BLOCKS: tl.constexpr, NARROW_BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = WIDE_BLOCKS * NARROW_BLOCKS
    g = tl.arange(0, GROUPS_PADDED)
    steps, ends = _steps(offsets_ptr, GROUPS, GROUPS_PADDED, BLOCK_K)
    all_steps = tl.sum(steps, 0).to(tl.int64) * BLOCKS
    program, programs = tl.program_id(0), tl.num_programs(0)
    at = program * all_steps // programs
    stop = (program + 1) * all_steps // programs
    while at < stop:
        group = tl.sum((ends.to(tl.int64) * BLOCKS <= at).to(tl.int32), 0)
        mine = g == group
        group_steps = tl.sum(tl.where(mine, steps, 0), 0)
        within = at - tl.sum(tl.where(mine, ends - steps, 0), 0).to(tl.int64) * BLOCKS
        block = (within // group_steps).to(tl.int32)
        step = (within % group_steps).to(tl.int32)
        n_steps = tl.minimum(group_steps - step, (stop - at).to(tl.int32))
        first = tl.load(offsets_ptr + group) + step * BLOCK_K
        end = tl.load(offsets_ptr + group + 1)

        m = block // NARROW_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
        n = block % NARROW_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for i in range(0, n_steps):
            # Lines past the end repeat the last slot, so that nothing of another expert is read, times zero.
            line = first + i * BLOCK_K + k
            slot = tl.load(order_ptr + tl.minimum(line, end - 1)).to(tl.int64)
            valid = line < end
            wide_at = wide_ptr + (slot // SHARED * stride_wide)[:, None] + m[None, :]
            rows_at = rows_ptr + (slot * NARROW)[:, None] + n[None, :]
            if WIDE % BLOCK_M == 0:
                x = tl.load(wide_at)
            else:
                x = tl.load(wide_at, mask=(m < WIDE)[None, :], other=0.0)
            y = tl.load(rows_at, mask=valid[:, None] & (n < NARROW)[None, :], other=0.0)
            total = tl.dot(x.T, y, total, input_precision=PRECISION)

        piece = (program + group * BLOCKS + block).to(tl.int64)
        line = tl.arange(0, BLOCK_M)[:, None]
        tl.store(partial_ptr + (piece * BLOCK_M + line) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :], total)
        at += n_steps


@triton.jit
def _add_pieces_kernel(
    offsets_ptr,  # int32 [GROUPS + 1]
    partial_ptr,  # float32 [pieces, BLOCK_M, BLOCK_N]
    out_ptr,  # [matrices, wide, narrow], any strides
    programs, stride_matrix, stride_wide, stride_narrow, n_wide, n_narrow,
    GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, WIDE_BLOCKS: tl.constexpr, NARROW_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = WIDE_BLOCKS * NARROW_BLOCKS
    tile = tl.program_id(0)
    group = tile // BLOCKS
    block = tile % BLOCKS
    g = tl.arange(0, GROUPS_PADDED)
    steps, ends = _steps(offsets_ptr, GROUPS, GROUPS_PADDED, BLOCK_K)
    all_steps = tl.sum(steps, 0).to(tl.int64) * BLOCKS
    mine = g == group
    group_steps = tl.sum(tl.where(mine, steps, 0), 0).to(tl.int64)
    at = tl.sum(tl.where(mine, ends - steps, 0), 0).to(tl.int64) * BLOCKS + block * group_steps
    line = tl.program_id(1) * LINES + tl.arange(0, LINES)
    n = tl.arange(0, BLOCK_N)
    total = tl.zeros((LINES, BLOCK_N), tl.float32)
    if group_steps > 0:
        # Program i holds step s if i * all_steps // programs <= s, and is the last to do so.
        first = ((at + 1) * programs - 1) // all_steps
        last = ((at + group_steps) * programs - 1) // all_steps
        for program in range(first, last + 1):
            piece = partial_ptr + (program + tile) * BLOCK_M * BLOCK_N
            total += tl.load(piece + line[:, None] * BLOCK_N + n[None, :])
    wide = (block // NARROW_BLOCKS * BLOCK_M + line)[:, None]
    narrow = (block % NARROW_BLOCKS * BLOCK_N + n)[None, :]
    target = out_ptr + group.to(tl.int64) * stride_matrix + wide * stride_wide + narrow * stride_narrow
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=(wide < n_wide) & (narrow < n_narrow))

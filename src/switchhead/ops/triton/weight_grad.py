"""Gradients of expert matrices: for each expert the sum over its tokens of an outer product.

The tokens of each expert are cut into chunks of nearly equal size, whatever the routing. Chunks of all experts run in
the order of their tokens, so that a token's rows are read from memory once and then from the L2 cache. Every chunk has
a partial sum of its own; a second kernel adds them in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from switchhead.ops.triton.grouping import RECORD, Groups, n_tiles_of, tile_size
from switchhead.ops.triton.operands import multiply_add
from switchhead.ops.triton.operator import visible
from switchhead.ops.triton.tuning import WEIGHT_GRAD_CHUNK, Tile


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
) -> None:
    """`out[e] = sum over slots of expert e of outer(wide[slot // shared], rows[slot])`; zero for an unused expert.

    Args:
        wide: aligned rows `[slots / shared, d_wide]`.
        rows: `[slots, d_narrow_padded]`, scaled by their gates; slots of a head ascend by expert.
        groups: single slots, in even tiles of `WEIGHT_GRAD_CHUNK`, multiples of `tile.k`: the chunks.
        out: contiguous `[H, E, d_in, d_out]`, any float dtype.
        wide_in: the wide side is `d_in`.
    """
    n_wide, n_narrow = out.shape[2:] if wide_in else (out.shape[3], out.shape[2])
    matrices = out.shape[0] * out.shape[1]
    wide_blocks, narrow_blocks = triton.cdiv(n_wide, tile.m), triton.cdiv(n_narrow, tile.n)
    blocks = wide_blocks * narrow_blocks
    chunks = groups.tiles[0]
    partial = torch.empty(chunks.shape[0] - 1, blocks, tile.m, tile.n, dtype=torch.float32, device=out.device)
    visible(_partial_sums_kernel)[((chunks.shape[0] - 1) * blocks,)](
        wide, rows, groups.order, chunks, partial, wide.stride(0), shared, wide.shape[1], rows.shape[1],
        blocks, narrow_blocks, RECORD, precision, tile.m, tile.n, tile.k, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    strides = (out.stride(2), out.stride(3)) if wide_in else (out.stride(3), out.stride(2))
    lines = min(32, tile.m)
    visible(_add_chunks_kernel)[(matrices * blocks, tile.m // lines)](
        groups.offsets, partial, out, out.stride(1), *strides, n_wide, n_narrow, matrices,
        triton.next_power_of_2(matrices), blocks, narrow_blocks, tile.m, tile.n, lines, WEIGHT_GRAD_CHUNK, tile.k,
    )  # fmt: skip


@triton.jit
def _partial_sums_kernel(
    wide_ptr,  # [slots / SHARED, WIDE]
    rows_ptr,  # [slots, NARROW]
    order_ptr,  # int32 [slots]
    chunks_ptr,  # int32 [chunks, RECORD]
    partial_ptr,  # float32 [chunks, BLOCKS, BLOCK_M, BLOCK_N]
    stride_wide,
    SHARED: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr,
    BLOCKS: tl.constexpr, NARROW_BLOCKS: tl.constexpr, RECORD: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    record = chunks_ptr + tl.program_id(0) // BLOCKS * RECORD
    block = tl.program_id(0) % BLOCKS
    first = tl.load(record)
    end = tl.load(record + 1)
    if first >= end:
        return
    chunk = tl.load(record + 3).to(tl.int64)
    m = block // NARROW_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block % NARROW_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(first, end, BLOCK_K):
        # Lines past the end repeat the last slot, so that nothing of another expert is read, times zero.
        valid = start + k < end
        slot = tl.load(order_ptr + tl.minimum(start + k, end - 1)).to(tl.int64)
        wide_at = wide_ptr + (slot // SHARED * stride_wide)[:, None] + m[None, :]
        if WIDE % BLOCK_M == 0:
            x = tl.load(wide_at)
        else:
            x = tl.load(wide_at, mask=(m < WIDE)[None, :], other=0.0)
        rows_at = rows_ptr + (slot * NARROW)[:, None] + n[None, :]
        y = tl.load(rows_at, mask=valid[:, None] & (n < NARROW)[None, :], other=0.0)
        total = multiply_add(x.T, y, total, first < end, PRECISION)
    line = (chunk * BLOCKS + block) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(partial_ptr + line[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :], total)


@triton.jit
def _add_chunks_kernel(
    offsets_ptr,  # int32 [matrices + 1]
    partial_ptr,  # float32 [chunks, BLOCKS, BLOCK_M, BLOCK_N]
    out_ptr,  # [matrices, wide, narrow], any strides
    stride_matrix, stride_wide, stride_narrow, n_wide, n_narrow,
    MATRICES: tl.constexpr, MATRICES_PADDED: tl.constexpr, BLOCKS: tl.constexpr, NARROW_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LINES: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    g = tl.arange(0, MATRICES_PADDED)
    slots = tl.load(offsets_ptr + g + 1, mask=g < MATRICES, other=0) - tl.load(
        offsets_ptr + g, mask=g < MATRICES, other=0
    )
    first = tl.sum(tl.where(g < matrix, n_tiles_of(slots, CHUNK, EVEN), 0), 0).to(tl.int64)
    mine = tl.sum(tl.where(g == matrix, slots, 0), 0)
    chunks = tl.cdiv(mine, tl.maximum(tile_size(mine, n_tiles_of(mine, CHUNK, EVEN), CHUNK, EVEN), 1))
    line = tl.program_id(1) * LINES + tl.arange(0, LINES)[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros((LINES, BLOCK_N), tl.float32)
    for chunk in range(first, first + chunks):
        at = ((chunk * BLOCKS + block) * BLOCK_M + line) * BLOCK_N + n
        total += tl.load(partial_ptr + at)
    wide = block // NARROW_BLOCKS * BLOCK_M + line
    narrow = block % NARROW_BLOCKS * BLOCK_N + n
    target = out_ptr + matrix.to(tl.int64) * stride_matrix + wide * stride_wide + narrow * stride_narrow
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=(wide < n_wide) & (narrow < n_narrow))

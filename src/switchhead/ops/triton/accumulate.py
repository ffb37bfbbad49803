"""Scaled rows times the stacked matrices of their experts, where the inner dimension is the short one (output
projection, gradients of value inputs).

The gates are already in the rows, so the sum over experts is the inner dimension of one matmul: a row's slots lie side
by side, their matrices one above the other. Rows of a group share experts, hence matrices: only chosen experts are
computed, and nothing but the sum is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from switchhead.ops.triton.grouping import RECORD, Groups
from switchhead.ops.triton.tuning import Tile


def accumulate(
    rows: Tensor,
    weight: Tensor,
    groups: Groups,
    *,
    width: int,
    depth: int,
    passes: bool,
    precision: str,
    tile: Tile,
) -> Tensor:
    """`out[row] = sum over slots of rows[row, slot] @ weight[expert of slot]`.

    Args:
        rows: `[rows * slots, depth]`, a row's slots in ascending order of experts.
        weight: `[matrices, depth_padded, n]`, padded to the tile.
        width: columns of the result.
        passes: add up the segments, one launch for each, into one row for each token; otherwise every row has its own.
    """
    n_rows = groups.order.numel()
    segments = groups.rows.segments
    n_out = n_rows // segments if passes else n_rows
    out = torch.empty(n_out, width, dtype=rows.dtype, device=rows.device)
    tiles = groups.tiles(tile.m, by_segment=passes)
    columns = triton.cdiv(width, tile.n)
    for i in range(tiles.shape[0]):
        _accumulate_kernel[(tiles.shape[1] * columns,)](
            rows, weight, groups.order, tiles[i], out, segments if passes else 1, i > 0,
            width, weight.shape[1], weight.shape[2], depth, groups.rows.slots, columns, RECORD,
            precision, tile.m, tile.n, tile.k, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out


@triton.jit
def _accumulate_kernel(
    rows_ptr,  # [rows, SLOTS * DEPTH]
    weight_ptr,  # [matrices, DEPTH_PADDED, N_PADDED]
    order_ptr,  # int32 [rows]
    tiles_ptr,  # int32 [tiles, RECORD]
    out_ptr,  # [rows / SEGMENTS, N]
    SEGMENTS: tl.constexpr, ADD: tl.constexpr,
    N: tl.constexpr, DEPTH_PADDED: tl.constexpr, N_PADDED: tl.constexpr, DEPTH: tl.constexpr, SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr, RECORD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    record = tiles_ptr + tl.program_id(0) // COLUMNS * RECORD
    column = tl.program_id(0) % COLUMNS
    start = tl.load(record)
    end = tl.load(record + 1)
    if start >= end:
        return
    m = start + tl.arange(0, BLOCK_M)
    row = tl.load(order_ptr + tl.minimum(m, end - 1)).to(tl.int64)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (m < end)[:, None] & (n < N)[None, :]
    out_at = out_ptr + (row // SEGMENTS)[:, None] * N + n[None, :]
    k = tl.arange(0, BLOCK_K)
    K: tl.constexpr = SLOTS * DEPTH
    rows_at = rows_ptr + (row * K)[:, None] + k[None, :]
    weight_at = weight_ptr + n[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        slot = (k0 + k) // DEPTH
        matrix = tl.load(record + 2)
        for s in tl.static_range(1, SLOTS):
            matrix = tl.where(slot == s, tl.load(record + 2 + s), matrix)
        line = matrix.to(tl.int64) * DEPTH_PADDED + (k0 + k - slot * DEPTH)
        if K % BLOCK_K == 0:
            x = tl.load(rows_at + k0)
            w = tl.load(weight_at + line[:, None] * N_PADDED)
        else:
            x = tl.load(rows_at + k0, mask=(k0 + k < K)[None, :], other=0.0)
            w = tl.load(weight_at + line[:, None] * N_PADDED, mask=(k0 + k < K)[:, None], other=0.0)
        total = tl.dot(x, w, total, input_precision=PRECISION)
    if ADD:
        total += tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=inside)

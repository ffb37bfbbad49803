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
from switchhead.ops.triton.operands import multiply_add
from switchhead.ops.triton.operator import visible
from switchhead.ops.triton.tuning import Tile, multiprocessors


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
        groups: the rows, in tiles of `tile.m`, a map for each pass.
        width: columns of the result.
        passes: add up the segments, one launch for each, into one row for each token; otherwise every row has its own.
    """
    n_rows = groups.order.numel()
    segments = groups.rows.segments
    n_out = n_rows // segments if passes else n_rows
    out = torch.empty(n_out, width, dtype=rows.dtype, device=rows.device)
    tiles = groups.tiles
    bound, columns = tiles.shape[1] - 1, triton.cdiv(width, tile.n)
    programs = torch.sym_min(bound * columns, tile.programs_per_sm * multiprocessors(rows.device))
    for i in range(tiles.shape[0]):
        visible(_accumulate_kernel)[(programs,)](
            rows, weight, groups.order, tiles[i], out, bound, segments if passes else 1, i > 0,
            width, weight.shape[1], weight.shape[2], depth, groups.rows.slots, columns, RECORD,
            precision, tile.m, tile.n, tile.k, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["bound"])
def _accumulate_kernel(
    rows_ptr,  # [rows, SLOTS * DEPTH]
    weight_ptr,  # [matrices, DEPTH_PADDED, N_PADDED]
    order_ptr,  # int32 [rows]
    tiles_ptr,  # int32 [bound + 1, RECORD]
    out_ptr,  # [rows / SEGMENTS, N]
    bound,
    SEGMENTS: tl.constexpr, ADD: tl.constexpr,
    N: tl.constexpr, DEPTH_PADDED: tl.constexpr, N_PADDED: tl.constexpr, DEPTH: tl.constexpr, SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr, RECORD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = SLOTS * DEPTH
    HALF: tl.constexpr = BLOCK_N // 2
    i = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    first = tl.program_id(0)
    n_tiles = tl.load(tiles_ptr + bound * RECORD)
    start, end, matrices = _tile(tiles_ptr + first // COLUMNS * RECORD, SLOTS)
    # Loaded here and not by `_tile`: where a function's result leads to the place of a store, a compiler takes all
    # that the function is given as written, and copies it.
    row = tl.load(order_ptr + _line(start, end, i)).to(tl.int64)
    for number in range(first, n_tiles * COLUMNS, tl.num_programs(0)):
        # The next tile's record and rows are loaded before this one's sum, which hides their latency.
        following = tl.minimum(number + tl.num_programs(0), n_tiles * COLUMNS - 1)
        next_start, next_end, next_matrices = _tile(tiles_ptr + following // COLUMNS * RECORD, SLOTS)
        next_row = tl.load(order_ptr + _line(next_start, next_end, i)).to(tl.int64)
        column = number % COLUMNS * BLOCK_N
        n = column + tl.arange(0, BLOCK_N)
        rows_at = rows_ptr + (row * K)[:, None] + k[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k0 in range(0, K, BLOCK_K):
            slot = (k0 + k) // DEPTH
            matrix = matrices[0] + tl.zeros_like(slot)
            for s in tl.static_range(1, SLOTS):
                matrix = tl.where(slot == s, matrices[s], matrix)
            line = matrix.to(tl.int64) * DEPTH_PADDED + (k0 + k - slot * DEPTH)
            weight_at = weight_ptr + (line * N_PADDED)[:, None] + n[None, :]
            if K % BLOCK_K == 0:
                x = tl.load(rows_at + k0)
                w = tl.load(weight_at)
            else:
                x = tl.load(rows_at + k0, mask=(k0 + k < K)[None, :], other=0.0)
                w = tl.load(weight_at, mask=(k0 + k < K)[:, None], other=0.0)
            total = multiply_add(x, w, total, start < end, PRECISION)

        # In two halves, which need half the registers and shared memory.
        left, right = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, HALF)), (0, 2, 1)))
        valid = (start + i < end)[:, None]
        m = (row // SEGMENTS)[:, None]
        _store(out_ptr, left, m, column + tl.arange(0, HALF)[None, :], valid, N, ADD)
        _store(out_ptr, right, m, column + HALF + tl.arange(0, HALF)[None, :], valid, N, ADD)
        start, end, row, matrices = next_start, next_end, next_row, next_matrices


@triton.jit
def _tile(record, SLOTS: tl.constexpr):
    """First row, end and matrices of a tile."""
    start = tl.load(record)
    end = tl.load(record + 1)
    matrices = ()
    for s in tl.static_range(SLOTS):
        matrices = matrices + (tl.load(record + 2 + s),)
    return start, end, matrices


@triton.jit
def _line(start, end, i):
    """Lines of a tile, the last one repeated; some line if it is empty."""
    return tl.maximum(tl.minimum(start + i, end - 1), 0)


@triton.jit
def _store(out_ptr, value, m, n, valid, N: tl.constexpr, ADD: tl.constexpr):
    at = out_ptr + m * N + n
    mask = valid & (n < N)
    if ADD:
        value += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, value.to(out_ptr.dtype.element_ty), mask=mask)

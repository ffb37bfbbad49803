"""Rows times the matrices of their experts, where the inner dimension is the long one (values, output gradients)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from switchhead.ops.triton.grouping import RECORD, Groups
from switchhead.ops.triton.operands import multiply_add
from switchhead.ops.triton.operator import visible
from switchhead.ops.triton.tuning import Tile


def project(
    x: Tensor,
    weight: Tensor,
    expert_indices: Tensor,
    gates: Tensor | None,
    groups: Groups,
    *,
    width: int,
    shared: int,
    precision: str,
    tile: Tile,
    keep_from: int | None = None,
    dot_with: Tensor | None = None,
    dot_shared: int = 1,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`y[row, j] = x[row // shared] @ weight[expert j of row]^T`, and what is made of it without another pass.

    Args:
        x: aligned rows `[rows / shared, K]`.
        weight: `[matrices, n, K]`, padded to the tile.
        expert_indices: `[rows, slots]` in the caller's order of slots.
        gates: `[rows, slots]`; None: no sum.
        groups: the rows, in tiles of `tile.m`.
        width: columns of the result.
        keep_from: also return y of the caller's slots from this one on.
        dot_with: `[rows / dot_shared, width]`, contiguous: also return `y[row, j] . dot_with[row // dot_shared]`,
            `[column blocks, rows, slots]` in float32, to be summed over the first dimension.

    Returns:
        The gate-weighted sum `[rows, width]` or None, y `[rows, slots - keep_from, width]` or None, the dot products or
        None.
    """
    n_rows = groups.order.numel()
    slots = groups.rows.slots
    out = None if gates is None else torch.empty(n_rows, width, dtype=x.dtype, device=x.device)
    keeps = 0 if keep_from is None else slots - keep_from
    kept = torch.empty(n_rows, keeps, width, dtype=x.dtype, device=x.device) if keeps else None
    columns = triton.cdiv(width, tile.n)
    dots = None
    if dot_with is not None:
        dots = torch.empty(columns, n_rows, slots, dtype=torch.float32, device=x.device)
    visible(_project_kernel)[((groups.tiles.shape[1] - 1) * columns,)](
        x, weight, expert_indices, gates, groups.order, groups.tiles, dot_with, out, kept, dots,
        n_rows, x.stride(0), shared, dot_shared, x.shape[1], width, *weight.shape[1:], slots, keeps, columns, RECORD,
        precision, tile.m, tile.n, tile.k, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, kept, dots


@triton.jit(do_not_specialize=["n_rows"])
def _project_kernel(
    x_ptr,  # [rows / SHARED, K]
    weight_ptr,  # [matrices, N_PADDED, K_PADDED]
    indices_ptr,  # int [rows, SLOTS]
    gates_ptr,  # [rows, SLOTS] or None
    order_ptr,  # int32 [rows]
    tiles_ptr,  # int32 [tiles, RECORD]
    dot_with_ptr,  # [rows / DOT_SHARED, N] or None
    out_ptr,  # [rows, N] or None
    kept_ptr,  # [rows, KEEPS, N] or None: the last KEEPS slots
    dots_ptr,  # float32 [COLUMNS, rows, SLOTS] or None
    n_rows, stride_x,
    SHARED: tl.constexpr, DOT_SHARED: tl.constexpr, K: tl.constexpr, N: tl.constexpr, N_PADDED: tl.constexpr,
    K_PADDED: tl.constexpr, SLOTS: tl.constexpr, KEEPS: tl.constexpr, COLUMNS: tl.constexpr, RECORD: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    record = tiles_ptr + tl.program_id(0) // COLUMNS * RECORD
    column = tl.program_id(0) % COLUMNS
    start = tl.load(record)
    end = tl.load(record + 1)
    if start >= end:
        return
    m = start + tl.arange(0, BLOCK_M)
    valid = m < end
    # Lines past the end repeat the last row: no mask in the loop, and nothing of another group is read.
    row = tl.load(order_ptr + tl.minimum(m, end - 1)).to(tl.int64)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + (row // SHARED * stride_x)[:, None] + k[None, :]
    weights_at = ()
    sums = ()
    places = ()
    gates = ()
    experts = ()
    if SLOTS > 1:
        for s in tl.static_range(SLOTS):
            experts = experts + (tl.load(indices_ptr + row * SLOTS + s),)
    for s in tl.static_range(SLOTS):
        matrix = tl.load(record + 2 + s).to(tl.int64)
        weights_at = weights_at + (weight_ptr + (matrix * N_PADDED + n)[:, None] * K_PADDED + k[None, :],)
        sums = sums + (tl.zeros((BLOCK_M, BLOCK_N), tl.float32),)
        # A tile's slots ascend by expert; the caller's do not. Loaded here, while the pipeline fills.
        place = row * SLOTS
        if SLOTS > 1:
            place += _slot_of_rank(experts, row, s, SLOTS)
        places = places + (place,)
        if gates_ptr is not None:
            gates = gates + (tl.load(gates_ptr + place).to(tl.float32),)
    for k0 in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            x = tl.load(x_at + k0)
        else:
            x = tl.load(x_at + k0, mask=(k0 + k < K)[None, :], other=0.0)
        new = ()
        for s in tl.static_range(SLOTS):
            w = tl.load(weights_at[s] + k0)
            new = new + (multiply_add(x, w.T, sums[s], start < end, PRECISION),)
        sums = new

    inside = valid[:, None] & (n < N)[None, :]
    if dot_with_ptr is not None:
        other = tl.load(dot_with_ptr + (row // DOT_SHARED)[:, None] * N + n[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for s in tl.static_range(SLOTS):
        place = places[s]
        if gates_ptr is not None:
            total += sums[s] * gates[s][:, None]
        if kept_ptr is not None:
            slot = place - row * SLOTS - (SLOTS - KEEPS)
            at = kept_ptr + (row * KEEPS + slot)[:, None] * N + n[None, :]
            tl.store(at, sums[s].to(kept_ptr.dtype.element_ty), mask=inside & (slot >= 0)[:, None])
        if dots_ptr is not None:
            dots = tl.sum(sums[s] * other, 1)
            tl.store(dots_ptr + column * tl.cast(n_rows, tl.int64) * SLOTS + place, dots, mask=valid)
    if out_ptr is not None:
        tl.store(out_ptr + row[:, None] * N + n[None, :], total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _slot_of_rank(experts, row, rank: tl.constexpr, SLOTS: tl.constexpr):
    """The slot of each row whose expert has `rank` smaller ones beside it."""
    found = tl.zeros_like(row)
    for j in tl.static_range(SLOTS):
        smaller = tl.zeros_like(row)
        for i in tl.static_range(SLOTS):
            smaller += (experts[i] < experts[j]).to(tl.int64)
        found = tl.where(smaller == rank, j, found)
    return found

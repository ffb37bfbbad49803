"""All experts of a head as one matrix product, the unchosen ones times zero.

Where the chosen experts' matrices are short along the inner dimension (output projections, gradients of values) or are
the result (weight gradients), cuBLAS on E / k times the arithmetic beats kernels on the chosen ones while E / k is
small: it runs near the machine's peak, and writes each result once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from switchhead.ops.triton.operator import visible


class Routed(NamedTuple):
    """Gates of all sides, float32 `[sides, N, H, K]`, contiguous; the rows that are spread belong to the last."""

    grad_gates: Tensor
    gates: Tensor
    expert_indices: Tensor


def spread_rows(
    x: Tensor,
    expert_indices: Tensor,
    gates: Tensor,
    out: Tensor,
    *,
    n_experts: int,
    width: int,
    first: int = 0,
    projected: Tensor | None = None,
    combined: Tensor | None = None,
    routed: Routed | None = None,
) -> Tensor | None:
    """Write every row of x once for each expert of its head, times that expert's gate, zero where it was not chosen.

    Args:
        x: `[N, H, d]` of any strides.
        expert_indices: `[N, H, K]`.
        gates: `[N, H, K]`.
        out: its columns `first .. first + H * E * width` are written, `[N, H, E, width]` in that order; those past d of
            each expert are zero.
        n_experts: E.
        width: columns of an expert; what x has beyond them is not written.
        projected: `[N, H, K, d]`: asks for the dot products of its rows with x's, which are the gates' gradients if x
            is the gradient of the gate-weighted sum of `projected`.
        combined: that sum, `[N, H, d]`, where `projected` `[N, H, K - 1, d]` lacks the first slot, whose gate is the
            largest: what the sum has beyond the other slots, divided by this gate, is as precise as the row itself.
        routed: asks for the gradients of all routers' scores, behind the experts' columns, and zeros behind them. With
            `projected` or `combined`, whose dot products are part of them.

    Returns:
        The dot products `[N, H, K]` in float32, or None if they were not asked for or are in the scores' gradients.
    """
    tokens, heads, k = expert_indices.shape
    wanted = projected is not None or combined is not None
    dots = None
    if wanted and routed is None:
        dots = torch.empty(tokens, heads, k, dtype=torch.float32, device=x.device)
    grad_gates, all_gates, all_indices = routed or (None, None, None)
    sides = 0 if all_gates is None else all_gates.shape[0]
    behind = 0 if routed is None else out.shape[1] - first - heads * n_experts * (width + sides)
    block_d = triton.next_power_of_2(max(width, x.shape[-1]))
    block = max(1, min(16, 4096 // block_d))
    visible(_spread_rows_kernel)[(triton.cdiv(tokens * heads, block),)](
        x, expert_indices.contiguous(), gates.contiguous(), projected, combined, grad_gates, all_gates, all_indices,
        out, dots, tokens * heads, *x.stride(), out.stride(0), first, heads, k, n_experts, x.shape[-1], width,
        sides, behind, block, block_d, triton.next_power_of_2(n_experts), triton.next_power_of_2(max(behind, 1)),
    )  # fmt: skip
    return dots


@triton.jit(do_not_specialize=["n_rows"])
def _spread_rows_kernel(
    x_ptr,  # [N, H, D]
    indices_ptr,  # int [N * H, K]
    gates_ptr,  # float32 [N * H, K]
    projected_ptr,  # [N * H, K, D], or [N * H, K - 1, D] beside combined, or None
    combined_ptr,  # [N * H, D] or None
    grad_gates_ptr,  # float32 [SIDES, N * H, K] or None
    all_gates_ptr,  # float32 [SIDES, N * H, K] or None
    all_indices_ptr,  # int32 [SIDES, N * H, K] or None
    out_ptr,  # [N, >= first + H * E * WIDTH], then SIDES * H * E scores and BEHIND zeros
    dots_ptr,  # float32 [N * H, K] or None
    n_rows, stride_n, stride_h, stride_d, stride_out, first,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    SIDES: tl.constexpr, BEHIND: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_BEHIND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = row < n_rows
    token, head = row // H, row % H
    d = tl.arange(0, BLOCK_D)
    inside = valid[:, None] & (d < D)[None, :]
    x = tl.load(x_ptr + (token * stride_n + head * stride_h)[:, None] + d[None, :] * stride_d, mask=inside, other=0.0)
    x = x.to(tl.float32)
    dots = ()
    if projected_ptr is not None or combined_ptr is not None:
        FIRST: tl.constexpr = 0 if combined_ptr is None else 1
        if FIRST:
            y = tl.load(combined_ptr + row[:, None] * D + d[None, :], mask=inside, other=0.0)
            left = tl.sum(x * y.to(tl.float32), 1)
        for j in tl.static_range(FIRST, K):
            at = projected_ptr + (row * (K - FIRST) + j - FIRST)[:, None] * D + d[None, :]
            y = tl.load(at, mask=inside, other=0.0)
            dots = dots + (tl.sum(x * y.to(tl.float32), 1),)
            if FIRST:
                left -= dots[j - 1] * tl.load(gates_ptr + row * K + j, mask=valid, other=0.0)
        if FIRST:
            largest = tl.load(gates_ptr + row * K, mask=valid, other=0.0)
            dots = (left / tl.where(largest > 0, largest, float("inf")),) + dots
    if dots_ptr is not None:
        for j in tl.static_range(K):
            tl.store(dots_ptr + row * K + j, dots[j], mask=valid)
    if grad_gates_ptr is not None:
        scores = out_ptr + (token * stride_out)[:, None] + first + H * E * WIDTH
        e = tl.arange(0, BLOCK_E)[None, :]
        for side in tl.static_range(SIDES):  # gradients of the sigmoids' arguments; the values' side is the last
            total = tl.zeros((BLOCK, BLOCK_E), tl.float32)
            for j in tl.static_range(K):
                slot = (tl.cast(n_rows, tl.int64) * side + row) * K + j
                gate = tl.load(all_gates_ptr + slot, mask=valid, other=0.0)
                grad = tl.load(grad_gates_ptr + slot, mask=valid, other=0.0)
                if side == SIDES - 1:
                    grad += dots[j]
                hit = tl.load(all_indices_ptr + slot, mask=valid, other=-1)[:, None] == e
                total = tl.where(hit, (grad * gate * (1 - gate))[:, None], total)
            at = scores + (side * H + head)[:, None] * E + e
            tl.store(at, total.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (e < E))
        if BEHIND > 0:
            c = tl.arange(0, BLOCK_BEHIND)[None, :]
            zeros = tl.zeros((BLOCK, BLOCK_BEHIND), out_ptr.dtype.element_ty)
            tl.store(scores + SIDES * H * E + c, zeros, mask=(valid & (head == 0))[:, None] & (c < BEHIND))
    target = out_ptr + (token * stride_out + head * (E * WIDTH))[:, None] + first + d[None, :]
    stored = valid[:, None] & (d < WIDTH)[None, :]
    experts = ()
    gates = ()
    for j in tl.static_range(K):  # loaded once, ahead of the stores
        experts = experts + (tl.load(indices_ptr + row * K + j, mask=valid, other=-1),)
        gates = gates + (tl.load(gates_ptr + row * K + j, mask=valid, other=0.0).to(tl.float32),)
    for expert in tl.static_range(E):
        gate = tl.zeros((BLOCK,), tl.float32)
        chosen = tl.zeros((BLOCK,), tl.int1)
        for j in tl.static_range(K):
            gate = tl.where(experts[j] == expert, gates[j], gate)
            chosen = chosen | (experts[j] == expert)
        value = tl.where(chosen[:, None], x * gate[:, None], 0.0)  # not a product with zero: x may be infinite
        tl.store(target + expert * WIDTH, value.to(out_ptr.dtype.element_ty), mask=stored)


def combine_experts(
    y: Tensor,
    expert_indices: Tensor,
    gates: Tensor | None,
    *,
    n_experts: int,
    d: int,
    keep_from: int | None = None,
    dot_with: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The chosen ones of all experts' rows: their gate-weighted sum, and what else is made of them.

    Args:
        y: `[N, H, E, width]`, contiguous.
        expert_indices: `[N, H, K]`.
        gates: `[N, H, K]`; None: no sum.
        n_experts: E.
        d: columns of the results; zeros past width.
        keep_from: also return the chosen rows of the slots from this one on.
        dot_with: `[N, H, d]` of any strides (H may be expanded): also return its dot products with the chosen rows.

    Returns:
        The sum `[N, H, d]` or None, the rows `[N, H, K - keep_from, d]` or None, the dot products `[N, H, K]` in
        float32 or None.
    """
    tokens, heads, k = expert_indices.shape
    shape = (tokens, heads, d)
    out = None if gates is None else torch.empty(shape, dtype=y.dtype, device=y.device)
    keeps = 0 if keep_from is None else k - keep_from
    kept = torch.empty(tokens, heads, keeps, d, dtype=y.dtype, device=y.device) if keeps else None
    dots = None if dot_with is None else torch.empty(tokens, heads, k, dtype=torch.float32, device=y.device)
    block_d = triton.next_power_of_2(d)
    block = max(1, min(16, 4096 // block_d))
    strides = (0, 0, 0) if dot_with is None else dot_with.stride()
    visible(_combine_experts_kernel)[(triton.cdiv(tokens * heads, block),)](
        y, expert_indices.contiguous(), None if gates is None else gates.contiguous(), dot_with, out, kept, dots,
        tokens * heads, *strides, heads, k, keeps, n_experts, d, y.shape[-1], block, block_d,
    )  # fmt: skip
    return out, kept, dots


@triton.jit(do_not_specialize=["n_rows"])
def _combine_experts_kernel(
    y_ptr,  # [N * H, E, WIDTH]
    indices_ptr,  # int [N * H, K]
    gates_ptr,  # float32 [N * H, K] or None
    dot_with_ptr,  # [N, H, D] or None
    out_ptr,  # [N * H, D] or None
    kept_ptr,  # [N * H, KEEPS, D] or None: the last KEEPS slots
    dots_ptr,  # float32 [N * H, K] or None
    n_rows, stride_n, stride_h, stride_d,
    H: tl.constexpr, K: tl.constexpr, KEEPS: tl.constexpr, E: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = row < n_rows
    d = tl.arange(0, BLOCK_D)
    inside = valid[:, None] & (d < D)[None, :]
    total = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    if dot_with_ptr is not None:
        at = dot_with_ptr + (row // H * stride_n + row % H * stride_h)[:, None] + d[None, :] * stride_d
        other = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(K):
        slot = row * K + j
        expert = tl.load(indices_ptr + slot, mask=valid, other=0).to(tl.int64)
        y_at = y_ptr + ((row * E + expert) * WIDTH)[:, None] + d[None, :]
        y = tl.load(y_at, mask=inside & (d < WIDTH)[None, :], other=0.0)
        if kept_ptr is not None and j >= K - KEEPS:
            at = kept_ptr + (row * KEEPS + j - (K - KEEPS))[:, None] * D + d[None, :]
            tl.store(at, y, mask=inside)
        if dot_with_ptr is not None:
            tl.store(dots_ptr + slot, tl.sum(y.to(tl.float32) * other, 1), mask=valid)
        if gates_ptr is not None:
            gate = tl.load(gates_ptr + slot, mask=valid, other=0.0).to(tl.float32)
            total += y.to(tl.float32) * gate[:, None]
    if gates_ptr is not None:
        tl.store(out_ptr + row[:, None] * D + d[None, :], total.to(out_ptr.dtype.element_ty), mask=inside)


def sum_over_tokens(rows: Tensor, wide: Tensor) -> Tensor:
    """`rows^T wide`, `[N, a]` and `[N, b]` to `[a, b]`: weight gradients, in float32."""
    if rows.is_cuda and rows.dtype != torch.float32:
        return torch.mm(rows.mT, wide, out_dtype=torch.float32)
    return rows.mT.float() @ wide.float()

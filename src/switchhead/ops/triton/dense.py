"""All experts of a head as one matrix product, the unchosen ones times zero.

Where the chosen experts' matrices are short along the inner dimension (output projections, gradients of values) or are
the result (weight gradients), cuBLAS on E / k times the arithmetic beats kernels on the chosen ones while E / k is
small: it runs near the machine's peak, and writes each result once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def spread_rows(
    x: Tensor,
    expert_indices: Tensor,
    gates: Tensor,
    out: Tensor,
    *,
    n_experts: int,
    width: int,
    projected: Tensor | None = None,
) -> Tensor | None:
    """Write every row of x once for each expert of its head, times that expert's gate, zero where it was not chosen.

    Args:
        x: `[N, H, d]` of any strides.
        expert_indices: `[N, H, K]`.
        gates: `[N, H, K]`.
        out: its first `H * E * width` columns are written, `[N, H, E, width]` in that order; columns past d are zero.
        n_experts: E.
        width: columns of an expert, at least d.
        projected: `[N, H, K, d]`: asks for the dot products of its rows with x's, which are the gates' gradients if x
            is the gradient of the gate-weighted sum of `projected`.

    Returns:
        The dot products `[N, H, K]` in float32, or None.
    """
    tokens, heads, k = expert_indices.shape
    dots = None if projected is None else torch.empty(tokens, heads, k, dtype=torch.float32, device=x.device)
    block_d = triton.next_power_of_2(width)
    block = max(1, min(16, 4096 // block_d))
    _spread_rows_kernel[(triton.cdiv(tokens * heads, block),)](
        x, expert_indices.contiguous(), gates.contiguous(), projected, out, dots,
        tokens * heads, *x.stride(), out.stride(0), heads, k, n_experts, x.shape[-1], width, block, block_d,
    )  # fmt: skip
    return dots


@triton.jit(do_not_specialize=["n_rows"])
def _spread_rows_kernel(
    x_ptr,  # [N, H, D]
    indices_ptr,  # int [N * H, K]
    gates_ptr,  # float32 [N * H, K]
    projected_ptr,  # [N * H, K, D] or None
    out_ptr,  # [N, >= H * E * WIDTH]
    dots_ptr,  # float32 [N * H, K] or None
    n_rows, stride_n, stride_h, stride_d, stride_out,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = row < n_rows
    token, head = row // H, row % H
    d = tl.arange(0, BLOCK_D)
    inside = valid[:, None] & (d < D)[None, :]
    x = tl.load(x_ptr + (token * stride_n + head * stride_h)[:, None] + d[None, :] * stride_d, mask=inside, other=0.0)
    x = x.to(tl.float32)
    if projected_ptr is not None:
        for j in tl.static_range(K):
            slot = row * K + j
            y = tl.load(projected_ptr + slot[:, None] * D + d[None, :], mask=inside, other=0.0)
            tl.store(dots_ptr + slot, tl.sum(x * y.to(tl.float32), 1), mask=valid)
    target = out_ptr + (token * stride_out + head * (E * WIDTH))[:, None] + d[None, :]
    stored = valid[:, None] & (d < WIDTH)[None, :]
    for expert in tl.static_range(E):
        gate = tl.zeros((BLOCK,), tl.float32)
        chosen = tl.zeros((BLOCK,), tl.int1)
        for j in tl.static_range(K):
            hit = tl.load(indices_ptr + row * K + j, mask=valid, other=-1) == expert
            gate = tl.where(hit, tl.load(gates_ptr + row * K + j, mask=valid, other=0.0).to(tl.float32), gate)
            chosen = chosen | hit
        value = tl.where(chosen[:, None], x * gate[:, None], 0.0)  # not a product with zero: x may be infinite
        tl.store(target + expert * WIDTH, value.to(out_ptr.dtype.element_ty), mask=stored)


def sum_over_tokens(rows: Tensor, wide: Tensor) -> Tensor:
    """`rows^T wide`, `[N, a]` and `[N, b]` to `[a, b]`: weight gradients, in float32."""
    if rows.is_cuda and rows.dtype != torch.float32:
        return torch.mm(rows.mT, wide, out_dtype=torch.float32)
    return (rows.mT @ wide).float()

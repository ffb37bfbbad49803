"""Operands in the layout that the matmul kernels read: aligned rows, padded with zeros, in the compute dtype."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from switchhead.ops.triton.operator import visible

ALIGN = 8  # elements: 16 bytes of a 16-bit dtype


def pad_to(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `size`."""
    return triton.cdiv(size, multiple) * multiple


def is_aligned(matrix: Tensor, dtype: torch.dtype) -> bool:
    """Whether `matrix` already is what `aligned_rows` makes of it."""
    if matrix.dtype != dtype or matrix.stride(1) != 1:
        return False
    return all(size % ALIGN == 0 for size in (matrix.shape[1], matrix.stride(0), matrix.storage_offset()))


def aligned_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` as a matrix `[rows, pad_to(width, 8)]` of aligned rows in `dtype`: a view where it already is one."""
    matrix = x.reshape(-1, x.shape[-1])
    if is_aligned(matrix, dtype):
        return matrix
    matrix = matrix.to(dtype)
    if padding := pad_to(matrix.shape[1], ALIGN) - matrix.shape[1]:
        return torch.nn.functional.pad(matrix, (0, padding))
    return matrix if is_aligned(matrix, dtype) else matrix.clone(memory_format=torch.contiguous_format)


def prepare_weight(weight: Tensor, dtype: torch.dtype, *, narrow_in: bool, blocks: tuple[int, int]) -> Tensor:
    """Cast experts `[H, E, d_in, d_out]` to `[H * E, narrow, wide]`, both padded with zeros to multiples of `blocks`.

    `narrow` is the input (`narrow_in`) or the output side; the other is contiguous. One kernel, whatever the strides.
    """
    heads, experts, d_in, d_out = weight.shape
    narrow, wide = (d_in, d_out) if narrow_in else (d_out, d_in)
    narrow_stride, wide_stride = (2, 3) if narrow_in else (3, 2)
    out = torch.empty(
        heads * experts, pad_to(narrow, blocks[0]), pad_to(wide, blocks[1]), dtype=dtype, device=weight.device
    )
    block_narrow, block_wide = 32, 64
    grid = (heads * experts * triton.cdiv(out.shape[1], block_narrow), triton.cdiv(out.shape[2], block_wide))
    visible(_prepare_weight_kernel)[grid](
        weight, out, experts, weight.stride(0), weight.stride(1), weight.stride(narrow_stride),
        weight.stride(wide_stride), narrow, wide, out.shape[1], out.shape[2], block_narrow, block_wide,
    )  # fmt: skip
    return out


@triton.jit
def _prepare_weight_kernel(
    weight_ptr,  # any float dtype [H, E, ., .]
    out_ptr,  # compute dtype [H * E, narrow_padded, wide_padded]
    n_experts, stride_h, stride_e, stride_narrow, stride_wide, narrow, wide,
    NARROW_PADDED: tl.constexpr, WIDE_PADDED: tl.constexpr, BLOCK_NARROW: tl.constexpr, BLOCK_WIDE: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = tl.cdiv(NARROW_PADDED, BLOCK_NARROW)
    matrix = (tl.program_id(0) // BLOCKS).to(tl.int64)
    i = tl.program_id(0) % BLOCKS * BLOCK_NARROW + tl.arange(0, BLOCK_NARROW)[:, None]
    j = tl.program_id(1) * BLOCK_WIDE + tl.arange(0, BLOCK_WIDE)[None, :]
    source = weight_ptr + matrix // n_experts * stride_h + matrix % n_experts * stride_e
    value = tl.load(
        source + i.to(tl.int64) * stride_narrow + j.to(tl.int64) * stride_wide,
        mask=(i < narrow) & (j < wide),
        other=0.0,
    )
    target = out_ptr + (matrix * NARROW_PADDED + i) * WIDE_PADDED + j
    tl.store(target, value.to(out_ptr.dtype.element_ty), mask=(i < NARROW_PADDED) & (j < WIDE_PADDED))


def scale_rows(
    x: Tensor,
    expert_indices: Tensor,
    gates: Tensor | None,
    dtype: torch.dtype,
    *,
    width: int,
    per_slot: bool = False,
    projected: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """One row for each slot, times its gate; the slots of a head in ascending order of their experts.

    Args:
        x: `[N, d]` or `[N, H, d]`, one row for all slots of a token or head; `[N, H, K, d]` if `per_slot`. Any strides.
        gates: `[N, H, K]`, or None to copy the rows unscaled.
        width: columns of the result; those past d are zero.
        projected: `[N, H, K, d]` in the order of `expert_indices`: asks for the dot products of its rows with x's,
            which are the gates' gradients if x is the gradient of the gate-weighted sum of `projected`.

    Returns:
        The rows `[N * H * K, width]`, and the dot products `[N, H, K]` in float32 or None.
    """
    tokens, heads, k = expert_indices.shape
    stride_h = x.stride(1) if x.ndim > 2 else 0
    stride_k = x.stride(2) if per_slot else 0
    rows = torch.empty(tokens * heads * k, width, dtype=dtype, device=x.device)
    dots = None if projected is None else torch.empty(tokens, heads, k, dtype=torch.float32, device=x.device)
    block_d = triton.next_power_of_2(width)
    block = max(1, min(32, 8192 // block_d))
    visible(_scale_rows_kernel)[(triton.cdiv(tokens * heads, block),)](
        x, expert_indices.contiguous(), None if gates is None else gates.contiguous(), projected, rows, dots,
        tokens * heads, x.stride(0), stride_h, stride_k, x.stride(-1),
        heads, k, x.shape[-1], width, per_slot, block, block_d,
    )  # fmt: skip
    return rows, dots


@triton.jit(do_not_specialize=["n_rows"])
def _scale_rows_kernel(
    x_ptr,  # [N, H or 1, K or 1, d]
    indices_ptr,  # int [n_rows, K]
    gates_ptr,  # [n_rows, K] or None
    projected_ptr,  # [n_rows, K, d] or None
    rows_ptr,  # [n_rows, K, WIDTH]
    dots_ptr,  # float32 [n_rows, K] or None
    n_rows, stride_n, stride_h, stride_k, stride_d,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PER_SLOT: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = row < n_rows
    d = tl.arange(0, BLOCK_D)
    inside = valid[:, None] & (d < D)[None, :]
    source = x_ptr + (row // H).to(tl.int64)[:, None] * stride_n + (row % H).to(tl.int64)[:, None] * stride_h
    source += d.to(tl.int64)[None, :] * stride_d
    # All loads before all stores, which the compiler may not reorder.
    xs = ()
    ys = ()
    for j in tl.static_range(K):
        if PER_SLOT or j == 0:
            xs = xs + (tl.load(source + j * stride_k, mask=inside, other=0.0),)
        if projected_ptr is not None:
            slot = row.to(tl.int64) * K + j
            ys = ys + (tl.load(projected_ptr + slot[:, None] * D + d[None, :], mask=inside, other=0.0),)
    for j in tl.static_range(K):
        x = xs[j if PER_SLOT else 0]
        slot = row.to(tl.int64) * K + j
        if projected_ptr is not None:
            tl.store(dots_ptr + slot, tl.sum(x.to(tl.float32) * ys[j].to(tl.float32), 1), mask=valid)
        scaled = x
        if gates_ptr is not None:
            gate = tl.load(gates_ptr + slot, mask=valid, other=0.0)
            scaled = x.to(tl.float32) * gate.to(tl.float32)[:, None]
        expert = tl.load(indices_ptr + slot, mask=valid, other=0)
        rank = tl.zeros_like(row)
        for i in tl.static_range(K):
            other = tl.load(indices_ptr + row.to(tl.int64) * K + i, mask=valid, other=0)
            rank += (other < expert).to(tl.int32)
        target = rows_ptr + (row.to(tl.int64) * K + rank)[:, None] * WIDTH + d[None, :]
        tl.store(target, scaled.to(rows_ptr.dtype.element_ty), mask=valid[:, None] & (d < WIDTH)[None, :])


@triton.jit
def multiply_add(x, w, total, true, PRECISION: tl.constexpr):
    """`total + x @ w`.

    float32 is summed in two levels, within a step and over steps: one long sum would lose more than a library's blocked
    one. `true` is a condition that holds but that the compiler cannot know to hold, or it would make one sum of two.
    """
    if x.dtype == tl.float32:
        return total + tl.where(true, tl.dot(x, w, input_precision=PRECISION), 0.0)
    return tl.dot(x, w, total)

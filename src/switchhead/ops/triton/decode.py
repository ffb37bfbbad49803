"""A handful of tokens: a matrix-vector product for each slot that reads the chosen experts' weights and no others."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from switchhead.ops.triton.operator import visible

# A program adds up few columns, so that there are many programs, over long pieces, so that it waits seldom.
_BLOCK_IN, _BLOCK_OUT = 1024, 16


def decode(
    x: Tensor,
    weight: Tensor,
    gates: Tensor | None,
    expert_indices: Tensor,
    dtype: torch.dtype,
    *,
    per_token: int,
    width: int | None = None,
) -> Tensor:
    """`out[i] = sum over the slots of output row i of gate * x[row of slot] @ weight[expert of slot]`.

    Args:
        x: `[N, d_in]` or `[N, H, d_in]`, any strides.
        weight: `[H or 1, E, d_in, d_out]`, any strides and float dtype; rounded to `dtype` as it is read.
        gates: `[N, H, K]` or None.
        per_token: output rows of a token: 1 (sum over heads), H (sum over k) or H * K.
        width: columns of the result, zeros past d_out; None: d_out.

    Returns:
        `[N * per_token, width]`.
    """
    tokens, heads, k = expert_indices.shape
    d_in, d_out = weight.shape[2:]
    width = d_out if width is None else width
    slots = heads * k // per_token
    out = torch.empty(tokens * per_token, width, dtype=dtype, device=x.device)
    visible(_decode_kernel)[(tokens * per_token, triton.cdiv(width, _BLOCK_OUT))](
        x, weight, None if gates is None else gates.contiguous(), expert_indices.contiguous(), out,
        x.stride(0), x.stride(1) if x.ndim == 3 else 0, x.stride(-1),
        weight.stride(0) if weight.shape[0] > 1 else 0, *weight.stride()[1:],
        d_in, d_out, width, heads, k, slots, min(_BLOCK_IN, triton.next_power_of_2(slots * d_in)), _BLOCK_OUT,
        num_warps=8,
    )  # fmt: skip
    return out


@triton.jit
def _decode_kernel(
    x_ptr,  # [N, H or 1, D_IN]
    weight_ptr,  # [H or 1, E, D_IN, D_OUT]
    gates_ptr,  # [slots] or None
    indices_ptr,  # int [slots]
    out_ptr,  # [rows, WIDTH]
    stride_xn, stride_xh, stride_xd, stride_h, stride_e, stride_in, stride_out,
    D_IN: tl.constexpr, D_OUT: tl.constexpr, WIDTH: tl.constexpr, H: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    dtype = out_ptr.dtype.element_ty
    products = tl.zeros((BLOCK_IN, BLOCK_OUT), tl.float32)
    for start in range(0, SLOTS * D_IN, BLOCK_IN):  # the inputs of all slots, one after the other
        i = start + tl.arange(0, BLOCK_IN)
        inside = i < SLOTS * D_IN
        slot, k = row * SLOTS + i // D_IN, (i % D_IN).to(tl.int64)
        token, head = slot // (H * K), slot // K % H
        expert = tl.load(indices_ptr + slot, mask=inside, other=0).to(tl.int64)
        x = tl.load(x_ptr + token * stride_xn + head * stride_xh + k * stride_xd, mask=inside, other=0.0)
        x = x.to(dtype).to(tl.float32)
        if gates_ptr is not None:
            x *= tl.load(gates_ptr + slot, mask=inside, other=0.0).to(tl.float32)
        at = weight_ptr + (head * stride_h + expert * stride_e + k * stride_in)[:, None] + n[None, :] * stride_out
        w = tl.load(at, mask=inside[:, None] & (n < D_OUT)[None, :], other=0.0)
        products += x[:, None] * w.to(dtype).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + n, tl.sum(products, 0).to(dtype), mask=n < WIDTH)

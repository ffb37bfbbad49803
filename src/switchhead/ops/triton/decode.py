"""A handful of tokens: a matrix-vector product for each slot that reads the chosen experts' weights and no others."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from switchhead.ops.triton.operator import visible

_BLOCK_K, _BLOCK_N = 64, 64


def decode(
    x: Tensor, weight: Tensor, gates: Tensor | None, expert_indices: Tensor, dtype: torch.dtype, *, per_token: int
) -> Tensor:
    """`out[i] = sum over the slots of output row i of gate * x[row of slot] @ weight[expert of slot]`.

    Args:
        x: `[N, d_in]` or `[N, H, d_in]`, any strides.
        weight: `[H or 1, E, d_in, d_out]`, any strides and float dtype; rounded to `dtype` as it is read.
        gates: `[N, H, K]` or None.
        per_token: output rows of a token: 1 (sum over heads), H (sum over k) or H * K.

    Returns:
        `[N * per_token, d_out]`.
    """
    tokens, heads, k = expert_indices.shape
    d_in, d_out = weight.shape[2:]
    out = torch.empty(tokens * per_token, d_out, dtype=dtype, device=x.device)
    visible(_decode_kernel)[(tokens * per_token, triton.cdiv(d_out, _BLOCK_N))](
        x, weight, None if gates is None else gates.contiguous(), expert_indices.contiguous(), out,
        x.stride(0), x.stride(1) if x.ndim == 3 else 0, x.stride(-1),
        weight.stride(0) if weight.shape[0] > 1 else 0, *weight.stride()[1:],
        d_in, d_out, heads, k, heads * k // per_token, _BLOCK_K, _BLOCK_N,
    )  # fmt: skip
    return out


@triton.jit
def _decode_kernel(
    x_ptr,  # [N, H or 1, D_IN]
    weight_ptr,  # [H or 1, E, D_IN, D_OUT]
    gates_ptr,  # [slots] or None
    indices_ptr,  # int [slots]
    out_ptr,  # [rows, D_OUT]
    stride_xn, stride_xh, stride_xd, stride_h, stride_e, stride_in, stride_out,
    D_IN: tl.constexpr, D_OUT: tl.constexpr, H: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    dtype = out_ptr.dtype.element_ty
    total = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for s in range(0, SLOTS):
        slot = row * SLOTS + s
        head = slot // K % H
        x_at = x_ptr + slot // (H * K) * stride_xn + head * stride_xh
        weight_at = weight_ptr + head * stride_h + tl.load(indices_ptr + slot).to(tl.int64) * stride_e
        part = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
        for k0 in range(0, D_IN, BLOCK_K):
            inside = k0 + k < D_IN
            x = tl.load(x_at + (k0 + k) * stride_xd, mask=inside, other=0.0)
            w = tl.load(
                weight_at + (k0 + k)[:, None] * stride_in + n[None, :] * stride_out,
                mask=inside[:, None] & (n < D_OUT)[None, :],
                other=0.0,
            )
            part += x.to(dtype).to(tl.float32)[:, None] * w.to(dtype).to(tl.float32)
        if gates_ptr is not None:
            part *= tl.load(gates_ptr + slot).to(tl.float32)
        total += part
    tl.store(out_ptr + row * D_OUT + n, tl.sum(total, 0).to(dtype), mask=n < D_OUT)

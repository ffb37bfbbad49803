"""Causal attention over rows that hold several documents, none of which sees another."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

Backend = Literal["auto", "reference", "varlen"]


def document_boundaries(position_ids: Int[Tensor, "batch T"]) -> Int[Tensor, " documents+1"]:
    """Where documents begin in the flattened rows, from positions that restart at 0: int32, ends with B*T.

    A row begins a document even if its first position is not 0 (the rest of one that was cut). The number of documents
    is read from the data: call this where batches are made, not inside the model, where a GPU would have to wait.
    """
    if position_ids.ndim != 2:
        raise ValueError(f"position_ids must be [batch, T]; got {tuple(position_ids.shape)}")
    starts = position_ids == 0
    starts[:, :1] = True
    return F.pad(starts.flatten().nonzero().flatten(), (0, 1), value=starts.numel()).to(torch.int32)


def packed_attention(
    q: Float[Tensor, "batch heads T d"],
    k: Float[Tensor, "batch key_heads T d"],
    v: Float[Tensor, "batch key_heads T d"],
    *,
    cu_seqlens: Int[Tensor, " documents+1"],
    scale: float,
    backend: Backend = "auto",
) -> Float[Tensor, "batch heads T d"]:
    """Causal attention within each document of the rows.

    Nothing here depends on the documents' lengths, so there is no synchronisation and one compilation serves any
    packing; the longest document is bounded by T.

    Args:
        q: `[B, H, T, d]`; positions, if any, already applied.
        k, v: `[B, Hk, T, d]`; each key head serves H / Hk query heads.
        cu_seqlens: int32, first tokens of the documents in the flattened rows, and B*T (see `document_boundaries`). No
            document crosses a row.
        scale: factor of the scores.
        backend: `"varlen"`: PyTorch's variable-length flash attention (CUDA capability 8.0, float16 or bfloat16, d at
            most 256). `"reference"`: a boolean mask `[B, 1, T, T]`. `"auto"`: varlen where it runs. Varlen's gradients
            repeat bit for bit only under `torch.use_deterministic_algorithms(True)`.

    Raises:
        ValueError: shapes or dtypes that do not fit, or a backend that cannot run here.
    """
    _check(q, k, v, cu_seqlens)
    obstacle = varlen_obstacle(q)
    if backend == "auto":
        backend = "reference" if obstacle else "varlen"
    if backend not in ("reference", "varlen"):
        raise ValueError(f"backend={backend!r} is unknown; use 'auto', 'reference' or 'varlen'")
    if backend == "reference":
        return _reference(q, k, v, cu_seqlens, scale)
    if obstacle:
        raise ValueError(f"backend='varlen' cannot run here: {obstacle}; use backend='auto' or 'reference'")
    return _varlen(q, k, v, cu_seqlens, scale)


def varlen_obstacle(q: Tensor) -> str | None:
    """Why variable-length flash attention cannot run on queries like q; None where it can."""
    if q.device.type != "cuda":
        return f"it needs a CUDA device, not {q.device.type}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 or bfloat16, not {q.dtype}"
    if q.shape[-1] > 256:
        return f"it takes heads of at most 256 channels, not {q.shape[-1]}"
    capability = torch.cuda.get_device_capability(q.device)
    return None if capability >= (8, 0) else f"the GPU's compute capability {capability} is below (8, 0)"


def _varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # loads the compiler, and with it triton

    batch, heads, length, width = q.shape
    if k.shape[1] != heads:
        k, v = (x.repeat_interleave(heads // k.shape[1], dim=1) for x in (k, v))
    padding = (0, -width % 8)  # the kernel takes multiples of 8
    q, k, v = (F.pad(x, padding).transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [B*T, H, d]
    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, length, length, scale=scale, window_size=(-1, 0))
    assert isinstance(out, Tensor)  # a tuple only where auxiliary results are asked for
    return out[..., :width].unflatten(0, (batch, length)).transpose(1, 2)


def _reference(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    batch, heads, length, _ = q.shape
    token = torch.arange(batch * length, device=q.device, dtype=cu_seqlens.dtype)
    document = torch.searchsorted(cu_seqlens, token, right=True).view(batch, length)
    position = torch.arange(length, device=q.device)
    visible = (document[:, :, None] == document[:, None, :]) & (position[:, None] >= position)
    return F.scaled_dot_product_attention(q, k, v, visible[:, None], scale=scale, enable_gqa=k.shape[1] != heads)


def _check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> None:
    fits = q.ndim == k.ndim == 4 and k.shape == v.shape
    if not fits or q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:] or q.shape[1] % k.shape[1]:
        raise ValueError(
            "packed_attention needs q [B, H, T, d] and k, v [B, Hk, T, d] with H a multiple of Hk; got "
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype != torch.int32:
        raise ValueError(
            f"cu_seqlens must be one row of int32; got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)} "
            "(document_boundaries makes it)"
        )

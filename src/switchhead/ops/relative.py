"""Attention with Transformer-XL's relative positions (arXiv 1901.02860, section 3.3), fused or in plain PyTorch."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from switchhead.ops import availability
from switchhead.ops.attention import Masks, attend
from switchhead.ops.dtypes import cast_together
from switchhead.ops.widths import pad_width

Backend = Literal["auto", "reference", "triton"]


def relative_attention(
    q: Float[Tensor, "batch heads T d"],
    k: Float[Tensor, "batch key_heads S d"],
    v: Float[Tensor, "batch key_heads S d"],
    r: Float[Tensor, "heads positions d"],
    *,
    content_bias: Float[Tensor, "heads d"] | None = None,
    position_bias: Float[Tensor, "heads d"] | None = None,
    scale: float | Float[Tensor, " 1"],
    causal: bool = True,
    key_padding_mask: Bool[Tensor, "batch S"] | None = None,
    attn_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Float[Tensor, "batch heads T d"]:
    """Attention whose scores depend on content and on the distance between query and key.

        score(i, j) = scale * ((q_i + content_bias) . k_j + (q_i + position_bias) . r[pos(j) - pos(i)])

    Queries are aligned to the last keys: pos(i) = S - T + i, so with S > T the first S - T keys are memory.

    Args:
        q: `[B, H, T, d]`.
        k, v: `[B, Hk, S, d]`; each key head serves H / Hk query heads. The kernels need S >= T.
        r: `[H, P, d]`, projected positions; row p is distance `p - (S - 1)` (source minus query, negative = past).
            P = S suffices with `causal`, otherwise P = S + T - 1.
        content_bias, position_bias: `[H, d]`, added to the queries of one kind of scores.
        scale: a positive number, or a learned tensor of one element. A tensor is multiplied into the queries.
        causal: hide the keys after a query.
        key_padding_mask: True = may not be attended. A query with nothing to attend to gives zeros.
        attn_mask: as in `torch.nn.MultiheadAttention`, see `switchhead.ops.attend`; the reference backend takes one.
        backend: `"triton"`: one fused kernel each way, memory linear in T and S. `"reference"`: an additive bias
            `[B, H, T, S]` for `scaled_dot_product_attention`. `"auto"`: triton where it runs.

    Returns:
        `[B, H, T, d]` in autocast's dtype inside autocast, else in the promotion of q's, k's, v's and r's.

    Raises:
        ValueError: shapes that do not fit, or a backend that cannot run here.
    """
    _check(q, k, v, r, scale, causal, key_padding_mask)
    q, k, v, r = cast_together(q, k, v, r)
    obstacle = triton_obstacle(q, k) if attn_mask is None else "the kernels take no attn_mask"
    if backend == "auto":
        backend = "triton" if availability.is_gpu(q.device) and obstacle is None else "reference"
    if backend not in ("reference", "triton"):
        raise ValueError(f"backend={backend!r} is unknown; use 'auto', 'reference' or 'triton'")
    if backend == "triton" and obstacle is not None:
        raise ValueError(f"backend='triton' cannot run here: {obstacle}; use backend='auto' or 'reference'")

    u = q if position_bias is None else q + position_bias.to(q.dtype)[:, None]
    if content_bias is not None:
        q = q + content_bias.to(q.dtype)[:, None]
    if isinstance(scale, Tensor):  # folded into the queries: autograd finds its gradient there
        is_shared = u is q
        q = (q * scale).to(k.dtype)
        u = q if is_shared else (u * scale).to(k.dtype)
        scale = 1.0
    if backend == "triton":
        return _triton(q, u, k, v, r, scale, causal, key_padding_mask)
    bias = relative_bias(u, r, k.shape[2]) * scale
    masks = Masks(causal=causal, key_padding_mask=key_padding_mask, attn_mask=attn_mask)
    return attend(q, k, v, scale=scale, bias=bias, **masks)


def triton_obstacle(q: Tensor, k: Tensor) -> str | None:
    """Why the fused kernel cannot run on queries and keys like these; None where it can."""
    if k.shape[-2] < q.shape[-2]:
        return f"the kernels need a key for every query, not S = {k.shape[-2]} keys for T = {q.shape[-2]} queries"
    if q.shape[-1] > 256:
        return f"the kernels take heads of at most 256 channels, not {q.shape[-1]}"
    return availability.triton_obstacle(q.device, q.dtype)


def _triton(q, u, k, v, r, scale, causal, padding) -> Tensor:
    from switchhead.ops.triton_attention.operator import relative_attention as fused

    width = q.shape[-1]
    is_shared = u is q
    aligned = -(-width // 8) * 8  # rows of whole 16-byte words
    q, u, k, v, r = (pad_width(x, aligned) for x in (q, u, k, v, r))
    out, _ = fused(q, None if is_shared else u, k, v, r, padding, scale, causal)
    return out[..., :width]


def relative_bias(
    q: Float[Tensor, "batch heads T d"], r: Float[Tensor, "heads distances d"], n_keys: int
) -> Float[Tensor, "batch heads T S"]:
    """Position scores `q_i . r[pos(j) - pos(i)]` for queries aligned to the last of S keys.

    Args:
        q: queries.
        r: projected positions of the distances `-(S-1) .. 0` (causal) or `-(S-1) .. T-1`, in this order.
        n_keys: S. Entries of future keys are meaningless where r ends at distance 0.
    """
    n_queries = q.shape[-2]
    if n_queries == 0:
        return q.new_zeros(*q.shape[:-1], n_keys)
    scores = q @ r.mT  # [B, H, T, distances]
    # Entry (i, j) is at distance index T - 1 - i + j: rows of one more column, read with rows of one less.
    scores = F.pad(scores, (0, n_keys + n_queries - scores.shape[-1]))
    flat = scores.flatten(-2)[..., n_queries - 1 :]
    width = n_keys + n_queries - 1
    return flat[..., : n_queries * width].unflatten(-1, (n_queries, width))[..., :n_keys]


def _check(
    q: Tensor, k: Tensor, v: Tensor, r: Tensor, scale: float | Tensor, causal: bool, padding: Tensor | None
) -> None:
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            "relative_attention needs q [B, H, T, d] and k, v [B, Hk, S, d]; got "
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    (_, heads, n_queries, width), (batch, key_heads, n_keys, _) = q.shape, k.shape
    if heads % key_heads != 0:
        raise ValueError(f"{heads} query heads do not divide among {key_heads} key heads; H must be a multiple of Hk")
    if not isinstance(scale, Tensor) and scale <= 0:
        raise ValueError(f"scale={scale} must be positive (a learned tensor may be anything)")
    needed = n_keys if causal else n_keys + n_queries - 1
    if r.ndim != 3 or r.shape[0] != heads or r.shape[2] != width or r.shape[1] < needed:
        raise ValueError(
            f"r must be [{heads}, P, {width}] with P >= {needed} positions; got {tuple(r.shape)} (causal={causal})"
        )
    if padding is not None and (padding.dtype != torch.bool or padding.shape != (batch, n_keys)):
        raise ValueError(
            f"key_padding_mask must be boolean [{batch}, {n_keys}]; got {padding.dtype} {tuple(padding.shape)}"
        )

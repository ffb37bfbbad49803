"""What all attention layers share: the source of keys and values, masks, positions, and the weighted average itself."""

from __future__ import annotations

from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from switchhead.nn.positions import Rotary
from switchhead.nn.projections import aligned_width, pad_width


class Cache(Protocol):
    """Keys and values of earlier calls, `[B, H, T, d_head]`: keys already rotated, widths unpadded."""

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add new keys and values; return all of them."""
        ...


def check_sizes(**sizes: int) -> None:
    """Refuse sizes below 1, by name."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")


def check_input(x: Tensor, d_model: int, context: Tensor | None, memory: Tensor | None) -> None:
    """Refuse what the layer cannot mean."""
    if x.ndim != 3 or x.shape[-1] != d_model:
        raise ValueError(f"x must be [batch, length, d_model={d_model}]; got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"x must be floating point; got {x.dtype} (embed token ids first)")
    if context is not None and memory is not None:
        raise ValueError("context and memory exclude each other: cross-attention has no previous chunk")
    for name, other in (("context", context), ("memory", memory)):
        if other is not None and (other.ndim != 3 or other.shape[0] != x.shape[0] or other.shape[-1] != d_model):
            raise ValueError(f"{name} must be [{x.shape[0]}, length, {d_model}] beside x; got {tuple(other.shape)}")


def key_value_source(
    x: Float[Tensor, "batch T d_model"], context: Tensor | None, memory: Tensor | None
) -> Float[Tensor, "batch S d_model"]:
    """What keys and values are made of: the context, or the input behind its memory."""
    if context is not None:
        return context
    return x if memory is None else torch.cat([memory.to(x.dtype), x], dim=1)


def merge_heads(y: Float[Tensor, "batch heads T d"]) -> Float[Tensor, "tokens heads d"]:
    """`[B, H, T, d]` to `[B*T, H, d]`."""
    return y.transpose(1, 2).flatten(0, 1)


def rotate_queries_and_keys(
    q: Tensor,
    k: Tensor,
    rotary: Rotary,
    *,
    d_head: int,
    position_ids: Int[Tensor, "*batch T"] | None,
    cached: bool,
    crossed: bool,
) -> tuple[Tensor, Tensor]:
    """Rotate q and the new keys; positions of the queries default to the last ones of the keys.

    Widths may be padded beyond d_head, which says how many channels rotate.
    """
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    if position_ids is None:
        if cached:
            raise ValueError("rotary positions with a cache need position_ids: where the new tokens stand is not known")
        first = 0 if crossed else n_keys - n_queries
        position_ids = torch.arange(first, first + n_queries, device=q.device)
    elif position_ids.ndim not in (1, 2) or position_ids.shape[-1] != n_queries:
        raise ValueError(f"position_ids must be [{n_queries}] or [batch, {n_queries}]; got {tuple(position_ids.shape)}")
    q_table = rotary.table(position_ids, d_head, q.dtype)
    if crossed:
        k_table = rotary.table(torch.arange(n_keys, device=k.device), d_head, k.dtype)
    elif n_keys > n_queries:  # the memory's positions run up to the first query's
        before = torch.arange(n_queries - n_keys, 0, device=k.device) + position_ids[..., :1]
        k_table = rotary.table(torch.cat([before, position_ids], dim=-1), d_head, k.dtype)
    else:
        k_table = q_table
    return rotary.rotate(q, q_table), rotary.rotate(k, k_table)


def attend(
    q: Float[Tensor, "batch heads T d"],
    k: Float[Tensor, "batch kv_heads S d"],
    v: Float[Tensor, "batch kv_heads S d_v"],
    *,
    scale: float,
    causal: bool,
    key_padding_mask: Bool[Tensor, "batch S"] | None = None,
    attn_mask: Tensor | None = None,
    bias: Float[Tensor, "batch heads T S"] | None = None,
) -> Float[Tensor, "batch heads T d_v"]:
    """`softmax(scale q k^T + bias) v` over the keys that causality and masks leave; zeros where none is left.

    Plain causal attention carries no mask, so that the fastest kernel stays available.
    """
    n_queries, n_keys, width = q.shape[-2], k.shape[-2], v.shape[-1]
    q, k, v = (pad_width(t, aligned_width(t.shape[-1], t.device)) for t in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    masked = not (key_padding_mask is None and attn_mask is None and bias is None)
    if not masked and (not causal or n_queries == 1 or n_queries == n_keys):
        is_causal = causal and n_queries > 1
        y = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=gqa)
        return y[..., :width]
    blocked, added = _combine_masks(q, k, causal, key_padding_mask, attn_mask, bias)
    # A row that sees nothing would be NaN on some kernels: let it see everything, and return zeros.
    blind = blocked.all(-1, keepdim=True)  # [., ., T, 1]
    blocked = blocked & ~blind
    mask = ~blocked if added is None else added.masked_fill(blocked, -torch.inf)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=gqa)
    return y[..., :width].masked_fill(blind, 0.0)


def _combine_masks(
    q: Tensor,
    k: Tensor,
    causal: bool,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """All masks as one boolean "may not attend" and one sum of additive terms."""
    (batch, heads, n_queries, _), n_keys = q.shape, k.shape[-2]
    blocked = torch.zeros(1, 1, n_queries, n_keys, dtype=torch.bool, device=q.device)
    if causal:
        blocked = ~torch.ones_like(blocked).tril(n_keys - n_queries)
    if key_padding_mask is not None:
        if key_padding_mask.dtype != torch.bool or key_padding_mask.shape != (batch, n_keys):
            raise ValueError(
                f"key_padding_mask must be boolean [{batch}, {n_keys}] (one entry a key, memory first; True = ignore); "
                f"got {key_padding_mask.dtype} {tuple(key_padding_mask.shape)}"
            )
        blocked = blocked | key_padding_mask[:, None, None, :]
    added = bias
    if attn_mask is not None:
        attn_mask = _as_four_dimensions(attn_mask, batch, heads, n_queries, n_keys)
        if attn_mask.dtype == torch.bool:
            blocked = blocked | attn_mask
        else:
            minus_infinity = attn_mask == -torch.inf
            blocked = blocked | minus_infinity
            finite = attn_mask.masked_fill(minus_infinity, 0.0).to(q.dtype)
            added = finite if added is None else added + finite
    return blocked, added


def _as_four_dimensions(mask: Tensor, batch: int, heads: int, n_queries: int, n_keys: int) -> Tensor:
    shape = tuple(mask.shape)
    if mask.dtype == torch.bool or mask.is_floating_point():
        if shape == (n_queries, n_keys):
            return mask[None, None]
        if shape == (batch * heads, n_queries, n_keys):
            return mask.unflatten(0, (batch, heads))
        if mask.ndim == 4 and shape[0] in (1, batch) and shape[1] in (1, heads) and shape[2:] == (n_queries, n_keys):
            return mask
    raise ValueError(
        f"attn_mask must be boolean (True = ignore) or floating point (added to the scores), [{n_queries}, {n_keys}], "
        f"[{batch * heads}, {n_queries}, {n_keys}] or [{batch}, {heads} or 1, {n_queries}, {n_keys}]; "
        f"got {mask.dtype} {shape}"
    )

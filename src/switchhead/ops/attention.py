"""Softmax attention with masks, on `scaled_dot_product_attention`."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from switchhead.ops.dtypes import cast_together
from switchhead.ops.widths import aligned_width, pad_width


class SharedMask(NamedTuple):
    """A mask as kernels take it, made by `share_mask` once for all layers of a model.

    Attributes:
        added: to the scores: 0, or minus infinity where a query may not attend. Rows of blind queries are 0, for some
            kernels would give NaN.
        blind: queries that see nothing, whose result is zero; None where there are none.
    """

    added: Float[Tensor, "batch_or_1 heads_or_1 T S"]
    blind: Bool[Tensor, "batch_or_1 heads_or_1 T 1"] | None


class Masks(TypedDict):
    """What may not be seen: the arguments that `attend` and `relative_attention` have in common."""

    causal: bool
    key_padding_mask: Tensor | None
    attn_mask: Tensor | None


def share_mask(attn_mask: Tensor, dtype: torch.dtype, *, may_be_blind: bool = True) -> SharedMask:
    """The `attn_mask` of several calls of `attend`, which has nothing left to do for it.

    Args:
        attn_mask: `[B or 1, H or 1, T, S]`, as in `attend`.
        dtype: of the queries.
        may_be_blind: whether there can be queries that see nothing; False saves looking for them.

    Raises:
        ValueError: a mask that is neither boolean nor floating point.
    """
    if attn_mask.dtype == torch.bool:
        blind = attn_mask.all(-1, keepdim=True) if may_be_blind else None
        ignored = attn_mask if blind is None else attn_mask & ~blind
        added = torch.zeros(ignored.shape, dtype=dtype, device=ignored.device)
        return SharedMask(added.masked_fill_(ignored, -torch.inf), blind)
    if not attn_mask.is_floating_point():
        raise ValueError(
            "attn_mask must be boolean (True = ignore) or floating point (added to the scores); "
            f"got {attn_mask.dtype} {tuple(attn_mask.shape)}"
        )
    added = attn_mask.to(dtype)
    if not may_be_blind:
        return SharedMask(added, None)
    blind = (added == -torch.inf).all(-1, keepdim=True)  # asked here: the least float32 is minus infinity in 16 bits
    return SharedMask(added.masked_fill(blind, 0.0), blind)


def attend(
    q: Float[Tensor, "batch heads T d"],
    k: Float[Tensor, "batch kv_heads S d"],
    v: Float[Tensor, "batch kv_heads S d_v"],
    *,
    scale: float,
    causal: bool,
    key_padding_mask: Bool[Tensor, "batch S"] | None = None,
    attn_mask: Tensor | SharedMask | None = None,
    bias: Float[Tensor, "batch heads T S"] | None = None,
) -> Float[Tensor, "batch heads T d_v"]:
    """`softmax(scale q k^T + bias) v` over the keys that causality and masks leave; zeros where none is left.

    Plain causal attention carries no mask, so that the fastest kernel stays available.

    Args:
        q, k, v: queries, keys and values, in any mix of floating dtypes; each key and value head serves
            `heads / kv_heads` query heads.
        scale: multiplies the content scores.
        causal: queries, aligned to the last keys, see no later ones.
        key_padding_mask: True = ignore the key.
        attn_mask: `[T, S]`, `[B*H, T, S]` or `[B, 1 or H, T, S]`; boolean True = ignore, float = added to the scores.
            A `SharedMask` is all that masks: `causal`, `key_padding_mask` and `bias` do not go with it.
        bias: added to the scores.

    Raises:
        ValueError: a mask of another shape or dtype.
    """
    n_queries, n_keys, width = q.shape[-2], k.shape[-2], v.shape[-1]
    q, k, v = (pad_width(t, aligned_width(t.shape[-1], t.device)) for t in cast_together(q, k, v))
    gqa = q.shape[1] != k.shape[1]
    masked = not (key_padding_mask is None and attn_mask is None and bias is None)
    if not masked and (not causal or n_queries == 1 or n_queries == n_keys):
        is_causal = False if n_queries == 1 else causal  # a bool, also where lengths are traced as symbols
        y = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=gqa)
        return y[..., :width]
    if isinstance(attn_mask, SharedMask):
        if causal or key_padding_mask is not None or bias is not None:
            raise ValueError("a SharedMask does not go with causal, key_padding_mask or bias: put them into it")
        mask = _as_four_dimensions(attn_mask.added.to(q.dtype), q.shape[0], q.shape[1], n_queries, n_keys)
        blind = attn_mask.blind
    else:
        blocked, added = _combine_masks(q, k, causal, key_padding_mask, attn_mask, bias)
        # A row that sees nothing would be NaN on some kernels: let it see everything, and return zeros.
        blind = blocked.all(-1, keepdim=True)  # [., ., T, 1]
        mask = blocked == blind if added is None else added.masked_fill(blocked & ~blind, -torch.inf)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=gqa)[..., :width]
    return y if blind is None else y.masked_fill(blind, 0.0)


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
            added = attn_mask.to(q.dtype) if added is None else added + attn_mask.to(q.dtype)
            unreachable = added == -torch.inf  # asked here: the least float32 is minus infinity in 16 bits
            blocked = blocked | unreachable
            added = added.masked_fill(unreachable, 0.0)
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

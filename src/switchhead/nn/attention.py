"""What all attention layers share: checks, and all that follows the projections."""

from __future__ import annotations

import math
from numbers import Integral
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from switchhead.nn.linear import Linear
from switchhead.nn.norm import QKNorm
from switchhead.nn.positions import Positions, Rotary
from switchhead.nn.projections import project_positions
from switchhead.ops.attention import Masks, SharedMask, attend
from switchhead.ops.packed import packed_attention
from switchhead.ops.relative import relative_attention
from switchhead.ops.widths import aligned_width, pad_width

AuxLosses = dict[str, Float[Tensor, ""]]  # auxiliary losses by name, without weights


class Cache(Protocol):
    """Keys and values of earlier calls, `[B, H, T, d_head]`: keys already rotated, widths unpadded."""

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add new keys and values; return all of them."""
        ...


def check_sizes(**sizes: int) -> None:
    """Refuse sizes that are not integers of at least 1, by name."""
    for name, value in sizes.items():
        if not isinstance(value, Integral) or value < 1:
            raise ValueError(f"{name}={value} must be an integer of at least 1")


def check_input(x: Tensor, d_model: int, context: Tensor | None, memory: Tensor | None) -> None:
    """Refuse what the layer cannot mean."""
    if x.ndim != 3 or x.shape[-1] != d_model:
        raise ValueError(f"x must be [batch, length, d_model={d_model}]; got {tuple(x.shape)}")
    if context is not None and memory is not None:
        raise ValueError("context and memory exclude each other: cross-attention has no previous chunk")
    for name, other in (("context", context), ("memory", memory)):
        if other is not None and (other.ndim != 3 or other.shape[0] != x.shape[0] or other.shape[-1] != d_model):
            raise ValueError(f"{name} must be [{x.shape[0]}, length, {d_model}] beside x; got {tuple(other.shape)}")
    for name, tensor in (("x", x), ("context", context), ("memory", memory)):
        if tensor is not None and not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating point; got {tensor.dtype} (embed token ids first)")


class RelativeWeights(NamedTuple):
    """What a layer learns of Transformer-XL's relative positions.

    The projection is of each head, or one for all (MoA). Dense attention has the biases, it and MoA the temperature.
    """

    projection: Linear
    content_bias: Float[Tensor, "heads d"] | None = None
    position_bias: Float[Tensor, "heads d"] | None = None
    scale: Float[Tensor, " 1"] | None = None


def average_values(
    q: Float[Tensor, "batch heads T d"],
    k: Float[Tensor, "batch kv_heads S d"],
    v: Float[Tensor, "batch kv_heads S d"],
    *,
    d_head: int,
    causal: bool,
    positions: Positions,
    relative: RelativeWeights | None,
    qk_norm: QKNorm | None,
    crossed: bool,
    key_padding_mask: Bool[Tensor, "batch S"] | None,
    attn_mask: Tensor | SharedMask | None,
    position_ids: Int[Tensor, "*batch T"] | None,
    cache: Cache | None,
    cu_seqlens: Int[Tensor, " documents+1"] | None,
) -> Float[Tensor, "batch heads T d"]:
    """Norm, positions, cache, masks and the attention-weighted sum: all that follows the projections in every layer.

    Widths may be padded beyond d_head, those of cached keys and values are not. `crossed`: k and v come from a context.
    The rest as in `SwitchHeadAttention.forward`.
    """
    if cu_seqlens is not None:
        _refuse_packing_with(
            context=crossed, memory=not crossed and k.shape[-2] != q.shape[-2], cache=cache is not None,
            key_padding_mask=key_padding_mask is not None, attn_mask=attn_mask is not None,
            **{"causal=False": not causal, "relative positions": relative is not None},
        )  # fmt: skip
    if qk_norm is not None:
        q, k = qk_norm(q, k)
    if isinstance(positions, Rotary):
        cached = cache is not None
        q, k = _rotate(q, k, positions, d_head=d_head, position_ids=position_ids, cached=cached, crossed=crossed)
    if cache is not None:
        k, v = _updated(cache, k[..., :d_head], v[..., :d_head])
        width = aligned_width(d_head, q.device)
        q, k, v = q[..., :width], pad_width(k, width), pad_width(v, width)
        causal = causal and attn_mask is None
    scale = 1 / math.sqrt(d_head)
    if cu_seqlens is not None:
        return packed_attention(q, k, v, cu_seqlens=cu_seqlens, scale=scale)
    if relative is None:
        return attend(q, k, v, scale=scale, causal=causal, key_padding_mask=key_padding_mask, attn_mask=attn_mask)
    if isinstance(attn_mask, SharedMask):
        raise ValueError("relative positions take an attn_mask as a tensor, not as a SharedMask")
    masks = Masks(causal=causal, key_padding_mask=key_padding_mask, attn_mask=attn_mask)
    r = project_positions(relative.projection, q, k, d_head, causal=causal)  # [H, R, d]
    content, position = (
        None if bias is None else pad_width(bias, q.shape[-1])
        for bias in (relative.content_bias, relative.position_bias)
    )
    learned = scale if relative.scale is None else relative.scale
    return relative_attention(q, k, v, r, content_bias=content, position_bias=position, scale=learned, **masks)


def _updated(cache: Cache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What the cache returns for new keys and values; of another shape it would be attended to all the same."""
    keys, values = cache.update(k, v)
    (batch, heads, _, d_head), shape = k.shape, keys.shape
    if len(shape) != 4 or (*shape[:2], shape[3]) != (batch, heads, d_head) or shape != values.shape:
        raise ValueError(
            f"cache.update must return keys and values [{batch}, {heads}, S, {d_head}], S keys of all calls so far; "
            f"got {tuple(shape)} and {tuple(values.shape)}"
        )
    return keys, values


def merge_heads(y: Float[Tensor, "batch heads T d"]) -> Float[Tensor, "tokens heads d"]:
    """`[B, H, T, d]` to `[B*T, H, d]`."""
    return y.transpose(1, 2).flatten(0, 1)


def query_positions(
    x: Float[Tensor, "batch T d"], position_ids: Int[Tensor, "*batch T"] | None, *, cached: bool, first: int = 0
) -> Int[Tensor, "*batch T"]:
    """Where the queries made of x stand: from `first` on, unless the caller says."""
    batch, length = x.shape[:2]
    if position_ids is None:
        if cached:
            raise ValueError("rotary positions with a cache need position_ids: where the new tokens stand is not known")
        return torch.arange(first, first + length, device=x.device)
    if position_ids.shape not in ((length,), (1, length), (batch, length)):
        raise ValueError(
            f"position_ids must be [{length}] or [{batch} or 1, {length}]; got {tuple(position_ids.shape)}"
        )
    return position_ids


def _refuse_packing_with(**present: bool) -> None:
    names = [name for name, is_present in present.items() if is_present]
    if names:
        raise ValueError(f"cu_seqlens packs causal self-attention alone; it does not go with {', '.join(names)}")


def _rotate(
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
    first = 0 if crossed else n_keys - n_queries
    position_ids = query_positions(q[:, 0], position_ids, cached=cached, first=first)
    q_table = rotary.table(position_ids, d_head, q.dtype)
    if crossed:
        k_table = rotary.table(torch.arange(n_keys, device=k.device), d_head, k.dtype)
    elif n_keys > n_queries:  # the memory's positions run up to the first query's
        end = position_ids[..., :1] if n_queries else position_ids.new_full((*position_ids.shape[:-1], 1), n_keys)
        before = torch.arange(n_queries - n_keys, 0, device=k.device) + end
        k_table = rotary.table(torch.cat([before, position_ids], dim=-1), d_head, k.dtype)
    else:
        k_table = q_table
    return rotary.rotate(q, q_table), rotary.rotate(k, k_table)

"""From Hugging Face's attention masks (1 or True = attend) to what the layers take (True = ignore)."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache

from switchhead.ops.attention import SharedMask, share_mask


def layer_masks(
    attention_mask: Tensor | None,
    *,
    batch_size: int,
    n_queries: int,
    memory_length: int,
    cache: Cache | None,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Tensor | SharedMask | None]:
    """`key_padding_mask` and `attn_mask` for the attention layers.

    Plain causal attention gets neither, so that its fast path stays open: a mask without padding is dropped.

    Args:
        attention_mask: `[B, n]`, one entry a token of the input (or of memory and input, or of all that the cache has
            seen and the input), or an expanded `[B, 1 or H, T, S]`: boolean True = attend, float = added to the scores.
        batch_size: B.
        n_queries: T.
        memory_length: M, tokens in front of the input.
        cache: keys and values of earlier calls, not yet holding the input.
        device: where the masks are needed.
        dtype: of the queries; what a cache of fixed size needs is made once for all layers.

    Raises:
        ValueError: a mask of another shape or dtype.
    """
    fixed = cache if cache is not None and cache.is_compileable else None
    if attention_mask is not None and attention_mask.ndim == 4:
        if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
            raise ValueError(
                "an attention_mask of four dimensions must be boolean (True = attend) or floating point (added to the "
                f"scores); got {attention_mask.dtype}"
            )
        expanded = ~attention_mask if attention_mask.dtype == torch.bool else attention_mask
        return {"key_padding_mask": None, "attn_mask": expanded if fixed is None else share_mask(expanded, dtype)}
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(f"attention_mask must have 2 or 4 dimensions; got {tuple(attention_mask.shape)}")
    if attention_mask is not None and attention_mask.shape[0] != batch_size:
        raise ValueError(f"attention_mask has {attention_mask.shape[0]} rows for a batch of {batch_size}")
    if fixed is not None:
        ignored = fixed_cache_mask(attention_mask, n_queries, fixed, device)
        # Without padding a query sees itself at least.
        shared = share_mask(ignored, dtype, may_be_blind=attention_mask is not None)
        return {"key_padding_mask": None, "attn_mask": shared}
    if attention_mask is None:
        return {"key_padding_mask": None, "attn_mask": None}
    n_tokens, n_keys = memory_length + n_queries, memory_length + n_queries
    if cache is not None:
        # The cache may have dropped the oldest keys it has seen.
        n_tokens, n_keys = cache.get_seq_length() + n_queries, cache.get_mask_sizes(n_queries, 0)[0]
    of_input = cache is None and attention_mask.shape[1] == n_queries
    if attention_mask.shape[1] != n_tokens and not of_input:
        raise ValueError(
            f"attention_mask has {attention_mask.shape[1]} entries for {n_tokens} tokens "
            f"({n_tokens - n_queries} before the input, {n_queries} in it)"
        )
    if not torch.compiler.is_compiling() and bool(attention_mask.all()):
        return {"key_padding_mask": None, "attn_mask": None}
    ignored = attention_mask == 0
    if of_input:
        ignored = F.pad(ignored, (memory_length, 0))
    return {"key_padding_mask": ignored[:, n_tokens - n_keys :], "attn_mask": None}


def fixed_cache_mask(
    attention_mask: Tensor | None, n_queries: int, cache: Cache, device: torch.device
) -> Bool[Tensor, "batch_or_1 1 queries keys"]:
    """What the input may not see in a cache of fixed size: slots not yet written, and padding. True = ignore."""
    n_keys = cache.get_mask_sizes(n_queries, 0)[0]
    positions = cache.get_seq_length() + torch.arange(n_queries, device=device)  # the length may be a tensor
    ignored = torch.arange(n_keys, device=device) > positions[:, None]  # [T, S]
    if attention_mask is None:
        return ignored[None, None]
    if attention_mask.shape[1] > n_keys:
        raise ValueError(f"attention_mask has {attention_mask.shape[1]} entries, but the cache only {n_keys} slots")
    padding = F.pad(attention_mask == 0, (0, n_keys - attention_mask.shape[1]))  # [B, S]
    return ignored[None, None] | padding[:, None, None]

"""What all attention layers share: the source of keys and values, rotation, and the order of heads."""

from __future__ import annotations

from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from switchhead.nn.positions import Rotary
from switchhead.ops.dtypes import concatenate


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
    if context is not None and memory is not None:
        raise ValueError("context and memory exclude each other: cross-attention has no previous chunk")
    for name, other in (("context", context), ("memory", memory)):
        if other is not None and (other.ndim != 3 or other.shape[0] != x.shape[0] or other.shape[-1] != d_model):
            raise ValueError(f"{name} must be [{x.shape[0]}, length, {d_model}] beside x; got {tuple(other.shape)}")
    for name, tensor in (("x", x), ("context", context), ("memory", memory)):
        if tensor is not None and not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating point; got {tensor.dtype} (embed token ids first)")


def check_packing(*, causal: bool, relative: bool, **others: object) -> None:
    """Refuse what packed documents do not go with."""
    given = [name for name, value in others.items() if value is not None]
    given += ["causal=False"] if not causal else []
    given += ["relative positions"] if relative else []
    if given:
        raise ValueError(f"cu_seqlens packs causal self-attention alone; it does not go with {', '.join(given)}")


def key_value_source(
    x: Float[Tensor, "batch T d_model"], context: Tensor | None, memory: Tensor | None
) -> Float[Tensor, "batch S d_model"]:
    """What keys and values are made of: the context, or the input behind its memory."""
    if context is not None:
        return context
    return x if memory is None else concatenate([memory.to(x.dtype), x], dim=1)


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
    batch, n_queries, n_keys = q.shape[0], q.shape[-2], k.shape[-2]
    if position_ids is None:
        if cached:
            raise ValueError("rotary positions with a cache need position_ids: where the new tokens stand is not known")
        first = 0 if crossed else n_keys - n_queries
        position_ids = torch.arange(first, first + n_queries, device=q.device)
    elif position_ids.shape not in ((n_queries,), (1, n_queries), (batch, n_queries)):
        raise ValueError(
            f"position_ids must be [{n_queries}] or [{batch} or 1, {n_queries}]; got {tuple(position_ids.shape)}"
        )
    q_table = rotary.table(position_ids, d_head, q.dtype)
    if crossed:
        k_table = rotary.table(torch.arange(n_keys, device=k.device), d_head, k.dtype)
    elif n_keys > n_queries:  # the memory's positions run up to the first query's
        before = torch.arange(n_queries - n_keys, 0, device=k.device) + position_ids[..., :1]
        k_table = rotary.table(torch.cat([before, position_ids], dim=-1), d_head, k.dtype)
    else:
        k_table = q_table
    return rotary.rotate(q, q_table), rotary.rotate(k, k_table)

"""Attention with Transformer-XL's relative positions (arXiv 1901.02860, section 3.3)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


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

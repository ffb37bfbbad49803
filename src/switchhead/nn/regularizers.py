"""Auxiliary losses of routers: each one number, over the tokens of a batch, padding excluded.

Multiply with a weight and add to the training loss. `is_token` `[N]` is False where a row is padding.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor


def cv_loss(
    gates: Float[Tensor, "tokens experts"], is_token: Bool[Tensor, " tokens"] | None = None
) -> Float[Tensor, ""]:
    """Squared coefficient of variation of the gates summed over tokens: `var(load) / mean(load)^2` (arXiv 1701.06538).

    The variance is the unbiased one, as in the MoA authors' code (arXiv 2210.05144); 0 for a single expert.

    Args:
        gates: of all experts, 0 where an expert was not chosen.
        is_token: see above.
    """
    n_experts = gates.shape[-1]
    if n_experts == 1:
        return gates.new_zeros(())
    return _share(_sum_over_tokens(gates, is_token)).var() * n_experts**2


def switch_loss(
    scores: Float[Tensor, "tokens experts"],
    gates: Float[Tensor, "tokens experts"],
    is_token: Bool[Tensor, " tokens"] | None = None,
) -> Float[Tensor, ""]:
    """`E * sum_e P_e F_e`, probability times frequency of each expert, both shares of 1 (arXiv 2101.03961).

    Smallest, 1, where both are uniform. Only the probabilities carry a gradient.

    Args:
        scores: of all experts; the probabilities are their softmax.
        gates: of all experts; an expert was chosen where its gate is not 0.
        is_token: see above.
    """
    probability = _share(_sum_over_tokens(scores.softmax(-1), is_token))
    frequency = _share(_sum_over_tokens((gates != 0).to(scores.dtype), is_token))
    return scores.shape[-1] * (probability * frequency).sum()


def router_z_loss(
    scores: Float[Tensor, "tokens experts"], is_token: Bool[Tensor, " tokens"] | None = None
) -> Float[Tensor, ""]:
    """Mean squared log-sum-exp of the scores (arXiv 2202.08906): keeps them small."""
    squares = scores.logsumexp(-1, keepdim=True).square()
    return (_sum_over_tokens(squares, is_token) / _count(scores, is_token)).squeeze()


def entropy_loss(
    scores: Float[Tensor, "tokens experts"],
    is_token: Bool[Tensor, " tokens"] | None = None,
    *,
    synchronize: bool = False,
) -> Float[Tensor, ""]:
    """`sum_e p_e log p_e`, minus the entropy of the mean softmax of the scores (arXiv 2310.10837, equation 20).

    Between `-log E`, where experts are used evenly, and 0.

    Args:
        scores: of all experts.
        is_token: see above.
        synchronize: take the mean over the tokens of all ranks, where `torch.distributed` runs. Then the gradients that
            data parallelism averages are those of the one loss of the whole batch.
    """
    total, count = _sum_over_tokens(scores.softmax(-1), is_token), _count(scores, is_token)
    if synchronize and dist.is_available() and dist.is_initialized():
        total, count = _sum_over_ranks(total), _sum_over_ranks(count)
    mean = total / count
    return (mean * mean.clamp(min=torch.finfo(mean.dtype).tiny).log()).sum()


@torch.library.custom_op("switchhead::sum_over_ranks", mutates_args=())
def _sum_over_ranks(x: Tensor) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


@_sum_over_ranks.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _sum_cotangents(ctx: object, grad: Tensor) -> Tensor:
    """The sum depends alike on what each rank put in."""
    return _sum_over_ranks(grad)


_sum_over_ranks.register_autograd(_sum_cotangents)


def _sum_over_tokens(x: Tensor, is_token: Tensor | None) -> Float[Tensor, " experts"]:
    return x.sum(0) if is_token is None else x.masked_fill(~is_token[:, None], 0.0).sum(0)


def _count(x: Tensor, is_token: Tensor | None) -> Float[Tensor, ""]:
    """Number of tokens, 1 for none, so that an empty batch has no loss."""
    count = x.new_full((), x.shape[0]) if is_token is None else is_token.sum().to(x.dtype)
    return count.clamp(min=1)


def _share(x: Tensor) -> Tensor:
    """x over its sum; zeros where that is zero."""
    return x / x.sum().clamp(min=torch.finfo(x.dtype).tiny)

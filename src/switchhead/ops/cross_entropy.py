"""Cross-entropy of an output layer, a chunk of positions at a time, so that the scores never exist as a whole.

With scores `z = h W^T + b` of a position, its target t and the cotangent g of its loss:

    loss = logsumexp(z) - z[t],      dz = g (softmax(z) - onehot(t)),    dh = dz W,    dW = sum dz^T h,    db = sum dz

Backward computes z anew from what forward was given, and from the saved logsumexp.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from switchhead.ops.dtypes import at_least_float32, cast_together, without_autocast


def chunked_cross_entropy(
    hidden: Float[Tensor, "positions d_model"],
    weight: Float[Tensor, "vocab d_model"],
    bias: Float[Tensor, " vocab"] | None,
    targets: Int[Tensor, " positions"],
    *,
    chunk_length: int,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias), targets)` with at most `[chunk_length, vocab]` scores in memory.

    Args:
        hidden: input of the output layer.
        weight: the output layer's matrix.
        bias: its bias.
        targets: classes; positions with `ignore_index` have loss 0 and do not count.
        chunk_length: positions at a time.
        ignore_index: see targets.
        reduction: as in `torch.nn.functional.cross_entropy`.

    Returns:
        Nats, in float32 or better: a scalar, or `[positions]` with `reduction="none"`.

    Raises:
        ValueError: shapes, chunk length or reduction that do not fit.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            "chunked_cross_entropy needs hidden [positions, d_model], weight [vocab, d_model] and targets [positions]; "
            f"got {tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(targets.shape)}"
        )
    if chunk_length < 1:
        raise ValueError(f"chunk_length={chunk_length} must be at least 1")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} is unknown; use 'mean', 'sum' or 'none'")
    if bias is None:
        hidden, weight = cast_together(hidden, weight)
    else:
        hidden, weight, bias = cast_together(hidden, weight, bias)
    losses, _ = _forward(hidden, weight, bias, targets, chunk_length, ignore_index)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


@torch.library.custom_op("switchhead::chunked_cross_entropy", mutates_args=())
def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk_length: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Losses and logsumexp of every position."""
    losses, normalizers = (hidden.new_empty(len(hidden), dtype=at_least_float32(hidden.dtype)) for _ in range(2))
    for rows in _chunks(len(hidden), chunk_length):
        scores = _scores(hidden[rows], weight, bias)
        normalizers[rows] = scores.logsumexp(-1)
        ignored = targets[rows] == ignore_index
        chosen = scores.gather(-1, targets[rows].masked_fill(ignored, 0)[:, None])[:, 0]
        losses[rows] = (normalizers[rows] - chosen).masked_fill(ignored, 0.0)
    return losses, normalizers


@_forward.register_fake
def _(hidden, weight, bias, targets, chunk_length, ignore_index):
    dtype = at_least_float32(hidden.dtype)
    return hidden.new_empty(hidden.shape[0], dtype=dtype), hidden.new_empty(hidden.shape[0], dtype=dtype)


@torch.library.custom_op("switchhead::chunked_cross_entropy_backward", mutates_args=())
def _backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    normalizers: Tensor,
    chunk_length: int,
    ignore_index: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias (empty without a bias); sums over chunks in float32 or better."""
    wide = normalizers.dtype
    grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device)
    grad_bias = torch.zeros(0 if bias is None else len(bias), dtype=wide, device=weight.device)
    for rows in _chunks(len(hidden), chunk_length):
        ignored = targets[rows] == ignore_index
        slopes = (_scores(hidden[rows], weight, bias) - normalizers[rows, None]).exp_()  # probabilities
        one = slopes.new_ones(()).expand(len(slopes), 1)
        slopes.scatter_add_(-1, targets[rows].masked_fill(ignored, 0)[:, None], -one)
        slopes *= grad[rows].masked_fill(ignored, 0.0)[:, None]
        if bias is not None:
            grad_bias += slopes.sum(0)
        slopes = slopes.to(hidden.dtype)
        grad_hidden[rows] = slopes @ weight
        grad_weight += slopes.mT @ hidden[rows]
    return grad_hidden, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)


@_backward.register_fake
def _(grad, hidden, weight, bias, targets, normalizers, chunk_length, ignore_index):
    grad_bias = weight.new_empty(0 if bias is None else bias.shape[0])
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape), grad_bias


def _setup_context(ctx, inputs, output):
    hidden, weight, bias, targets, ctx.chunk_length, ctx.ignore_index = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(hidden, weight, *([bias] if ctx.has_bias else []), targets, output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad, _grad_normalizers):
    if grad is None:
        return (None,) * 6
    hidden, weight, *bias, targets, normalizers = ctx.saved_tensors
    grad_hidden, grad_weight, grad_bias = _backward(
        grad, hidden, weight, bias[0] if ctx.has_bias else None, targets, normalizers,
        ctx.chunk_length, ctx.ignore_index,
    )  # fmt: skip
    return grad_hidden, grad_weight, grad_bias if ctx.has_bias else None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def _chunks(n_positions: int, chunk_length: int) -> list[slice]:
    return [slice(first, min(first + chunk_length, n_positions)) for first in range(0, n_positions, chunk_length)]


def _scores(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Float[Tensor, "chunk vocab"]:
    with without_autocast(hidden.device):  # the operands have their dtype already
        return F.linear(hidden, weight, bias).to(at_least_float32(hidden.dtype))

"""Routing: scores, the k best experts of every head, and their gates."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from switchhead.ops.availability import is_gpu, require_triton, triton_obstacle
from switchhead.ops.dtypes import at_least_float32, without_autocast
from switchhead.routing import Routing

Gating = Literal["sigmoid", "softmax", "softmax_chosen"]


def route(
    x: Float[Tensor, "tokens d_model"],
    weight: Float[Tensor, "heads experts d_model"],
    k: int,
    *,
    gating: Gating = "sigmoid",
    dropped: Bool[Tensor, "tokens heads experts"] | None = None,
    backend: Literal["auto", "reference", "triton"] = "auto",
) -> Routing:
    """Choose k experts for each token and head (SwitchHead, arXiv 2312.07987, equations 7 and 8).

    `scores = x W^T`; the k largest are chosen, ties by the lowest index; their gates are `sigmoid(score)`, the chosen
    ones of `softmax(scores)` over all experts (competitive gating), or the softmax over the chosen scores.

    Args:
        x: tokens. Scores are computed in float32 or better, whatever the dtype of x and inside autocast too.
        weight: one row per head and expert.
        k: experts chosen per head, `1 <= k <= E`.
        gating: `"sigmoid"` (non-competitive, the paper's), `"softmax"` or `"softmax_chosen"`.
        dropped: experts that may not be used (expert dropout); where fewer than k remain, the rest get gate 0.
        backend: `"reference"`, or `"triton"`: one pass that writes no scores; `"auto"` where it can run on a GPU.

    Raises:
        ValueError: k or an option that cannot be, or a backend that cannot run here.
    """
    if weight.ndim != 3:
        raise ValueError(f"weight must be [heads, experts, d_model]; got {tuple(weight.shape)}")
    heads, experts, d_model = weight.shape
    if not 1 <= k <= experts:
        raise ValueError(f"k={k} experts cannot be chosen out of {experts}; use 1 <= k <= {experts}")
    if x.ndim != 2 or x.shape[1] != d_model:
        raise ValueError(f"x must be [tokens, {d_model}] for this router; got {tuple(x.shape)}")
    if not (x.is_floating_point() and weight.is_floating_point()):
        raise ValueError(f"x and weight must be floating point; got {x.dtype} and {weight.dtype}")
    if dropped is not None and (dropped.dtype != torch.bool or dropped.shape != (x.shape[0], heads, experts)):
        raise ValueError(
            f"dropped must be boolean [{x.shape[0]}, {heads}, {experts}]; got {dropped.dtype} {tuple(dropped.shape)}"
        )
    if gating not in ("sigmoid", "softmax", "softmax_chosen"):
        raise ValueError(f"gating={gating!r} is unknown; use 'sigmoid', 'softmax' or 'softmax_chosen'")
    if backend not in ("auto", "reference", "triton"):
        raise ValueError(f"backend={backend!r} is unknown; use 'auto', 'reference' or 'triton'")
    dtype = torch.promote_types(x.dtype, weight.dtype)
    if backend == "triton":
        require_triton(x.device, dtype)
    elif backend == "auto" and is_gpu(x.device) and triton_obstacle(x.device, dtype) is None:
        backend = "triton"
    activation = "sigmoid" if gating == "sigmoid" else "softmax"
    if backend == "triton":
        from switchhead.ops.triton.router import route as run

        routing = Routing(*run(x, weight, k, gating=activation, dropped=dropped), experts)
    else:
        routing = _reference(x, weight, k, activation, dropped)
    if gating != "softmax_chosen":
        return routing
    total = routing.gates.sum(-1, keepdim=True)  # at least k / E, or 0 where all experts were dropped
    return replace(routing, gates=routing.gates / total.clamp(min=torch.finfo(total.dtype).tiny))


def _reference(x: Tensor, weight: Tensor, k: int, gating: str, dropped: Tensor | None) -> Routing:
    heads, experts, _ = weight.shape
    dtype = at_least_float32(torch.promote_types(x.dtype, weight.dtype))
    with without_autocast(x.device):
        scores = (x.to(dtype) @ weight.to(dtype).flatten(0, 1).mT).unflatten(-1, (heads, experts))  # [N, H, E]
    if dropped is not None:
        scores = scores.masked_fill(dropped, -torch.inf)
    # A stable sort, since torch.topk does not promise the order of ties.
    best, order = scores.sort(dim=-1, descending=True, stable=True)
    expert_indices = order[..., :k]
    if gating == "sigmoid":
        gates = best[..., :k].sigmoid()
    else:
        gates = scores.softmax(-1).gather(-1, expert_indices)
        if dropped is not None:
            gates = gates.masked_fill(dropped.all(-1, keepdim=True), 0.0)
    return Routing(gates, expert_indices, experts)

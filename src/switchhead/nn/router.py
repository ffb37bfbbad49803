"""The router of one side: which experts each token uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from switchhead.nn.init import normal_, normalize_
from switchhead.ops.dtypes import at_least_float32, concatenate, without_autocast
from switchhead.ops.router import Gating, route
from switchhead.ops.widths import pad_width
from switchhead.routing import Routing


class Router(nn.Module):
    """Independent choice of k of E experts for every head: `gates = sigmoid(x W^T)` of the k best scores.

    Args:
        d_model: width of the tokens.
        n_heads: heads that choose independently.
        n_experts: experts a head can choose from.
        k: experts chosen.
        gating: `"sigmoid"`, `"softmax"` over all experts (the competitive ablation), or `"softmax_chosen"`: over the
            chosen ones.
        expert_dropout: probability that an expert may not be chosen by a token, in training.
        threshold: dynamic k: of the k chosen, only experts whose gate exceeds it are used, the others get gate 0.
            0 uses all k.
        normalize_rows: bring the initial rows to one norm, keeping their deviation (sigma-MoE).
        init_scale: multiplies the initial standard deviation `1 / sqrt(d_model)`.
    """

    def __init__(
        self,
        *,
        d_model: int,
        n_heads: int,
        n_experts: int,
        k: int,
        gating: Gating = "sigmoid",
        expert_dropout: float = 0.0,
        threshold: float = 0.0,
        normalize_rows: bool = False,
        init_scale: float = 1.0,
    ) -> None:
        super().__init__()
        gatings = ("sigmoid", "softmax", "softmax_chosen")
        check_choice(n_experts, k, gating, expert_dropout, threshold, gatings=gatings)
        self.gating: Gating = gating
        self.k, self.expert_dropout, self.threshold = k, expert_dropout, threshold
        self.normalize_rows, self.init_scale = normalize_rows, init_scale
        self.weight = nn.Parameter(torch.empty(n_heads, n_experts, d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        normal_(self.weight, self.weight.shape[-1], self.init_scale)
        if self.normalize_rows:
            normalize_(self.weight, dim=-1)

    def forward(self, x: Float[Tensor, "tokens wide"], known: Routing | None = None) -> Routing:
        """Route `[N, d_model]` tokens; zeros may be padded behind their width.

        `known` is their routing where several routers ran at once; it passes through here for the hooks to see.
        """
        return self.choose(x) if known is None else known

    def choose(self, x: Float[Tensor, "tokens wide"]) -> Routing:
        """`forward` unseen by hooks."""
        weight, dropped = stack_routers(x, [self])
        routing = route(x, weight, self.k, gating=self.gating, dropped=dropped)
        if self.threshold == 0:
            return routing
        return replace(routing, gates=routing.gates.masked_fill(routing.gates <= self.threshold, 0.0))

    def scores(self, x: Float[Tensor, "tokens wide"]) -> Float[Tensor, "tokens heads experts"]:
        """Scores of all experts, by which `forward` chooses; float32 or better, computed anew."""
        x = x[:, : self.weight.shape[-1]]  # layers may pad behind it
        dtype = at_least_float32(torch.promote_types(x.dtype, self.weight.dtype))
        with without_autocast(x.device):
            return torch.einsum("nd,hed->nhe", x.to(dtype), self.weight.to(dtype))

    def extra_repr(self) -> str:
        """Shape and options."""
        heads, experts, d_model = self.weight.shape
        return f"d_model={d_model}, n_heads={heads}, n_experts={experts}, k={self.k}, gating={self.gating!r}"


def check_choice(
    n_experts: int,
    k: int,
    gating: str,
    expert_dropout: float,
    threshold: float,
    *,
    gatings: Sequence[str] = ("sigmoid", "softmax"),
) -> None:
    """Refuse what a router cannot do."""
    if not 1 <= k <= n_experts:
        raise ValueError(f"k={k} experts cannot be chosen out of n_experts={n_experts}; use 1 <= k <= n_experts")
    if gating not in gatings:
        raise ValueError(f"gating={gating!r} is unknown; use {' or '.join(map(repr, gatings))}")
    if not 0.0 <= expert_dropout < 1.0:
        raise ValueError(f"expert_dropout={expert_dropout} must be at least 0 and below 1")
    if not 0.0 <= threshold < 1.0:
        raise ValueError(f"router threshold={threshold} must be at least 0 (off) and below 1, as gates are")


def stack_routers(x: Float[Tensor, "tokens wide"], routers: Sequence[Router]) -> tuple[Tensor, Tensor | None]:
    """Weights `[H of all, E, wide]` of routers that run together, and which experts are dropped."""
    first = routers[0]
    weight = concatenate([router.weight for router in routers]) if len(routers) > 1 else first.weight
    weight = pad_width(weight, x.shape[-1])
    dropped = None
    if first.training and first.expert_dropout > 0:
        dropped = torch.rand(x.shape[0], *weight.shape[:2], device=x.device) < first.expert_dropout
    return weight, dropped

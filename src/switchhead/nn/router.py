"""The router of one side: which experts each token uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from switchhead.nn.init import normal_
from switchhead.ops.dtypes import concatenate
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
        gating: `"sigmoid"`, or `"softmax"` over all experts (the competitive ablation).
        expert_dropout: probability that an expert may not be chosen by a token, in training.
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
        init_scale: float = 1.0,
    ) -> None:
        super().__init__()
        check_choice(n_experts=n_experts, k=k, gating=gating, expert_dropout=expert_dropout)
        self.gating: Gating = gating
        self.k, self.expert_dropout, self.init_scale = k, expert_dropout, init_scale
        self.weight = nn.Parameter(torch.empty(n_heads, n_experts, d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        normal_(self.weight, self.weight.shape[-1], self.init_scale)

    def forward(self, x: Float[Tensor, "tokens wide"], known: Routing | None = None) -> Routing:
        """Route `[N, d_model]` tokens; zeros may be padded behind their width.

        `known` is their routing where several routers ran at once; it passes through here for the hooks to see.
        """
        if known is not None:
            return known
        weight, dropped = stack_routers(x, [self])
        return route(x, weight, self.k, gating=self.gating, dropped=dropped)

    def extra_repr(self) -> str:
        """Shape and options."""
        heads, experts, d_model = self.weight.shape
        return f"d_model={d_model}, n_heads={heads}, n_experts={experts}, k={self.k}, gating={self.gating!r}"


def check_choice(*, n_experts: int, k: int, gating: str, expert_dropout: float) -> None:
    """Refuse what a router cannot do."""
    if not 1 <= k <= n_experts:
        raise ValueError(f"k={k} experts cannot be chosen out of n_experts={n_experts}; use 1 <= k <= n_experts")
    if gating not in ("sigmoid", "softmax"):
        raise ValueError(f"gating={gating!r} is unknown; use 'sigmoid' or 'softmax'")
    if not 0.0 <= expert_dropout < 1.0:
        raise ValueError(f"expert_dropout={expert_dropout} must be at least 0 and below 1")


def stack_routers(x: Float[Tensor, "tokens wide"], routers: Sequence[Router]) -> tuple[Tensor, Tensor | None]:
    """Weights `[H of all, E, wide]` of routers that run together, and which experts are dropped."""
    first = routers[0]
    weight = concatenate([router.weight for router in routers]) if len(routers) > 1 else first.weight
    weight = pad_width(weight, x.shape[-1])
    dropped = None
    if first.training and first.expert_dropout > 0:
        dropped = torch.rand(x.shape[0], *weight.shape[:2], device=x.device) < first.expert_dropout
    return weight, dropped


def unstack_routing(x: Tensor, routers: Sequence[Router], routing: Routing) -> list[Routing]:
    """Each router's part of a routing by all of them, past its hooks."""
    heads = routers[0].weight.shape[0]
    sides = zip(routers, routing.gates.split(heads, dim=1), routing.expert_indices.split(heads, dim=1), strict=True)
    return [router(x, Routing(gates, chosen, routing.n_experts)) for router, gates, chosen in sides]

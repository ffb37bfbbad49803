"""How a model uses its experts: which, how evenly, and with what gates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from switchhead.nn import Router
from switchhead.routing import Routing
from switchhead.train.distributed import World


@dataclass(frozen=True, kw_only=True)
class ExpertUsage:
    """Choices of one router over some tokens. A choice whose gate is 0 (dynamic k) counts as not made.

    Attributes:
        share: of each head's choices, by expert; `[heads][experts]`, rows sum to 1.
        entropy: of the shares over its highest possible value: 1 is even use, 0 one expert only; mean over heads.
        dead_experts: experts of all heads that nothing chose.
        mean_gate: of the choices made.
        average_k: choices by token and head.
    """

    share: list[list[float]]
    entropy: float
    dead_experts: int
    mean_gate: float
    average_k: float


def measure_usage(
    model: nn.Module, passes: Iterable[tuple[Callable[[], object], bool]], world: World
) -> dict[str, ExpertUsage]:
    """Expert usage of every router in some forward passes, over all ranks, by the router's name in the model.

    Args:
        model: the plain model.
        passes: run it; each rank of `world` as many. False: this one does not count.
        world: the ranks whose choices are added.
    """
    routers = {module: name for name, module in model.named_modules() if isinstance(module, Router)}
    counted: dict[str, Tensor] = {}
    counts = True

    def count(router: nn.Module, args: object, routing: Routing) -> None:
        name = routers[router]  # pyright: ignore[reportArgumentType]
        new = _count(routing) * counts
        counted[name] = counted[name] + new if name in counted else new

    handles = [router.register_forward_hook(count) for router in routers]
    try:
        for forward, counts in passes:  # noqa: B007 (the hook reads it)
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return {name: _usage(_sum(values, world)) for name, values in counted.items()}


def _sum(values: Tensor, world: World) -> Tensor:
    return torch.tensor(world.sum(values.flatten().tolist()), dtype=torch.float64).view(values.shape)


def _count(routing: Routing) -> Tensor:
    """For every head and expert the choices and the sum of their gates, and the tokens; `[3, heads, experts]`."""
    gates = routing.gates.double()
    chosen, experts = (gates != 0).double(), routing.expert_indices.long()
    zeros = gates.new_zeros(len(gates), routing.n_heads, routing.n_experts)
    choices = zeros.scatter(-1, experts, chosen).sum(0)
    total = zeros.scatter(-1, experts, gates).sum(0)
    return torch.stack((choices, total, torch.full_like(choices, len(gates))))


def _usage(counts: Tensor) -> ExpertUsage:
    choices, gates, tokens = counts  # [heads, experts] each
    made = choices.sum().item()
    share = choices / choices.sum(-1, keepdim=True).clamp(min=1)
    entropy = torch.special.entr(share).sum(-1) / math.log(max(share.shape[-1], 2))
    return ExpertUsage(
        share=share.tolist(),
        entropy=entropy.mean().item(),
        dead_experts=int((choices == 0).sum()),
        mean_gate=gates.sum().item() / max(made, 1),
        average_k=made / max(tokens[:, 0].sum().item(), 1),
    )

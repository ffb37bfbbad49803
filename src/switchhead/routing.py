"""What a router decided: which experts each token uses, and with which weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """The experts of every token and head, and their weights in the sum.

    Attributes:
        gates: `[tokens, heads, k]`, float32 or float64, in the order of `expert_indices`.
        expert_indices: `[tokens, heads, k]`, integers in `[0, n_experts)`, distinct along k, best score first.
        n_experts: experts a head can choose from.
    """

    gates: Float[Tensor, "tokens heads k"]
    expert_indices: Int[Tensor, "tokens heads k"]
    n_experts: int

    def __post_init__(self) -> None:
        if self.gates.ndim != 3 or self.gates.shape != self.expert_indices.shape:
            raise ValueError(
                "Routing needs gates and expert_indices of one shape [tokens, heads, k]; got gates "
                f"{tuple(self.gates.shape)} and expert_indices {tuple(self.expert_indices.shape)}"
            )
        if not self.gates.is_floating_point() or self.expert_indices.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                "Routing needs floating point gates and int32 or int64 expert_indices; got "
                f"{self.gates.dtype} and {self.expert_indices.dtype}"
            )

    @property
    def n_heads(self) -> int:
        """Heads that route independently."""
        return self.gates.shape[1]

    @property
    def k(self) -> int:
        """Experts used by each token and head."""
        return self.gates.shape[2]

    def average_k(self) -> Float[Tensor, ""]:
        """Mean number of experts that a token and head uses: those whose gate is not 0 (dynamic k leaves some out)."""
        return (self.gates != 0).sum(-1).to(self.gates.dtype).mean()

    def per_slot(self) -> Routing:
        """The same decisions with every slot as a head of its own, `[tokens, heads * k, 1]`.

        For inputs that differ from slot to slot, with one pool of experts shared by all heads.
        """
        return Routing(self.gates.flatten(1)[..., None], self.expert_indices.flatten(1)[..., None], self.n_experts)

    def groups(self, *, shared_pool: bool = False) -> Int[Tensor, "tokens heads k"]:
        """Every choice's expert among those of all heads, `head * n_experts + expert`; of a shared pool the expert."""
        if shared_pool:
            return self.expert_indices
        heads = torch.arange(self.n_heads, device=self.expert_indices.device, dtype=self.expert_indices.dtype)
        return self.expert_indices + heads[:, None] * self.n_experts

    def dense_gates(self) -> Float[Tensor, "tokens heads experts"]:
        """Gates scattered over all experts; zero where an expert was not chosen."""
        zeros = self.gates.new_zeros(*self.gates.shape[:2], self.n_experts)
        return zeros.scatter(-1, self.expert_indices.long(), self.gates)

"""Expert projections: `switchhead.ops.moe_linear` with its weight."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from switchhead.nn.init import normal_, normalize_
from switchhead.ops.moe_linear import Backend, Reduce, moe_linear
from switchhead.routing import Routing


class MoELinear(nn.Module):
    """Gate-weighted sum of k of E linear maps for every head, chosen by a `Routing`.

    Args:
        n_heads: heads with experts of their own; 1: one pool, which any number of heads may share.
        n_experts: experts of each head.
        d_in: input width.
        d_out: output width.
        reduce: what is summed, as in `switchhead.ops.moe_linear`.
        fan_in: initial standard deviation is `init_scale / sqrt(fan_in)`; default d_in.
        norm_experts: bring the initial weights to one norm across the experts, keeping their deviation.
        init_scale: see fan_in.
        backend: as in `switchhead.ops.moe_linear`.
    """

    def __init__(
        self,
        *,
        n_heads: int,
        n_experts: int,
        d_in: int,
        d_out: int,
        reduce: Reduce,
        fan_in: int | None = None,
        norm_experts: bool = False,
        init_scale: float = 1.0,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        self.reduce: Reduce = reduce
        self.backend: Backend = backend
        self.fan_in, self.norm_experts, self.init_scale = fan_in or d_in, norm_experts, init_scale
        self.weight = nn.Parameter(torch.empty(n_heads, n_experts, d_in, d_out))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        normal_(self.weight, self.fan_in, self.init_scale)
        if self.norm_experts:
            normalize_(self.weight, dim=1)

    def forward(self, x: Float[Tensor, "tokens *heads d_in"], routing: Routing) -> Tensor:
        """`[N, d_in]` or `[N, H, d_in]` to `[N, H, d_out]` (`reduce="k"`), `[N, d_out]` (`"heads"`), or every slot."""
        return moe_linear(x, self.weight, routing, reduce=self.reduce, backend=self.backend)

    def extra_repr(self) -> str:
        """Shape and options."""
        heads, experts, d_in, d_out = self.weight.shape
        return f"n_heads={heads}, n_experts={experts}, d_in={d_in}, d_out={d_out}, reduce={self.reduce!r}"

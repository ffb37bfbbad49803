"""sigma-MoE: a feed-forward layer of experts with non-competitive gates (arXiv 2310.10837)."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from switchhead.nn.attention import AuxLosses, check_sizes
from switchhead.nn.moe_linear import MoELinear
from switchhead.nn.regularizers import entropy_loss
from switchhead.nn.router import Router, check_choice
from switchhead.ops.moe_linear import Backend
from switchhead.ops.router import Gating


class SigmaMoE(nn.Module):
    """`y = sum_{e in topk(s)} g_e relu(x W_1[e]) W_2[e]`, with scores `s = x W_S^T` and gates `g = sigmoid(s)`.

    No biases and no dropout inside.

    Args:
        d_model: width of the input and output.
        n_experts: experts E.
        expert_size: inner width of an expert.
        k: experts used per token.
        gating: `"sigmoid"`, or `"softmax"` over all experts (the authors' `gate`).
        expert_dropout: probability that an expert may not be chosen by a token, in training.
        router_threshold: see `Router`'s threshold.
        synchronize: whether the auxiliary loss is that of the tokens of all ranks (see `entropy_loss`).
        init_scale: multiplies initial standard deviations; a model of L layers passes `sqrt(2 / L)`.
        backend: how experts run, see `switchhead.ops.moe_linear`.

    Raises:
        ValueError: an argument that cannot be; the message names it.
    """

    def __init__(
        self,
        *,
        d_model: int,
        n_experts: int,
        expert_size: int,
        k: int,
        gating: Gating = "sigmoid",
        expert_dropout: float = 0.0,
        router_threshold: float = 0.0,
        synchronize: bool = False,
        init_scale: float = 1.0,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        check_sizes(d_model=d_model, n_experts=n_experts, expert_size=expert_size, k=k)
        check_choice(n_experts, k, gating, expert_dropout, router_threshold)
        self.d_model, self.n_experts, self.expert_size, self.k = d_model, n_experts, expert_size, k
        self.synchronize = synchronize
        self.router = Router(
            d_model=d_model, n_heads=1, n_experts=n_experts, k=k, gating=gating, expert_dropout=expert_dropout,
            threshold=router_threshold, normalize_rows=True, init_scale=init_scale,
        )  # fmt: skip
        self.up_proj = MoELinear(
            n_heads=1, n_experts=n_experts, d_in=d_model, d_out=expert_size,
            reduce=None, init_scale=init_scale, backend=backend,
        )  # fmt: skip
        self.down_proj = MoELinear(
            n_heads=1, n_experts=n_experts, d_in=expert_size, d_out=d_model, fan_in=n_experts * expert_size,
            reduce="heads", init_scale=init_scale, backend=backend,
        )  # fmt: skip

    def reset_parameters(self) -> None:
        """Draw all weights anew: as they come, the router's rows then brought to one norm."""
        for module in (self.router, self.up_proj, self.down_proj):
            module.reset_parameters()

    def forward(
        self,
        x: Float[Tensor, "*batch d_model"],
        *,
        padding_mask: Bool[Tensor, "*batch"] | None = None,
        return_aux: bool = False,
    ) -> Float[Tensor, "*batch d_model"] | tuple[Tensor, AuxLosses]:
        """`[..., d_model]` to the same shape.

        Args:
            x: input.
            padding_mask: True = padding, which the auxiliary loss does not count.
            return_aux: return `{"entropy_loss": ...}` too.
        """
        if x.shape[-1] != self.d_model:
            raise ValueError(f"x must be [..., d_model={self.d_model}]; got {tuple(x.shape)}")
        if padding_mask is not None and (padding_mask.dtype != torch.bool or padding_mask.shape != x.shape[:-1]):
            raise ValueError(
                f"padding_mask must be boolean {list(x.shape[:-1])} (one entry a token; True = padding); "
                f"got {padding_mask.dtype} {tuple(padding_mask.shape)}"
            )
        tokens = x.reshape(-1, self.d_model)  # [N, D]
        routing = self.router(tokens)
        hidden = F.relu(self.up_proj(tokens, routing))  # [N, 1, K, expert_size]
        y = self.down_proj(hidden[:, 0], routing.per_slot()).view(x.shape)
        if not return_aux:
            return y
        is_token = None if padding_mask is None else ~padding_mask.flatten()
        scores = self.router.scores(tokens)[:, 0]
        return y, {"entropy_loss": entropy_loss(scores, is_token, synchronize=self.synchronize)}

    def extra_repr(self) -> str:
        """Sizes."""
        return (
            f"d_model={self.d_model}, n_experts={self.n_experts}, expert_size={self.expert_size}, k={self.k}, "
            f"synchronize={self.synchronize}"
        )

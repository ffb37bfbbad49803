"""MoA: a mixture of attention heads, chosen per query (arXiv 2210.05144)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from switchhead.nn.attention import (
    AuxLosses,
    Cache,
    RelativeWeights,
    average_values,
    check_input,
    check_sizes,
    merge_heads,
)
from switchhead.nn.init import normal_
from switchhead.nn.linear import Linear
from switchhead.nn.moe_linear import MoELinear
from switchhead.nn.norm import QKNorm
from switchhead.nn.positions import Positions, Relative, as_positions
from switchhead.nn.projections import behind_memory, project_experts, project_heads
from switchhead.nn.regularizers import cv_loss, router_z_loss, switch_loss
from switchhead.nn.router import Router
from switchhead.ops.attention import SharedMask
from switchhead.ops.moe_linear import Backend
from switchhead.ops.router import Gating
from switchhead.ops.widths import aligned_width, pad_width
from switchhead.routing import Routing


class MoAAttention(nn.Module):
    """`y[t] = sum_{e in topk(s[t])} g[t, e] (A_e V)[t] W_O[e]`, `Q_e = x W_Q[e]`, scores `s = x W_S^T`, E experts.

    One key and one value projection serve all experts, so a cache holds `2 * d_head` numbers a token. Each query uses
    `n_heads` experts with an attention matrix each.

    With relative positions, one projection of the positions serves all experts, and the scores have one learned
    temperature, initially `1 / sqrt(d_head)`, as in the SwitchHead authors' baseline.

    Args:
        d_model: width of the input and output.
        n_heads: experts that a query uses, the paper's k.
        n_experts: query and output experts E.
        d_head: width of queries, keys and values.
        positions: `None`, `"rotary"` / `Rotary(...)`, or `"relative"` / `Relative()`.
        gating: `"softmax"` over all experts, the chosen probabilities as they are (MoA's own), `"softmax_chosen"` over
            the chosen scores only, or `"sigmoid"`.
        expert_dropout: probability that an expert may not be chosen by a token, in training.
        router_threshold: see `Router`'s threshold.
        qk_norm: norm queries and keys (see `QKNorm`).
        causal: queries see no later keys, of a `context` either: False for cross-attention.
        init_scale: multiplies initial standard deviations; a model of L layers passes `sqrt(2 / L)`.
        backend: how expert projections run, see `switchhead.ops.moe_linear`.

    Raises:
        ValueError: an argument that cannot be; the message names it.
    """

    def __init__(
        self,
        *,
        d_model: int,
        n_heads: int,
        n_experts: int,
        d_head: int,
        positions: Positions | str = None,
        gating: Gating = "softmax",
        expert_dropout: float = 0.0,
        router_threshold: float = 0.0,
        qk_norm: bool = False,
        causal: bool = True,
        init_scale: float = 1.0,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        check_sizes(d_model=d_model, n_heads=n_heads, n_experts=n_experts, d_head=d_head)
        if n_heads > n_experts:
            raise ValueError(f"n_heads={n_heads} experts cannot be chosen out of n_experts={n_experts}")
        self.d_model, self.n_heads, self.n_experts, self.d_head = d_model, n_heads, n_experts, d_head
        self.causal, self.init_scale = causal, init_scale
        self.positions = as_positions(positions, d_head)
        self.router = Router(
            d_model=d_model, n_heads=1, n_experts=n_experts, k=n_heads, gating=gating, expert_dropout=expert_dropout,
            threshold=router_threshold, init_scale=init_scale,
        )  # fmt: skip
        self.q_proj = MoELinear(
            n_heads=1, n_experts=n_experts, d_in=d_model, d_out=d_head,
            reduce=None, init_scale=init_scale, backend=backend,
        )  # fmt: skip
        self.k_proj = Linear(d_model, d_head, bias=False)
        self.v_proj = Linear(d_model, d_head, bias=False)
        self.o_proj = MoELinear(
            n_heads=1, n_experts=n_experts, d_in=d_head, d_out=d_model, fan_in=n_heads * d_head,
            reduce="heads", init_scale=init_scale, backend=backend,
        )  # fmt: skip
        if isinstance(self.positions, Relative):
            self.position_proj = Linear(d_model, d_head, bias=False)
            self.scale = nn.Parameter(torch.empty(1))
        self.qk_norm = QKNorm(d_head) if qk_norm else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all weights anew (see `switchhead.nn.init`); temperature `1 / sqrt(d_head)`."""
        for module in self.children():
            if isinstance(module, Linear):
                normal_(module.weight, module.in_features, self.init_scale)
            elif isinstance(module, MoELinear | Router | QKNorm):
                module.reset_parameters()
        if isinstance(self.positions, Relative):
            self.scale.fill_(1 / math.sqrt(self.d_head))

    def forward(
        self,
        x: Float[Tensor, "batch T d_model"],
        *,
        context: Float[Tensor, "batch S d_model"] | None = None,
        memory: Float[Tensor, "batch M d_model"] | None = None,
        key_padding_mask: Bool[Tensor, "batch S"] | None = None,
        attn_mask: Tensor | SharedMask | None = None,
        position_ids: Int[Tensor, "*batch T"] | None = None,
        cache: Cache | None = None,
        cu_seqlens: Int[Tensor, " documents+1"] | None = None,
        return_aux: bool = False,
    ) -> Float[Tensor, "batch T d_model"] | tuple[Tensor, AuxLosses]:
        """`[B, T, d_model]` to the same shape; arguments as in `SwitchHeadAttention.forward`.

        `return_aux` adds the losses `cv_loss`, `switch_loss` and `router_z_loss` of the tokens of x. Without a context,
        tokens that `key_padding_mask` hides do not count.
        """
        check_input(x, self.d_model, context, memory)
        relative = isinstance(self.positions, Relative)
        wide = aligned_width(self.d_model, x.device)
        tokens = pad_width(x, wide).flatten(0, 1)  # [B*T, D]
        routing = self.router(tokens)
        q = project_experts(tokens, self.q_proj, routing)[:, 0]  # [B*T, H, d]
        q = q.unflatten(0, x.shape[:2]).transpose(1, 2)  # [B, H, T, d]
        source = tokens.unflatten(0, x.shape[:2]) if context is None else pad_width(context, wide)  # [B, T or S, D]
        k, v = project_heads(source, (self.k_proj, self.v_proj), self.d_head)  # [B, 1, S, d]
        if memory is not None:  # apart: as a rule it asks for no gradient
            before = project_heads(pad_width(memory.to(x.dtype), wide), (self.k_proj, self.v_proj), self.d_head)
            k, v = behind_memory(before, (k, v))  # [B, 1, M + T, d]
        y = average_values(
            q, k, v, d_head=self.d_head, causal=self.causal, positions=self.positions,
            relative=RelativeWeights(self.position_proj, scale=self.scale) if relative else None,
            qk_norm=self.qk_norm, crossed=context is not None, key_padding_mask=key_padding_mask, attn_mask=attn_mask,
            position_ids=position_ids, cache=cache, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        out = project_experts(merge_heads(y), self.o_proj, routing.per_slot())[:, : self.d_model]
        out = out.unflatten(0, x.shape[:2])  # [B, T, D]
        if not return_aux:
            return out
        counted = None
        if key_padding_mask is not None and context is None:
            counted = ~key_padding_mask[:, key_padding_mask.shape[1] - x.shape[1] :].flatten()
        return out, self._aux_losses(tokens, routing, counted)

    def _aux_losses(self, tokens: Tensor, routing: Routing, is_token: Tensor | None) -> AuxLosses:
        scores, gates = self.router.scores(tokens)[:, 0], routing.dense_gates()[:, 0]  # [N, E]
        return {
            "cv_loss": cv_loss(gates, is_token),
            "switch_loss": switch_loss(scores, gates, is_token),
            "router_z_loss": router_z_loss(scores, is_token),
        }

    def extra_repr(self) -> str:
        """Sizes and options."""
        return (
            f"d_model={self.d_model}, n_heads={self.n_heads}, n_experts={self.n_experts}, d_head={self.d_head}, "
            f"positions={self.positions}"
        )

"""Dense attention: multi-head, grouped-query and multi-query, with the interface of `SwitchHeadAttention`."""

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
from switchhead.nn.init import truncated_normal_
from switchhead.nn.linear import Linear
from switchhead.nn.norm import QKNorm
from switchhead.nn.positions import Positions, Relative, as_positions
from switchhead.nn.projections import behind_memory, project_heads, project_output
from switchhead.nn.router import Router
from switchhead.ops.attention import SharedMask
from switchhead.ops.widths import aligned_width, pad_width


class MultiHeadAttention(nn.Module):
    """`y = concat_h(softmax(scale Q_h K_h^T) V_h) W_O`.

    With relative positions (Transformer-XL, arXiv 1901.02860) the score is
    `scale ((q_i + u_h) . k_j + (q_i + w_h) . r_{h, j-i})`, with a content bias u and a position bias w per head and one
    learned temperature `scale`, initially `1 / sqrt(d_head)`.

    Args:
        d_model: width of the input and output.
        n_heads: query heads.
        d_head: width of a head.
        n_kv_heads: key and value heads, a divisor of n_heads; default n_heads. 1 is multi-query attention.
        positions: `None`, `"rotary"` / `Rotary(...)`, or `"relative"` / `Relative()`.
        qk_norm: norm queries and keys in each head (see `QKNorm`).
        causal: queries see no later keys, of a `context` either: False for cross-attention.
        init_scale: multiplies initial standard deviations; a model of L layers passes `sqrt(2 / L)`.

    Raises:
        ValueError: an argument that cannot be; the message names it.
    """

    def __init__(
        self,
        *,
        d_model: int,
        n_heads: int,
        d_head: int,
        n_kv_heads: int | None = None,
        positions: Positions | str = None,
        qk_norm: bool = False,
        causal: bool = True,
        init_scale: float = 1.0,
    ) -> None:
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        check_sizes(d_model=d_model, n_heads=n_heads, d_head=d_head, n_kv_heads=n_kv_heads)
        if n_heads % n_kv_heads:
            raise ValueError(f"n_kv_heads={n_kv_heads} must divide n_heads={n_heads}")
        self.d_model, self.n_heads, self.d_head, self.n_kv_heads = d_model, n_heads, d_head, n_kv_heads
        self.causal, self.init_scale = causal, init_scale
        self.positions = as_positions(positions, d_head)
        self.q_proj = Linear(d_model, n_heads * d_head, bias=False)
        self.k_proj = Linear(d_model, n_kv_heads * d_head, bias=False)
        self.v_proj = Linear(d_model, n_kv_heads * d_head, bias=False)
        self.o_proj = Linear(n_heads * d_head, d_model, bias=False)
        if isinstance(self.positions, Relative):
            self.position_proj = Linear(d_model, n_heads * d_head, bias=False)
            self.content_bias = nn.Parameter(torch.empty(n_heads, d_head))
            self.position_bias = nn.Parameter(torch.empty(n_heads, d_head))
            self.scale = nn.Parameter(torch.empty(1))
        self.qk_norm = QKNorm(d_head) if qk_norm else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all weights anew (see `switchhead.nn.init`); biases 0, temperature `1 / sqrt(d_head)`."""
        for module in self.children():
            if isinstance(module, Linear):
                truncated_normal_(module.weight, module.in_features, self.init_scale)
            elif isinstance(module, QKNorm | Router):
                module.reset_parameters()
        if isinstance(self.positions, Relative):
            self.content_bias.zero_()
            self.position_bias.zero_()
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
        """`[B, T, d_model]` to the same shape; arguments as in `SwitchHeadAttention.forward`."""
        check_input(x, self.d_model, context, memory)
        relative = isinstance(self.positions, Relative)
        wide = aligned_width(self.d_model, x.device)
        tokens = pad_width(x, wide)
        if context is None:
            q, k, v = project_heads(tokens, (self.q_proj, self.k_proj, self.v_proj), self.d_head)  # [B, H, T, d]
        else:
            (q,) = project_heads(tokens, (self.q_proj,), self.d_head)
            k, v = project_heads(pad_width(context, wide), (self.k_proj, self.v_proj), self.d_head)  # [B, H_kv, S, d]
        if memory is not None:  # apart: as a rule it asks for no gradient
            source = pad_width(memory.to(x.dtype), wide)
            before = project_heads(source, (self.k_proj, self.v_proj), self.d_head)
            k, v = behind_memory(before, (k, v))  # [B, H_kv, M + T, d]
        learned = None
        if relative:
            learned = RelativeWeights(self.position_proj, self.content_bias, self.position_bias, self.scale)
        y = average_values(
            q, k, v, d_head=self.d_head, causal=self.causal, positions=self.positions, relative=learned,
            qk_norm=self.qk_norm, crossed=context is not None, key_padding_mask=key_padding_mask, attn_mask=attn_mask,
            position_ids=position_ids, cache=cache, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        rows = self.weigh_heads(merge_heads(y), x)  # [B*T, H, d]
        out = project_output(rows, self.o_proj, self.d_head).unflatten(0, x.shape[:2])  # [B, T, D]
        return (out, {}) if return_aux else out

    def weigh_heads(
        self, rows: Float[Tensor, "tokens heads d"], x: Float[Tensor, "batch T d_model"]
    ) -> Float[Tensor, "tokens heads d"]:
        """Every head counts in full; a gated layer weighs them by what the tokens x choose."""
        return rows

    def extra_repr(self) -> str:
        """Sizes and options."""
        return (
            f"d_model={self.d_model}, n_heads={self.n_heads}, d_head={self.d_head}, n_kv_heads={self.n_kv_heads}, "
            f"positions={self.positions}"
        )

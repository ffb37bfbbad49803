"""Dense attention: multi-head, grouped-query and multi-query, with the interface of `SwitchHeadAttention`."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from switchhead.nn.attention import (
    Cache,
    attend,
    check_input,
    check_sizes,
    key_value_source,
    merge_heads,
    rotate_queries_and_keys,
)
from switchhead.nn.init import truncated_normal_
from switchhead.nn.linear import Linear
from switchhead.nn.positions import Positions, Relative, Rotary, as_positions
from switchhead.nn.projections import aligned_width, pad_width, project_heads, project_output
from switchhead.ops.relative import relative_bias


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
        causal: queries see no later keys.
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
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all weights anew (see `switchhead.nn.init`); biases 0, temperature `1 / sqrt(d_head)`."""
        for module in self.children():
            if isinstance(module, Linear):
                truncated_normal_(module.weight, module.in_features, self.init_scale)
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
        attn_mask: Tensor | None = None,
        position_ids: Int[Tensor, "*batch T"] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "batch T d_model"]:
        """`[B, T, d_model]` to the same shape; arguments as in `SwitchHeadAttention.forward`."""
        check_input(x, self.d_model, context, memory)
        wide = aligned_width(self.d_model, x.device)
        tokens = pad_width(x, wide)
        if context is None and memory is None:
            q, k, v = project_heads(tokens, (self.q_proj, self.k_proj, self.v_proj), self.d_head)  # [B, H, T, d]
        else:
            source = pad_width(key_value_source(x, context, memory), wide)  # [B, S, D]
            (q,) = project_heads(tokens, (self.q_proj,), self.d_head)
            k, v = project_heads(source, (self.k_proj, self.v_proj), self.d_head)  # [B, H_kv, S, d]
        if isinstance(self.positions, Rotary):
            q, k = rotate_queries_and_keys(
                q, k, self.positions, d_head=self.d_head,
                position_ids=position_ids, cached=cache is not None, crossed=context is not None,
            )  # fmt: skip
        if cache is not None:
            k, v = cache.update(k[..., : self.d_head], v[..., : self.d_head])
        scale, bias = 1 / math.sqrt(self.d_head), None
        if isinstance(self.positions, Relative):
            q, bias = self._position_scores(q[..., : self.d_head], k.shape[-2], self.positions)
            scale = 1.0
        y = attend(
            q, k, v, scale=scale, causal=self.causal and (cache is None or attn_mask is None),
            key_padding_mask=key_padding_mask, attn_mask=attn_mask, bias=bias,
        )  # fmt: skip
        return project_output(merge_heads(y), self.o_proj, self.d_head).unflatten(0, x.shape[:2])  # [B, T, D]

    def _position_scores(self, q: Tensor, n_keys: int, relative: Relative) -> tuple[Tensor, Tensor]:
        """Queries for the content scores, temperature included, and the position scores `[B, H, T, S]`."""
        distances = relative.distances(q.shape[-2], n_keys, causal=self.causal, device=q.device)
        r = self.position_proj(relative.encoding(distances, self.d_model, q.dtype)).unflatten(
            -1, (self.n_heads, self.d_head)
        )
        content, position = (
            ((q + bias[:, None]) * self.scale).to(q.dtype) for bias in (self.content_bias, self.position_bias)
        )
        return content, relative_bias(position, r.transpose(0, 1).to(q.dtype), n_keys)

    def extra_repr(self) -> str:
        """Sizes and options."""
        return (
            f"d_model={self.d_model}, n_heads={self.n_heads}, d_head={self.d_head}, n_kv_heads={self.n_kv_heads}, "
            f"positions={self.positions}"
        )

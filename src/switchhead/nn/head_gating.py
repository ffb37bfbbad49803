"""Naive head gating: dense attention of which each query uses a few heads (arXiv 2312.07987, equations 4-6)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from switchhead.nn.multihead import MultiHeadAttention
from switchhead.nn.positions import Positions
from switchhead.nn.router import Router, check_choice
from switchhead.ops.router import Gating


class HeadGatedAttention(MultiHeadAttention):
    """`y[t] = sum_{h in topk(s[t])} g[t, h] (A_h V_h)[t] W_O[h]`, with scores `s = x W_S^T` and gates `sigmoid(s)`.

    What a query saves by skipping heads, it cannot cash in: every head is used by some query, so all keys, values and
    attention matrices are needed. The paper's argument for SwitchHead starts here.

    Args:
        d_model: width of the input and output.
        n_heads: heads.
        d_head: width of a head.
        k: heads that a query uses.
        positions: as in `MultiHeadAttention`.
        gating: `"sigmoid"`, or `"softmax"` over all heads.
        expert_dropout: probability that a head may not be chosen by a token, in training.
        router_threshold: see `Router`'s threshold.
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
        k: int,
        positions: Positions | str = None,
        gating: Gating = "sigmoid",
        expert_dropout: float = 0.0,
        router_threshold: float = 0.0,
        qk_norm: bool = False,
        causal: bool = True,
        init_scale: float = 1.0,
    ) -> None:
        super().__init__(
            d_model=d_model, n_heads=n_heads, d_head=d_head, positions=positions, qk_norm=qk_norm, causal=causal,
            init_scale=init_scale,
        )  # fmt: skip
        if not 1 <= k <= n_heads:
            raise ValueError(f"k={k} heads cannot be chosen out of n_heads={n_heads}; use 1 <= k <= n_heads")
        check_choice(n_heads, k, gating, expert_dropout, router_threshold)
        self.k = k
        self.router = Router(
            d_model=d_model, n_heads=1, n_experts=n_heads, k=k, gating=gating, expert_dropout=expert_dropout,
            threshold=router_threshold, init_scale=init_scale,
        )  # fmt: skip

    def weigh_heads(
        self, rows: Float[Tensor, "tokens heads d"], x: Float[Tensor, "batch T d_model"]
    ) -> Float[Tensor, "tokens heads d"]:
        """Heads times their gates, zero where a head was not chosen."""
        gates = self.router(x.flatten(0, 1)).dense_gates()[:, 0]  # [N, H]
        return rows * gates[..., None].to(rows.dtype)

    def extra_repr(self) -> str:
        """Sizes and options."""
        return f"{super().extra_repr()}, k={self.k}"

"""Root-mean-square norm of queries and keys."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from switchhead.ops.widths import pad_width

_EPS = 1e-6


class QKNorm(nn.Module):
    """`x / rms(x) * weight` over the channels of each head, for queries and for keys (arXiv 2302.05442).

    Scores stay bounded, whatever the projections grow to. All heads share a weight.

    Args:
        d_head: width of a head.
    """

    def __init__(self, d_head: int) -> None:
        super().__init__()
        self.q_weight = nn.Parameter(torch.empty(d_head))
        self.k_weight = nn.Parameter(torch.empty(d_head))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Both weights 1."""
        nn.init.ones_(self.q_weight)
        nn.init.ones_(self.k_weight)

    def forward(
        self, q: Float[Tensor, "batch heads T wide"], k: Float[Tensor, "batch kv_heads S wide"]
    ) -> tuple[Tensor, Tensor]:
        """Normed queries and keys of the same dtypes and widths; zeros padded behind `d_head` do not count."""
        return _norm(q, self.q_weight), _norm(k, self.k_weight)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    d_head = weight.shape[0]
    normed = F.rms_norm(x[..., :d_head], (d_head,), weight.to(x.dtype), _EPS)
    return pad_width(normed.to(x.dtype), x.shape[-1])

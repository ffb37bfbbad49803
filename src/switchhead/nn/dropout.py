"""`torch.nn.Dropout` on `switchhead.ops.dropout`."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from switchhead.ops import dropout


class Dropout(nn.Dropout):
    """`torch.nn.Dropout` with random numbers that cost a compiled GPU step less."""

    def forward(self, input: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """See `switchhead.ops.dropout`; the input itself outside training."""
        return dropout(input, self.p) if self.training and self.p > 0 else input

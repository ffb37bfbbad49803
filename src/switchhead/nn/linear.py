"""`torch.nn.Linear` with the mixed-dtype rule of the expert projections."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from switchhead.ops.dtypes import cast_together


class Linear(nn.Linear):
    """`y = x W^T + b` for any mix of floating dtypes: outside autocast operands are promoted, not refused."""

    def forward(self, input: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """`[..., in_features] -> [..., out_features]`."""
        if self.bias is None:
            return self.product(input)
        return F.linear(*cast_together(input, self.weight, self.bias))

    def product(self, input: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """`x W^T`, without the bias."""
        return F.linear(*cast_together(input, self.weight))

"""`torch.nn.Linear` with the mixed-dtype rule of the expert projections."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from switchhead.ops.dtypes import cast_together


class Linear(nn.Linear):
    """`y = x W^T + b` for any mix of floating dtypes: outside autocast operands are promoted, not refused."""

    def forward(self, input: Float[Tensor, "*batch d_in"], *, biased: bool = True) -> Float[Tensor, "*batch d_out"]:
        """`[..., in_features] -> [..., out_features]`; unless `biased` without the bias, but in the dtype with it."""
        if self.bias is None:
            return F.linear(*cast_together(input, self.weight))
        input, weight, bias = cast_together(input, self.weight, self.bias)
        return F.linear(input, weight, bias if biased else None)

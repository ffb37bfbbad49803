"""Feed-forward layers."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from switchhead.nn.attention import check_sizes
from switchhead.nn.init import truncated_normal_
from switchhead.nn.linear import Linear


class MLP(nn.Module):
    """`y = dropout(relu(x W_1 + b_1)) W_2 + b_2`.

    Args:
        d_model: width of the input and output.
        d_ff: inner width.
        dropout: probability of dropping an inner unit, in training.
        init_scale: multiplies initial standard deviations `1 / sqrt(fan_in)`.
    """

    def __init__(self, *, d_model: int, d_ff: int, dropout: float = 0.0, init_scale: float = 1.0) -> None:
        super().__init__()
        check_sizes(d_model=d_model, d_ff=d_ff)
        self.up_proj = Linear(d_model, d_ff)
        self.down_proj = Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)
        self.init_scale = init_scale
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the matrices anew; biases 0."""
        for projection in (self.up_proj, self.down_proj):
            truncated_normal_(projection.weight, projection.in_features, self.init_scale)
            nn.init.zeros_(projection.bias)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """`[..., d_model]` to the same shape."""
        return self.down_proj(self.dropout(F.relu(self.up_proj(x))))

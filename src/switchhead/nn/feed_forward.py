"""Dense feed-forward layers."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from switchhead.nn.attention import AuxLosses, check_sizes
from switchhead.nn.dropout import Dropout
from switchhead.nn.init import truncated_normal_
from switchhead.nn.linear import Linear
from switchhead.ops import relu_dropout


class _FeedForward(nn.Module):
    """What the dense layers share: two or three projections, drawn alike, and the interface of `SigmaMoE`."""

    def __init__(self, dropout: float, init_scale: float) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.init_scale = init_scale

    def reset_parameters(self) -> None:
        """Draw the matrices anew; biases 0."""
        for projection in self.children():
            if isinstance(projection, Linear):
                truncated_normal_(projection.weight, projection.in_features, self.init_scale)
                if projection.bias is not None:
                    nn.init.zeros_(projection.bias)

    def forward(
        self,
        x: Float[Tensor, "*batch d_model"],
        *,
        padding_mask: Bool[Tensor, "*batch"] | None = None,
        return_aux: bool = False,
    ) -> Float[Tensor, "*batch d_model"] | tuple[Tensor, AuxLosses]:
        """`[..., d_model]` to the same shape; a dense layer has no auxiliary loss."""
        y = self.project(x)
        return (y, {}) if return_aux else y

    def project(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The layer's own equation."""
        raise NotImplementedError


class MLP(_FeedForward):
    """`y = dropout(relu(x W_1 + b_1)) W_2 + b_2`.

    In training with dropout, bias, ReLU and dropout are one operation (`switchhead.ops.relu_dropout`): a hook on
    `up_proj` then sees the product before the bias, and one on `dropout` nothing.

    Args:
        d_model: width of the input and output.
        d_ff: inner width.
        bias: whether the projections have one.
        dropout: probability of dropping an inner unit, in training.
        init_scale: multiplies initial standard deviations `1 / sqrt(fan_in)`.
    """

    def __init__(
        self, *, d_model: int, d_ff: int, bias: bool = True, dropout: float = 0.0, init_scale: float = 1.0
    ) -> None:
        super().__init__(dropout, init_scale)
        check_sizes(d_model=d_model, d_ff=d_ff)
        self.up_proj = Linear(d_model, d_ff, bias=bias)
        self.down_proj = Linear(d_ff, d_model, bias=bias)
        self.reset_parameters()

    def project(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """See the class."""
        up, dropout = self.up_proj, self.dropout
        if dropout.training and dropout.p > 0 and type(up) is Linear:  # not an adapter in its place
            return self.down_proj(relu_dropout(up(x, biased=False), up.bias, dropout.p))
        return self.down_proj(dropout(F.relu(up(x))))


class SwiGLU(_FeedForward):
    """`y = dropout(silu(x W_g + b_g) * (x W_1 + b_1)) W_2 + b_2` (arXiv 2002.05202).

    Args:
        d_model: width of the input and output.
        d_ff: inner width.
        bias: whether the projections have one.
        dropout: probability of dropping an inner unit, in training.
        init_scale: multiplies initial standard deviations `1 / sqrt(fan_in)`.
    """

    def __init__(
        self, *, d_model: int, d_ff: int, bias: bool = True, dropout: float = 0.0, init_scale: float = 1.0
    ) -> None:
        super().__init__(dropout, init_scale)
        check_sizes(d_model=d_model, d_ff=d_ff)
        self.gate_proj = Linear(d_model, d_ff, bias=bias)
        self.up_proj = Linear(d_model, d_ff, bias=bias)
        self.down_proj = Linear(d_ff, d_model, bias=bias)
        self.reset_parameters()

    def project(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """See the class."""
        return self.down_proj(self.dropout(F.silu(self.gate_proj(x)) * self.up_proj(x)))

"""The inner activation of a feed-forward layer in training."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from switchhead.ops.availability import is_gpu, triton_obstacle


def relu_dropout(
    x: Float[Tensor, "*batch width"], bias: Float[Tensor, " width"] | None, p: float
) -> Float[Tensor, "*batch width"]:
    """`dropout(relu(x + bias))`, in the dtype of x.

    On a GPU one kernel reads x once and writes the result, and backward needs nothing else; its random numbers are not
    those of `torch.nn.functional.dropout`, and repeat with the generator of the device as those do.

    Args:
        x: before the bias.
        bias: any floating dtype; None: no bias.
        p: probability of dropping a unit, `0 <= p <= 1`; the others are divided by `1 - p`.

    Raises:
        ValueError: a p that is no probability.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"p={p} must be a probability, 0 <= p <= 1")
    if p < 1 and is_gpu(x.device) and triton_obstacle(x.device, x.dtype) is None:
        from switchhead.ops.triton.relu_dropout import relu_dropout as run

        return run(x, bias, p)
    return F.dropout(F.relu(x if bias is None else x + bias.to(x.dtype)), p)

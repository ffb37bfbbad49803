"""Dropout, alone and with the activation of a feed-forward layer: cheaper on a GPU than what PyTorch has."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from switchhead.ops.availability import is_gpu, require_triton, triton_obstacle

Backend = Literal["auto", "reference", "triton"]


def dropout(x: Float[Tensor, "*shape"], p: float, *, backend: Backend = "auto") -> Float[Tensor, "*shape"]:
    """Zeros with probability p, the rest divided by `1 - p`.

    Compiled for a GPU, the random numbers are those of a kernel of its own, which a compiler's cost several times; they
    repeat with the device's generator. Elsewhere it is `torch.nn.functional.dropout`.

    Args:
        x: what to drop elements of.
        p: the probability, `0 <= p <= 1`.
        backend: `"reference"`, PyTorch's, or `"triton"`; `"auto"`: see above.

    Raises:
        ValueError: a p that is no probability, or a backend that cannot run here.
    """
    runs_kernels = _check(x, p, backend)
    if p < 1 and runs_kernels and (backend == "triton" or torch.compiler.is_compiling()):
        from switchhead.ops.triton.dropout import keep_mask

        mask, scale = keep_mask(x, p)
        return torch.where(mask, x * scale, 0.0)
    return F.dropout(x, p)


def relu_dropout(
    x: Float[Tensor, "*batch width"], bias: Float[Tensor, " width"] | None, p: float, *, backend: Backend = "auto"
) -> Float[Tensor, "*batch width"]:
    """`dropout(relu(x + bias))`, in the dtype of x.

    On a GPU one kernel reads x once and writes the result, and backward needs nothing else. Its random numbers are not
    those of `torch.nn.functional.dropout`, and repeat with the device's generator as those do; a unit that is infinite
    is dropped like any other; it is differentiable once, in reverse mode.

    Args:
        x: before the bias.
        bias: any floating dtype; None: no bias.
        p: probability of dropping a unit, `0 <= p <= 1`; the others are divided by `1 - p`.
        backend: `"reference"`, PyTorch's, or `"triton"`; `"auto"` where it can run on a GPU.

    Raises:
        ValueError: a p that is no probability, a bias of another width, or a backend that cannot run here.
    """
    runs_kernels = _check(x, p, backend)
    if bias is not None and bias.shape != x.shape[-1:]:
        raise ValueError(f"bias must be [{x.shape[-1]}], as wide as x; got {list(bias.shape)}")
    if p < 1 and runs_kernels:
        from switchhead.ops.triton.dropout import relu_dropout as run

        return run(x, bias, p)
    return F.dropout(F.relu(x if bias is None else x + bias.to(x.dtype)), p)


def _check(x: Tensor, p: float, backend: Backend) -> bool:
    """Whether the kernels may run."""
    if not 0 <= p <= 1:
        raise ValueError(f"p={p} must be a probability, 0 <= p <= 1")
    if backend not in ("auto", "reference", "triton"):
        raise ValueError(f"backend={backend!r} is unknown; use 'auto', 'reference' or 'triton'")
    if backend == "triton":
        require_triton(x.device, x.dtype)
        return True
    return backend == "auto" and is_gpu(x.device) and triton_obstacle(x.device, x.dtype) is None

"""Widths that GPU kernels handle well: multiples of 8, filled up with zeros."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from switchhead.ops.availability import is_gpu


def aligned_width(width: int, device: torch.device) -> int:
    """On a GPU the next multiple of 8, else the width itself."""
    return -(-width // 8) * 8 if is_gpu(device) else width


def pad_width(t: Float[Tensor, "*batch width"], width: int) -> Float[Tensor, "*batch padded"]:
    """Zeros behind the last axis, up to width."""
    return pad(t, (0, width - t.shape[-1]))


def pad(t: Tensor, padding: Sequence[int]) -> Tensor:
    """`torch.nn.functional.pad` that makes no copy where there is nothing to add."""
    return F.pad(t, padding) if any(padding) else t

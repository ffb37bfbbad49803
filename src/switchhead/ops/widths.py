"""Widths that GPU kernels handle well, filled up with zeros."""

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


def attention_width(d_head: int, device: torch.device) -> int:
    """Width of heads that are written anew before attention anyway; at least `aligned_width`.

    On a GPU the next multiple of 16 up to 128: cuDNN's kernels take longer for heads of 104 than for heads of 112.
    """
    return -(-d_head // 16) * 16 if is_gpu(device) and d_head <= 128 else aligned_width(d_head, device)


def pad_width(t: Float[Tensor, "*batch width"], width: int) -> Float[Tensor, "*batch padded"]:
    """Zeros behind the last axis, up to width."""
    return pad(t, (0, width - t.shape[-1]))


def pad(t: Tensor, padding: Sequence[int]) -> Tensor:
    """`torch.nn.functional.pad` that makes no copy where there is nothing to add."""
    return F.pad(t, padding) if any(padding) else t

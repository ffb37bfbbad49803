"""Initial values of every matrix (paper's authors' choices), in one place.

Standard deviations are given for `init_scale = 1`; a model of L layers passes `init_scale = sqrt(2 / L)`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

# Standard deviation of a standard normal cut off at two standard deviations.
_TRUNCATED_STD = 0.87962566103423978


@torch.no_grad()
def normal_(weight: Tensor, fan_in: int, init_scale: float = 1.0) -> None:
    """Normal with standard deviation `init_scale / sqrt(fan_in)`: SwitchHead's projections, routers and positions."""
    nn.init.normal_(weight, std=init_scale / math.sqrt(fan_in))


@torch.no_grad()
def truncated_normal_(weight: Tensor, fan_in: int, init_scale: float = 1.0) -> None:
    """Normal cut off at two deviations and rescaled to standard deviation `init_scale / sqrt(fan_in)`.

    For feed-forward layers and dense attention.
    """
    std = init_scale / math.sqrt(fan_in) / _TRUNCATED_STD
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


@torch.no_grad()
def normalize_(weight: Tensor, dim: int) -> None:
    """Bring all slices along dim to one norm, keeping the standard deviation of the whole."""
    std = weight.std()
    weight.div_(weight.norm(dim=dim, keepdim=True))
    weight.mul_(std / weight.std())

"""Tile sizes of the matmul kernels, apart from the kernels. Measured on an H200; docs/performance.md has the figures."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """Block of rows, columns and inner dimension; warps; depth of the software pipeline."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


def project_tile(dtype: torch.dtype, slots: int, width: int) -> Tile:
    """Tile of `project`: `slots` sums of `m x n` are held in registers at once."""
    n = 64 if width <= 64 else 128
    if dtype == torch.float32:
        return Tile(64, 32, 32, 4, 2) if slots > 2 else Tile(64, 64, 32, 4, 2)
    if slots == 1:
        return Tile(128, n, 64, 4, 4)
    if slots == 2:
        return Tile(128, n, 64, 8, 4)
    return Tile(64, n, 64, 8, 3) if slots == 3 or n == 64 else Tile(64, 64, 64, 8, 4)


def accumulate_tile(dtype: torch.dtype) -> Tile:
    """Tile of `accumulate`."""
    return Tile(64, 64, 32, 4, 2) if dtype == torch.float32 else Tile(128, 256, 64, 8, 3)


def weight_grad_tile(dtype: torch.dtype, wide: int, narrow: int) -> Tile:
    """Tile of `weight_grad`: wide x narrow x tokens."""
    if dtype == torch.float32:
        return Tile(64, 64, 32, 4, 2)
    n = 64 if narrow <= 64 else 128
    return Tile(128 if wide <= 512 else 256, n, 64, 8, 3)

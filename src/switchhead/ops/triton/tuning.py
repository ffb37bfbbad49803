"""Tile sizes of the matmul kernels, apart from the kernels. Measured on an H200; docs/performance.md has the figures."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


WEIGHT_GRAD_CHUNK = 4096  # slots summed by one program of `weight_grad`


class Tile(NamedTuple):
    """Block of rows, columns and inner dimension; warps; depth of the software pipeline; programs at once."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    programs_per_sm: int = 1


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; the interpreter runs programs one after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


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
    return Tile(64, 64, 32, 4, 2, 4) if dtype == torch.float32 else Tile(128, 256, 64, 8, 4)


def weight_grad_tile(dtype: torch.dtype, narrow: int) -> Tile:
    """Tile of `weight_grad`: wide x narrow x tokens. Two of its five stages hold row numbers."""
    if dtype == torch.float32:
        return Tile(64, 64, 32, 4, 2)
    return Tile(128, 64 if narrow <= 64 else 128, 64, 4, 5)

"""Tile sizes of the matmul kernels, apart from the kernels. Measured on an H200; see docs/performance.md."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

# Slots summed by one program of `weight_grad`. Longer chunks write fewer partial sums, shorter ones balance better:
# 2048, 4096, 8192 slots take 0.181, 0.161, 0.155 ms with uniform routing, 0.188, 0.170, 0.192 if one expert takes 80 %.
WEIGHT_GRAD_CHUNK = 4096


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


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have: 227 KiB on an H200, 163 on an A100, 99 on a desktop's GPU; many where unknown."""
    if device.type != "cuda":
        return 2**31
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 2**31)


def project_tile(dtype: torch.dtype, slots: int, width: int) -> Tile:
    """Tile of `project`, which holds `slots` sums of `m x n` at once.

    Wide tiles gather x less often; the columns past `width` are wasted. At 32,768 tokens, d_model 1024, d_head 132 and
    k = 4: 0.228 ms with n = 64, 0.264 with 32, 0.315 with m = 64 and n = 128; at 416, 76, k = 3: 0.070, 0.064, 0.074.
    """
    if dtype == torch.float32:
        return Tile(64, 32, 32, 4, 2) if slots > 2 else Tile(64, 64, 32, 4, 2)
    if slots <= 2:
        n = 64 if width <= 64 else 128
        return Tile(128, n, 64, 4 if slots * n <= 128 else 8, 4)
    if cdiv(width, 32) * 32 <= 0.8 * cdiv(width, 64) * 64:
        return Tile(128, 32, 32, 4, 5)
    return Tile(128, 64, 64, 8, 3)


def accumulate_tile(dtype: torch.dtype, inner: int, shared: int) -> Tile:
    """Tile of `accumulate` for an inner dimension of `inner` and so many bytes of shared memory.

    One large tile for each multiprocessor moves the fewest bytes, two smaller ones overlap the start of one with the
    end of the other. The large one wins narrowly (0.194 ms against 0.202 at 448 x 1024), but not where a remainder of
    the inner dimension needs masks (0.88 against 0.79 at 416 x 2048).
    """
    if dtype == torch.float32:
        return Tile(64, 64, 32, 4, 2, 4)
    large = inner % 64 == 0 and shared >= 2**17  # what it takes, by compiling it
    return Tile(128, 256, 64, 8, 3) if large else Tile(128, 128, 64, 4, 3, 2)


def weight_grad_tile(dtype: torch.dtype, narrow: int) -> Tile:
    """Tile of `weight_grad`: wide x narrow x tokens. Two of its five stages hold row numbers."""
    if dtype == torch.float32:
        return Tile(64, 64, 32, 4, 2)
    return Tile(128, 64 if narrow <= 64 else 128, 64, 4, 5)


def slot_width(width: int, slots: int) -> int:
    """Columns of a scaled row: a multiple of 8, and of 64 for the `slots` side by side where that costs no step."""
    aligned = cdiv(width, 8) * 8
    steps = cdiv(slots * aligned, 64)
    filled = steps * 64 // slots
    return filled if steps * 64 % slots == 0 and filled % 8 == 0 else aligned


def cdiv(a: int, b: int) -> int:
    """The quotient rounded up."""
    return -(-a // b)

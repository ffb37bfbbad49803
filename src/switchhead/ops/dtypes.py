"""Which dtype a matmul runs in."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def compute_dtype(*operands: Tensor) -> torch.dtype:
    """Dtype in which the operands are multiplied.

    Inside autocast its dtype, unless an operand is float64 (autocast leaves float64 alone, and so do we). Outside,
    the promotion of all operands, so that float32 activations meet bfloat16 weights without an error.
    """
    dtype = operands[0].dtype
    for operand in operands[1:]:
        dtype = torch.promote_types(dtype, operand.dtype)
    device_type = operands[0].device.type
    autocast = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if autocast and dtype != torch.float64 else dtype


def cast_together(*operands: Tensor) -> tuple[Tensor, ...]:
    """The operands, each in their common compute dtype."""
    dtype = compute_dtype(*operands)
    return tuple(operand.to(dtype) for operand in operands)


def concatenate(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """`torch.cat` in the promotion of the dtypes; autocast's own refuses one 16-bit dtype inside the other."""
    with without_autocast(tensors[0].device):
        return torch.cat(list(tensors), dim)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything narrower: the precision of scores, gates and sums."""
    return torch.promote_types(dtype, torch.float32)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Autocast switched off, where the device has one."""
    if device.type == "meta":
        return nullcontext()
    return torch.autocast(device.type, enabled=False)  # pyright: ignore[reportReturnType]

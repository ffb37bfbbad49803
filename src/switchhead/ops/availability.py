"""Whether a device is a GPU that runs the Triton kernels, and the one warning where a GPU has to do without them."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

# Compiled code launches kernels that it did not write itself by Triton's launcher, 35 us each, unless told to use
# PyTorch's, which takes 15. Compile workers inherit the setting, so it has to be made before the first compilation.
STATIC_LAUNCH = "TORCHINDUCTOR_STATIC_LAUNCH_USER_DEFINED_TRITON_KERNELS"
os.environ.setdefault(STATIC_LAUNCH, "1")

Function = TypeVar("Function", bound=Callable[..., Any])
_warned: set[int] = set()
_all_are_gpus = False


def _constant_under_compile(function: Function) -> Function:
    """`torch.compiler.assume_constant_result` without its import of `torch._dynamo`, which takes as long as torch's."""
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """All devices count as GPUs: tensors without contents take the paths of a CUDA device, to account for them."""
    global _all_are_gpus
    _all_are_gpus = True
    try:
        yield
    finally:
        _all_are_gpus = False


def is_gpu(device: torch.device) -> bool:
    """Whether this is a CUDA device, or counts as one (`as_on_a_gpu`)."""
    return device.type == "cuda" or _all_are_gpus


def triton_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run on tensors of this device and dtype; None where they can."""
    if dtype == torch.float64:
        return "the kernels compute in float32, bfloat16 or float16, not float64"
    if device.type == "cuda":
        return _machine_obstacle(device.index or 0)
    if _all_are_gpus:
        return None if importlib.util.find_spec("triton") else "triton is not installed"
    return None if device.type == "cpu" and _interpreted() else f"the kernels need a CUDA device, not {device.type}"


def require_triton(device: torch.device, dtype: torch.dtype) -> None:
    """ValueError with the reason where an explicit `backend="triton"` cannot run."""
    if (obstacle := triton_obstacle(device, dtype)) is not None:
        raise ValueError(f"backend='triton' cannot run here: {obstacle}. Use backend='auto' or a torch backend")


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one: Triton launches there, wherever its arguments are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@_constant_under_compile
def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None


@_constant_under_compile
def _machine_obstacle(index: int) -> str | None:
    obstacle = None
    if importlib.util.find_spec("triton") is None:
        obstacle = "triton is not installed"
    elif (capability := torch.cuda.get_device_capability(index)) < (8, 0):
        obstacle = f"the GPU has compute capability {capability[0]}.{capability[1]}, and the kernels need 8.0 or newer"
    if obstacle is not None and index not in _warned:
        _warned.add(index)
        warnings.warn(f"switchhead runs without its GPU kernels, more slowly: {obstacle}", stacklevel=2)
    return obstacle

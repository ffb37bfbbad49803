"""Operators whose kernels a compiler sees: it launches them itself, and fuses what stands between them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from switchhead.ops.availability import STATIC_LAUNCH, on_device

if os.environ.get(STATIC_LAUNCH) == "1":  # in case the configuration was read before this package set the variable
    torch._inductor.config.static_launch_user_defined_triton_kernels = True

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _source_digest() -> str:
    """A digest of `switchhead.ops`: `torch.compile` caches inlined bodies on disk by the operator's name alone."""
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:8]


_DIGEST = _source_digest()


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Register a function of tensors, the first on the device of all, that launches `visible` kernels.

    It changes none of its arguments.

    `torch.compile` inlines its body: a launch by compiled code costs a few microseconds, one by Triton's own launcher
    tens. What the body does without its launches tells the compiler shapes, dtypes and strides. Interpreted kernels
    cannot be inlined; there the operator is opaque.
    """

    name = f"{name}_{_DIGEST}"

    def register(function: Callable[..., Any]) -> Any:
        @wraps(function)
        def there(first: Tensor, *rest: Any) -> Any:
            with on_device(first.device):
                return function(first, *rest)

        if not _INTERPRETED:
            return torch.library.triton_op(name, there, mutates_args=())
        opaque = torch.library.custom_op(name, there, mutates_args=())
        opaque.register_fake(there)
        return opaque

    return register


def visible(kernel: Any) -> Any:
    """A kernel as the body of an `operator` launches it: `visible(kernel)[grid](...)`."""
    return _Interpreted(kernel) if _INTERPRETED else torch.library.wrap_triton(kernel)


class _Interpreted:
    """An interpreted kernel that leaves fake tensors alone."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            if not any(isinstance(arg, FakeTensor) for arg in args):
                self.kernel[grid](*args, **options)

        return launch

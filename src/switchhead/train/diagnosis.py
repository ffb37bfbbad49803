"""Where a number stopped being finite."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from switchhead.train.distributed import World


def first_nonfinite_module(model: nn.Module, forward: Callable[[], object], world: World) -> str | None:
    """Name of the first module, in the order of computation, whose output is not finite in a repeated forward pass.

    Args:
        model: the plain model.
        forward: runs it as in the step that failed; every rank of `world` has to.
        world: the first of any rank counts.
    """
    names = {module: name for name, module in model.named_modules() if name}
    places = {module: place for place, module in enumerate(names)}
    calls, found = 0, [math.inf, math.inf]  # number of the call, place of the module

    def look(module: nn.Module, args: object, output: object) -> None:
        nonlocal calls, found
        calls += 1
        if found[0] == math.inf and not all(map(_is_finite, tree_leaves(output))):
            found = [calls, places[module]]

    handles = [module.register_forward_hook(look) for module in names]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    call, place = found
    (first,) = world.min([call])
    (place,) = world.min([place if call == first else math.inf])
    return None if math.isinf(place) else list(names.values())[int(place)]


def first_nonfinite_gradient(model: nn.Module, world: World) -> str | None:
    """Name of the parameter nearest the output whose gradient is not finite: backward came to it first."""
    names = [name for name, _ in model.named_parameters()]
    bad = [i for i, p in enumerate(model.parameters()) if p.grad is not None and not _is_finite(p.grad)]
    (last,) = world.min([-bad[-1] if bad else math.inf])
    return None if math.isinf(last) else names[int(-last)]


def _is_finite(value: object) -> bool:
    value = getattr(value, "gates", value)  # a router's output
    if isinstance(value, DTensor):
        value = value.to_local()
    return not isinstance(value, Tensor) or not value.is_floating_point() or bool(torch.isfinite(value).all())

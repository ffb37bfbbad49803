"""Time and memory of one training step of a layer on a CUDA device."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from switchhead.errors import DeviceError


class Cost(NamedTuple):
    """Median milliseconds of forward + backward, run by the host and as a CUDA graph; MiB of memory."""

    ms: float
    graph_ms: float
    saved_mib: float
    peak_mib: float


def cuda_device(what: str) -> torch.device:
    """The GPU that `switchhead bench` measures; a `DeviceError` where there is none."""
    if not torch.cuda.is_available():
        raise DeviceError(f"bench {what} measures a CUDA device, and there is none here")
    return torch.device("cuda")


def measure(layer: nn.Module, x: Tensor, *, memory: Tensor | None = None, repeats: int = 30) -> Cost:
    """Cost of `layer(x, memory=memory)` and its backward under bfloat16 autocast."""
    cotangent = torch.randn_like(x, dtype=torch.bfloat16)

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = layer(x, memory=memory)
        y.backward(cotangent)

    def clear() -> None:
        x.grad = None
        layer.zero_grad(set_to_none=True)

    for _ in range(5):
        step()
        clear()
    saved, peak = _memory(layer, x, memory, cotangent)
    clear()
    return Cost(_median_ms(step, clear, repeats), graph_ms(step, clear=clear, repeats=repeats), saved, peak)


def _median_ms(step: Callable[[], object], clear: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        clear()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in times)


def graph_ms(
    step: Callable[[], object],
    *,
    clear: Callable[[], object] = lambda: None,
    between: Callable[[], object] = lambda: None,
    repeats: int = 30,
) -> float:
    """Median milliseconds of a step without its launches: captured once, replayed.

    `clear` runs, untimed, before a step that is launched; `between` before a replay.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            clear()
            step()
    torch.cuda.current_stream().wait_stream(side)
    clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    clear()
    return _median_ms(graph.replay, between, repeats)


def _memory(layer: nn.Module, x: Tensor, memory: Tensor | None, cotangent: Tensor) -> tuple[float, float]:
    """MiB kept for backward beyond parameters and input (distinct storages), and peak of forward + backward."""
    inputs = (x,) if memory is None else (x, memory)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*inputs, *layer.parameters())}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_cuda and storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cuda", dtype=torch.bfloat16):
        y = layer(x, memory=memory)
    saved = sum(storages.values())
    y.backward(cotangent)
    return saved / 2**20, (torch.cuda.max_memory_allocated() - before) / 2**20

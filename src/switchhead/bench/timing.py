"""Medians of times: of a layer's training step on a CUDA device, with its memory, and of steps of any kind by turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from switchhead.errors import DeviceError

WARM_UPS = 3  # as PyTorch advises before a capture: what is set up lazily, once for a stream, must not be captured


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
    return _median_ms(captured(step, clear=clear), between, repeats)


def captured(step: Callable[[], object], *, clear: Callable[[], object] = lambda: None) -> Callable[[], None]:
    """Replay of a step that is captured as a CUDA graph, on the stream that has warmed up for it.

    What the step reads and writes besides has to live as long. `clear` runs before each step and after the last.
    """
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            clear()
            step()
        clear()
        with torch.cuda.graph(graph, stream=side):
            step()
    torch.cuda.current_stream().wait_stream(side)
    clear()
    return graph.replay


def alternating_ms(
    steps: Sequence[Callable[[], object]],
    prepares: Sequence[Callable[[], object]],
    device: torch.device,
    *,
    repeats: int,
) -> list[float]:
    """Median milliseconds of each step; taken by turns, so that all meet the same clocks and temperatures.

    Before each step its own `prepares` runs, untimed, and a GPU has finished all work.
    """
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(repeats):
        for step, prepare, own in zip(steps, prepares, times, strict=True):
            prepare()
            own.append(_milliseconds(step, device))
    return [statistics.median(own) for own in times]


def _milliseconds(step: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        step()
        return (time.perf_counter() - begin) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


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

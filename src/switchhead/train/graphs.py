"""Forward and backward passes recorded as a CUDA graph: replaying it, the host launches all their kernels at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from switchhead.errors import TrainingError

# Runs a function; its result, and what does the same work again, on the same tensors.
Recorder = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]
WARM_UPS = 3  # as PyTorch advises before a capture: what is set up lazily, once for a stream, must not be recorded


class ReplayedPasses:
    """Passes that are recorded when inputs of the same shapes come a second time in a row, and replayed from then on.

    Other inputs run plainly: those of the first step, and those with a Transformer-XL memory that still grows. Either
    way outputs are the caller's to keep, and gradients are the parameters' `grad`, overwritten by the next call.

    Args:
        passes: from any nesting of tensors, and of values that recorded inputs have to equal, to any nesting of tensors
            without gradient. All that it reads besides has to stay where it is in memory, as parameters do.
        parameters: whose gradients it makes; they have none when it is called.
        record: how; `record_cuda_graph` on a device.
    """

    def __init__(self, passes: Callable[..., Any], parameters: Iterable[nn.Parameter], record: Recorder) -> None:
        self.passes, self.parameters, self.record = passes, list(parameters), record
        self._last_shapes: object = None
        self._recording: _Recording | None = None

    def __call__(self, *inputs: Any) -> Any:
        """What the passes return for these inputs."""
        leaves, structure = tree_flatten(inputs)
        shapes = (structure, [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
        repeated, self._last_shapes = shapes == self._last_shapes, shapes
        if self._recording is None or self._recording.shapes != shapes:
            if not repeated:
                return self.passes(*inputs)
            self._recording = None  # its memory serves the next one
            self._recording = self._record(inputs, shapes)
        return self._recording.replay(leaves)

    def _record(self, inputs: Sequence[Any], shapes: object) -> _Recording:
        held = tree_map_only(Tensor, torch.clone, inputs)

        def run() -> tuple[Any, list[Tensor | None]]:
            outputs = self.passes(*held)
            gradients = [parameter.grad for parameter in self.parameters]
            for parameter in self.parameters:  # the next run must not add to them
                parameter.grad = None
            return outputs, gradients

        (outputs, gradients), repeat = self.record(run)
        return _Recording(shapes, tree_flatten(held)[0], outputs, self.parameters, gradients, repeat)


@dataclass(frozen=True)
class _Recording:
    """Recorded passes with the tensors they read and write, which have to live as long."""

    shapes: object
    inputs: list[Any]
    outputs: Any
    parameters: list[nn.Parameter]
    gradients: list[Tensor | None]
    repeat: Callable[[], None]

    def replay(self, inputs: Sequence[Any]) -> Any:
        for held, new in zip(self.inputs, inputs, strict=True):
            if isinstance(held, Tensor):
                held.copy_(new)
        self.repeat()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        return tree_map_only(Tensor, torch.clone, self.outputs)


def record_cuda_graph(run: Callable[[], Any], device: torch.device) -> tuple[Any, Callable[[], None]]:
    """A `Recorder`. Replays draw the random numbers that plain runs would draw in their place; recording draws none.

    Raises:
        TrainingError: it does what a graph cannot hold, like waiting for the device.
    """
    with torch.cuda.device(device):
        random = torch.get_rng_state(), torch.cuda.get_rng_state(device)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run()
            try:
                with torch.cuda.graph(graph, stream=stream):
                    outputs = run()
            except RuntimeError as error:  # which leaves no random state that could be set
                raise _explained(error) from error
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.set_rng_state(random[0])
        torch.cuda.set_rng_state(random[1], device)
    return outputs, graph.replay


def graph_obstacle(device: torch.device) -> str | None:
    """Why training on a device cannot be recorded here; None where it can."""
    if device.type != "cuda":
        return f"training on {device.type} has no CUDA graphs"
    if dist.is_initialized():
        return "steps of torchrun's processes, which wait for each other, are not recorded"
    return None


def _explained(error: RuntimeError) -> Exception:
    """What went wrong in a capture: leaving it raises a second error, which hides the first."""
    first = error.__context__ or error
    if isinstance(first, torch.OutOfMemoryError):
        return first
    what = next(iter(str(first).splitlines()), type(first).__name__)
    return TrainingError(f"a training step cannot be recorded as a CUDA graph ({what}): set cuda_graphs to False")

"""What PyTorch does when a module runs: operations, numbers kept, bytes alive. Nothing is computed and no memory used.

The modules are the real ones, with tensors that have a shape but no contents. Operations are those of PyTorch code on a
CPU, of the experts at work alone; memory is that of a CPU too, or of a GPU, with its kernels and fused dropout.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from switchhead.accounting.cost import Cost
from switchhead.hf import SwitchHeadForCausalLM
from switchhead.hf.kinds import ATTENTION, FEED_FORWARD
from switchhead.ops.availability import as_on_a_gpu

if TYPE_CHECKING:
    from switchhead.hf import SwitchHeadConfig


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One forward and backward pass.

    Attributes:
        forward_flops: floating-point operations of matrix products, two for a multiply-accumulate, that PyTorch runs;
            those of this package's GPU kernels are not among them.
        backward_flops: the same of the backward pass.
        kept_bytes: memory of what the forward pass leaves for the backward pass, parameters not counted.
        peak_bytes: the most memory in use at a time, gradients included, parameters not.
    """

    forward_flops: int
    backward_flops: int
    kept_bytes: int
    peak_bytes: int


def trace_model(
    config: SwitchHeadConfig,
    *,
    chunk_length: int,
    batch_size: int = 1,
    dtype: torch.dtype = torch.float32,
    gpu: bool = False,
) -> Trace:
    """A training step of the language model on `[batch_size, chunk_length]` tokens, behind a full memory.

    Args:
        config: the model.
        chunk_length: tokens of a sequence.
        batch_size: sequences.
        dtype: float32, or one that autocast computes in.
        gpu: trace what runs on a CUDA device, whose kernels count as one operation each, instead of a CPU.
    """
    autocast = nullcontext() if dtype == torch.float32 else torch.autocast("cpu", dtype)
    with _without_contents(lambda: SwitchHeadForCausalLM(config), gpu=gpu) as model, ExitStack() as stack:
        if gpu:
            stack.enter_context(as_on_a_gpu())
            stack.enter_context(_FusedDropout())
        kept = _Kept(model)
        with _LiveBytes() as live:
            with autocast, _flop_counter() as forward, kept:
                tokens = torch.zeros(batch_size, chunk_length, dtype=torch.long)
                memory = None
                if config.memory_length:
                    shape = (batch_size, config.memory_length, config.hidden_size)
                    memory = tuple(torch.zeros(shape) for _ in range(config.num_hidden_layers))
                loss = model(tokens, shift_labels=tokens, memory=memory).loss
            with _flop_counter() as backward:
                loss.backward()
    return Trace(
        forward_flops=forward.get_total_flops(),
        backward_flops=backward.get_total_flops(),
        kept_bytes=kept.bytes,
        peak_bytes=live.peak,
    )


def trace_attention(config: SwitchHeadConfig, chunk_length: int) -> Cost:
    """The forward pass of one attention layer on one sequence, behind a full memory."""

    def run(layer: nn.Module) -> Tensor:
        memory = None
        if config.memory_length:
            memory = torch.zeros(1, config.memory_length, config.hidden_size)
        return layer(torch.zeros(1, chunk_length, config.hidden_size, requires_grad=True), memory=memory)

    return _forward_cost(lambda: ATTENTION[config.attention].build(config), run)


def trace_feed_forward(config: SwitchHeadConfig, chunk_length: int) -> Cost:
    """The forward pass of one feed-forward layer on one sequence."""

    def run(layer: nn.Module) -> Tensor:
        return layer(torch.zeros(1, chunk_length, config.hidden_size, requires_grad=True))

    return _forward_cost(lambda: FEED_FORWARD[config.feed_forward].build(config), run)


def _forward_cost(build: Callable[[], nn.Module], run: Callable[[nn.Module], Tensor]) -> Cost:
    with _without_contents(build) as layer:
        kept = _Kept(layer)
        with _flop_counter() as forward, kept:
            run(layer)
    return Cost(macs=forward.get_total_flops() // 2, floats=kept.numbers)


@contextmanager
def _without_contents(build: Callable[[], nn.Module], *, gpu: bool = False) -> Iterator[nn.Module]:
    """A module whose tensors have no contents, like all that are made meanwhile."""
    with torch.device("meta"):
        module = build()
    for part in module.modules():
        if hasattr(part, "backend") and not gpu:
            part.backend = "grouped"  # pyright: ignore[reportArgumentType] (any module may have one)
    with FakeTensorMode():
        module._apply(lambda t: torch.empty(t.shape, dtype=t.dtype))
        if isinstance(module, SwitchHeadForCausalLM):
            module.tie_weights()  # what was one parameter has become two
        yield module


class _Kept(torch.autograd.graph.saved_tensors_hooks):
    """Notes what autograd saves, every storage once, apart from the parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(self._note, lambda tensor: tensor)
        self._seen = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
        self.numbers = self.bytes = 0

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self.bytes += storage.nbytes()
            self.numbers += storage.nbytes() // tensor.element_size()
        return tensor


class _FusedDropout(TorchFunctionMode):
    """Dropout as on a GPU: one operator, which keeps a byte a number where a CPU keeps factors."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None):
        if func is not F.dropout:
            return func(*args, **(kwargs or {}))
        given = inspect.signature(F.dropout).bind(*args, **(kwargs or {}))
        given.apply_defaults()
        x, p, training, _ = given.arguments.values()
        return torch.native_dropout(x, p, training)[0] if training and p > 0 else x


class _LiveBytes(TorchDispatchMode):
    """Memory of all tensors that operators have made and that still live, and the most of it so far."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, int] = {}
        self._total = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._track(leaf.untyped_storage())
        return result

    def _track(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = storage.nbytes()
        self._total += storage.nbytes()
        self.peak = max(self.peak, self._total)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self._total -= self._live.pop(key)


def _flop_counter() -> FlopCounterMode:
    """PyTorch's counter, which needs to be told of this package's operator and of fused attention on a CPU."""
    experts, attention = torch.ops.switchhead, torch.ops.aten
    formulas: dict[Any, Any] = {
        experts.grouped_moe_linear: lambda x, weight, gates, *_, **__: 2 * _size(gates) * _size(weight[2:]),
        experts.grouped_moe_linear_backward: lambda grad, x, weight, gates, *_, **__: (
            4 * _size(gates) * _size(weight[2:])
        ),
        # Queries with keys, and their weights with values. Backward computes the weights again and has four gradients.
        attention._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: (
            2 * _size(q[:3]) * k[2] * (q[3] + v[3])
        ),
        attention._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: (
            2 * _size(q[:3]) * k[2] * (3 * q[3] + 2 * v[3])
        ),
    }
    return FlopCounterMode(display=False, custom_mapping=formulas)


def _size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()

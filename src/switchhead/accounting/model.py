"""What a whole model costs: operations a token, and memory for training and for generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch

from switchhead.accounting.attention import key_value_numbers
from switchhead.accounting.cost import check_counting
from switchhead.accounting.parameters import count_parameters
from switchhead.accounting.trace import trace_model

if TYPE_CHECKING:
    from switchhead.hf import SwitchHeadConfig

Dtype = Literal["float32", "bfloat16", "float16"]
Device = Literal["cuda", "cpu"]


@dataclass(frozen=True, kw_only=True)
class ModelResources:
    """Cost of a training step, and of the cache of generation. Parameters, gradients and optimizer are float32.

    Attributes:
        chunk_length: tokens of a sequence.
        batch_size: sequences in the step.
        dtype: of the computation.
        device: whose memory it is.
        forward_flops: floating-point operations a token, two for a multiply-accumulate; matrix products only.
        backward_flops: the same of the backward pass.
        parameter_bytes: memory of the parameters.
        gradient_bytes: memory of their gradients.
        optimizer_bytes: memory of Adam's two averages.
        activation_bytes: memory of what the forward pass keeps for the backward pass, the whole batch.
        peak_bytes: the most memory at a time during forward and backward: parameters, optimizer, and what of
            activations, intermediate results and gradients lives at once.
        cache_bytes: memory of keys and values for each token of generation, all layers. A Transformer-XL keeps
            those of its last `memory_length` tokens.
    """

    chunk_length: int
    batch_size: int
    dtype: Dtype
    device: Device
    forward_flops: float
    backward_flops: float
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    peak_bytes: int
    cache_bytes: int


def model_resources(
    config: SwitchHeadConfig,
    *,
    chunk_length: int,
    batch_size: int = 1,
    dtype: Dtype = "float32",
    device: Device = "cuda",
) -> ModelResources:
    """Trace one training step of the model and add what needs no trace.

    Memory is that of uncompiled code: on a GPU of this package's kernels, where triton is installed, on a CPU of
    PyTorch's.

    Args:
        config: the model. With `memory_length` the step attends to a full memory.
        chunk_length: tokens of a sequence.
        batch_size: sequences in the step.
        dtype: `"float32"`, or `"bfloat16"` or `"float16"` for autocast over float32 parameters, as in `TrainingConfig`.
        device: `"cuda"` or `"cpu"`, whose memory is counted; none is needed.

    Raises:
        ValueError: an unknown dtype or device, a length or batch size below 1.
    """
    check_counting("executed", chunk_length)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1; got {batch_size}")
    if dtype not in get_args(Dtype):
        raise ValueError(f"unknown dtype {dtype!r}; choose one of {', '.join(get_args(Dtype))}")
    if device not in get_args(Device):
        raise ValueError(f"unknown device {device!r}; choose one of {', '.join(get_args(Device))}")
    compute = getattr(torch, dtype)
    shape = {"chunk_length": chunk_length, "batch_size": batch_size, "dtype": compute}
    trace = trace_model(config, **shape)
    memory = trace_model(config, **shape, gpu=True) if device == "cuda" else trace
    tokens, parameters = batch_size * chunk_length, 4 * count_parameters(config).total
    return ModelResources(
        chunk_length=chunk_length,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        forward_flops=trace.forward_flops / tokens,
        backward_flops=trace.backward_flops / tokens,
        parameter_bytes=parameters,
        gradient_bytes=parameters,
        optimizer_bytes=2 * parameters,
        activation_bytes=memory.kept_bytes,
        peak_bytes=3 * parameters + memory.peak_bytes,
        cache_bytes=key_value_numbers(config) * config.num_hidden_layers * compute.itemsize,
    )

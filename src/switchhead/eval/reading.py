"""How a causal language model, ours or another's, reads more tokens than it takes at once."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from switchhead.hf.compat import CACHE_NAME

# What a model goes on from: keys and values of what it has read, or hidden states (Transformer-XL's memory).
State = Cache | tuple[Tensor, ...] | None


def memory_length(model: PreTrainedModel) -> int:
    """Hidden states of earlier chunks that the model attends to (Transformer-XL); 0 for models without memory."""
    return getattr(model.config, "memory_length", 0)


def chunk_length(model: PreTrainedModel) -> int:
    """Tokens that the model reads at once, as many as in training.

    Raises:
        ValueError: its configuration does not say.
    """
    config = getattr(model.config, "text_config", model.config)
    for name in ("max_position_embeddings", "n_positions", "n_ctx"):
        if (length := getattr(config, name, None)) is not None:
            return length
    raise ValueError(f"the configuration of {type(model).__name__} names no context length: choose a chunk_length")


def context_length(model: PreTrainedModel, length: int | None = None) -> int | None:
    """Tokens before a token that can bear on it: `length` or the chunk length; None (any number) with memory.

    Raises:
        ValueError: `length` is more than the model has learned positions (GPT-2's table of them).
    """
    if memory_length(model):
        return None
    known = _learned_positions(model)
    if length is not None and known is not None and length > known:
        raise ValueError(f"chunk_length is {length}; {type(model).__name__} has learned {known} positions")
    return length or chunk_length(model)


def settings(model: PreTrainedModel, length: int | None = None) -> dict[str, int]:
    """What a score depends on: tokens read at once (`length`, or as in training), and hidden states before those."""
    memory = memory_length(model)
    return {"chunk_length": length or chunk_length(model), **({"memory_length": memory} if memory else {})}


def default_batch_tokens(model: PreTrainedModel) -> int:
    """Tokens to read side by side where nothing else is asked for: few enough that their scores take a gigabyte."""
    config = getattr(model.config, "text_config", model.config)
    affordable = 2**28 // getattr(config, "vocab_size", 1)
    return min(2048 if model.device.type == "cpu" else 16384, affordable)


def shareable_step(model: PreTrainedModel, length: int | None = None) -> int | None:
    """Numbers of tokens that several texts can have read once, by `read_beginnings`, are multiples of this; None: none.

    With memory, chunks begin where they would without sharing. Without, a coarse step lets more texts be read side by
    side. Not every model that keeps a recurrent state can go on from one with several tokens: none is asked to.
    """
    if memory_length(model):
        return length or chunk_length(model)
    if getattr(model, "_is_stateful", False) or CACHE_NAME not in inspect.signature(model.forward).parameters:
        return None
    layers = DynamicCache(config=model.config).layers
    return 32 if all(isinstance(layer, DynamicLayer) for layer in layers) else None


def read_beginnings(
    model: PreTrainedModel,
    inputs: Int[Tensor, "beginnings T"],
    rows: Int[Tensor, " rows"],
    *,
    length: int | None = None,
) -> State:
    """What `read` goes on from: text i begins with `inputs[rows[i]]`. T is a multiple of the step."""
    if memory_length(model):
        memory = None
        for _, chunk in _chunks(inputs, length or chunk_length(model)):
            memory = _forward(model, chunk, 1, memory=memory).memory
        return tuple(states[rows] for states in memory or ())
    cache = getattr(_forward(model, inputs, 1, use_cache=True), CACHE_NAME)
    cache.batch_select_indices(rows)
    return cache


def read(
    model: PreTrainedModel,
    inputs: Int[Tensor, "rows T"],
    *,
    keep: int,
    length: int | None = None,
    after: State = None,
) -> Float[Tensor, "rows keep vocab"]:
    """Scores of the token after each of the last `keep` inputs.

    A model with memory reads chunks of `length` tokens (default: its own) and carries its memory from one to the next,
    starting without, or from what `read_beginnings` returned. Others read all at once.
    """
    if not memory_length(model):
        cache = {} if after is None else {CACHE_NAME: after}
        return _forward(model, inputs, keep, use_cache=after is not None, **cache).logits
    first, kept, memory = inputs.shape[1] - keep, [], after
    for start, chunk in _chunks(inputs, length or chunk_length(model)):
        n_kept = start + chunk.shape[1] - max(first, start)
        output = _forward(model, chunk, max(n_kept, 1), memory=memory)
        memory = output.memory
        if n_kept > 0:
            kept.append(output.logits)
    return torch.cat(kept, dim=1)


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """The model in evaluation mode, without gradients; afterwards as it was."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _learned_positions(model: PreTrainedModel) -> int | None:
    """Beyond how many tokens a model cannot read at all; None where positions are computed."""
    table = any(
        isinstance(module, nn.Embedding) and (name.endswith("wpe") or "position" in name)
        for name, module in model.named_modules()
    )
    return chunk_length(model) if table else None


def _forward(model: PreTrainedModel, inputs: Tensor, keep: int, **options: Any) -> Any:
    """The output for the last `keep` inputs, of models that can be asked for less than all, and of others."""
    known = inspect.signature(model.forward).parameters
    if "use_cache" not in known:
        options.pop("use_cache", None)
    if "logits_to_keep" in known:
        return model(input_ids=inputs, logits_to_keep=keep, **options)
    output = model(input_ids=inputs, **options)
    output.logits = output.logits[:, -keep:]
    return output


def _chunks(inputs: Tensor, length: int) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, inputs.shape[1], length):
        yield start, inputs[:, start : start + length]

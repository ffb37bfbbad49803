"""How a causal language model, ours or another's, reads more tokens than it takes at once."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel


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
    """Tokens before a token that can bear on it: `length` or the chunk length; None (any number) with memory."""
    return None if memory_length(model) else length or chunk_length(model)


def read(
    model: PreTrainedModel, inputs: Int[Tensor, "rows T"], *, keep: int, length: int | None = None
) -> Float[Tensor, "rows keep vocab"]:
    """Scores of the token after each of the last `keep` inputs.

    A model with memory reads chunks of `length` tokens (default: its own) and carries its memory from one to the next,
    starting without. Others read all at once.
    """
    if not memory_length(model):
        return _logits(model, inputs, keep)
    first, kept, memory = inputs.shape[1] - keep, [], None
    for start, chunk in _chunks(inputs, length or chunk_length(model)):
        n_kept = start + chunk.shape[1] - max(first, start)
        output = model(input_ids=chunk, memory=memory, logits_to_keep=max(n_kept, 1))
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


def _logits(model: PreTrainedModel, inputs: Tensor, keep: int) -> Tensor:
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        return model(input_ids=inputs, logits_to_keep=keep).logits
    return model(input_ids=inputs).logits[:, -keep:]


def _chunks(inputs: Tensor, length: int) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, inputs.shape[1], length):
        yield start, inputs[:, start : start + length]

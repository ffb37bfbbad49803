"""Text from a language model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from switchhead.data import Vocabulary
from switchhead.eval.reading import memory_length


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    vocabulary: Vocabulary,
    prompt: str = "",
    *,
    max_new_tokens: int = 200,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> str:
    """Continue a prompt, token by token with cached keys and values.

    The model never reads further than it was trained to. Transformer-XL attends to its last `memory_length` tokens,
    however many there are, as do models with a sliding window; others read from the start of their context until that
    is full (`max_position_embeddings`), when its later half becomes the context of what follows.

    Args:
        model: in evaluation mode; any causal language model.
        vocabulary: the model's.
        prompt: text at the beginning of a document; may be empty, except for a vocabulary without a beginning token.
        max_new_tokens: fewer come when the model ends the document.
        temperature: divides the logits before sampling; 0 takes the likeliest token.
        top_k: sample from the likeliest k tokens only.
        seed: of the sampling.

    Returns:
        The continuation, without the prompt.

    Raises:
        ValueError: a setting out of its range, or nothing to continue.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    if not (temperature == 0 or 1e-6 <= temperature < float("inf")):  # beyond, scores leave the range of float32
        raise ValueError(f"temperature is {temperature}; it must be 0 (the likeliest token) or 1e-6 or more")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; it must be at least 1, or None")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed is {seed}; it must fit into 64 bits")
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": top_k or 0} if temperature else {"do_sample": False}
    )
    beginning = [] if vocabulary.beginning is None else [vocabulary.beginning]
    context = torch.tensor([[*beginning, *vocabulary.encode(prompt).tolist()]], device=model.device)
    if not context.numel():
        raise ValueError("the prompt is empty, and the vocabulary has no beginning token that could stand in for it")
    limit = _limit(model)
    continuation: list[int] = []
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []), _any_length():
        torch.manual_seed(seed)
        while len(continuation) < max_new_tokens:
            n_new = max_new_tokens - len(continuation)
            if limit is not None:
                if context.shape[1] >= limit:
                    context = context[:, -max(limit // 2, 1) :]
                n_new = min(n_new, max(limit - context.shape[1], 1))
            longer = model.generate(  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue] (a protocol too narrow)
                context,
                attention_mask=torch.ones_like(context),
                max_new_tokens=n_new,
                eos_token_id=vocabulary.beginning,
                pad_token_id=vocabulary.beginning,
                **sampling,
            )
            continuation += longer[0, context.shape[1] :].tolist()
            context = longer
            if continuation[-1] == vocabulary.beginning:
                break
    return vocabulary.decode(continuation)


def _limit(model: PreTrainedModel) -> int | None:
    """Tokens that the context may have; None where the model forgets by itself, or does not say."""
    length = getattr(model.config, "max_position_embeddings", None)
    if length is None or getattr(model.config, "sliding_window", None):
        return None
    return memory_length(model) + length


@contextmanager
def _any_length() -> Iterator[None]:
    """Without transformers' reminder about texts longer than one chunk, which Transformer-XL is made for."""
    logger = logging.getLogger("transformers.generation.stopping_criteria")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

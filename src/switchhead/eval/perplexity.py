"""Perplexity and bits per byte of text, every token scored exactly once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from switchhead.data import Tokens, Vocabulary, load_tokens
from switchhead.hf import SwitchHeadForCausalLM

IGNORED = -100  # target that cross_entropy leaves out


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Score of a text.

    Attributes:
        loss: nats per token.
        tokens: tokens scored: all but the first, which is a beginning token and follows nothing. Those between
            documents count.
        bytes: UTF-8 bytes of the text.
    """

    loss: float
    tokens: int
    bytes: int

    @property
    def perplexity(self) -> float:
        """Exponential of the loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf  # math.exp raises where a float ends

    @property
    def bits_per_byte(self) -> float:
        """The whole text's loss in bits over its length in bytes, whatever the tokens are."""
        return self.loss * self.tokens / math.log(2) / self.bytes


def evaluate(
    model: SwitchHeadForCausalLM,
    vocabulary: Vocabulary,
    data: str,
    *,
    chunk_length: int | None = None,
    batch_size: int | None = None,
) -> Evaluation:
    """Score a text; see `score_tokens`.

    Args:
        model: scored as it is, in evaluation mode.
        vocabulary: the model's.
        data: a source, as `switchhead.data.read_documents` takes it.
        chunk_length: tokens the model reads at once; default: what it was trained with.
        batch_size: default: 1 for models with memory, which is exact; 32 for others, where it changes nothing.

    Raises:
        DataError: the source cannot be read.
        ValueError: `chunk_length` or `batch_size` below 1.
    """
    if batch_size is None:
        batch_size = 1 if model.config.memory_length else 32
    if chunk_length is None:
        chunk_length = model.config.max_position_embeddings
    for name, value in (("chunk_length", chunk_length), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    tokens = load_tokens(data, vocabulary)
    return score_tokens(model, vocabulary, tokens, chunk_length=chunk_length, batch_size=batch_size)


@torch.no_grad()
def score_tokens(
    model: SwitchHeadForCausalLM, vocabulary: Vocabulary, tokens: Tokens, *, chunk_length: int, batch_size: int
) -> Evaluation:
    """Score every token but the first by those before it, under the autocast that is active.

    A model with memory reads the text from beginning to end in chunks and carries its memory; with `batch_size` > 1
    the text is cut into that many lanes (fewer when it is short), each of which starts without memory. A model without
    reads windows that do not overlap, `batch_size` at a time. The last, shorter chunk is scored like the others.

    Args:
        tokens: at least two, the first of them a beginning token.
    """
    n_scored = len(tokens) - 1
    if model.config.memory_length:
        # A lane of few chunks would spend most of them without a full memory.
        n_rows = max(1, min(batch_size, n_scored // (16 * chunk_length)))
        groups = [_rows(tokens, n_rows)]
    else:
        groups = _rows(tokens, math.ceil(n_scored / chunk_length)).split(batch_size, dim=1)
    was_training = model.training
    model.eval()
    total = sum(_loss_of_rows(model, group, chunk_length) for group in groups)
    model.train(was_training)
    return Evaluation(loss=total / n_scored, tokens=n_scored, bytes=vocabulary.count_bytes(tokens))


def _rows(tokens: Tokens, n_rows: int) -> Tensor:
    """Inputs and targets as `n_rows` consecutive pieces of one length, padded at the end; `[2, n_rows, length]`."""
    n_scored = len(tokens) - 1
    length = math.ceil(n_scored / n_rows)
    rows = torch.full((2, n_rows * length), IGNORED)
    rows[0] = 0  # a causal model lets no token see the padding behind it
    ids = torch.from_numpy(tokens.astype("int64"))
    rows[0, :n_scored], rows[1, :n_scored] = ids[:-1], ids[1:]
    return rows.view(2, n_rows, length)


def _loss_of_rows(model: SwitchHeadForCausalLM, rows: Tensor, chunk_length: int) -> float:
    total, memory = 0.0, None
    for inputs, targets in rows.to(model.device).split(chunk_length, dim=2):
        output = model(input_ids=inputs, memory=memory)
        memory = output.memory
        losses = F.cross_entropy(
            output.logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="none"
        )
        total += losses.double().sum().item()
    return total

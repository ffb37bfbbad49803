"""Perplexity and bits per byte of text, every token scored exactly once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from switchhead.data import TokenArray, Vocabulary, load_tokens
from switchhead.data.vocabulary import documents_of
from switchhead.eval import reading
from switchhead.eval.progress import tracked
from switchhead.eval.reading import context_length, default_batch_tokens, evaluating, memory_length
from switchhead.eval.results import standard_error

IGNORED = -100  # target that cross_entropy leaves out


class Ranks(Protocol):
    """Processes that score a text together, seen from one of them."""

    def share(self, rows: int) -> range:
        """The rows of a batch that this process takes; those of all are the batch."""
        ...

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over all processes, the same on each."""
        ...


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Score of a text.

    Attributes:
        loss: nats per token.
        standard_error: of the loss, from the spread between chunks (batch means: neighbouring tokens are not
            independent); None for a text of one chunk.
        tokens: tokens scored: all but the first, which follows nothing. Those between documents count.
        bytes: UTF-8 bytes of the text.
        characters: Unicode characters of the text; None where they were not counted.
        words: words and line ends of the text, as WikiText's word-level perplexity counts them; None where they were
            not counted.
        ends: of the chunks in the order of the text: how many tokens are scored up to the end of each.
        deviations: by how much each chunk moves the loss; see `switchhead.eval.results.standard_error`.
    """

    loss: float
    standard_error: float | None = None
    tokens: int
    bytes: int
    characters: int | None = None
    words: int | None = None
    ends: np.ndarray | None = field(default=None, compare=False, repr=False)
    deviations: np.ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def perplexity(self) -> float:
        """Exponential of the loss per token."""
        return _exp(self.loss)

    @property
    def word_perplexity(self) -> float | None:
        """Exponential of the whole text's loss over its number of words and line ends, whatever the tokens are."""
        return _exp(self.loss * self.tokens / self.words) if self.words else None

    @property
    def bits_per_character(self) -> float | None:
        """The whole text's loss in bits over its number of Unicode characters."""
        return self.loss * self.tokens / math.log(2) / self.characters if self.characters else None

    @property
    def bits_per_byte(self) -> float:
        """The whole text's loss in bits over its length in bytes, whatever the tokens are."""
        return self.loss * self.tokens / math.log(2) / self.bytes


def evaluate(
    model: PreTrainedModel,
    vocabulary: Vocabulary,
    data: str,
    *,
    chunk_length: int | None = None,
    stride: int | None = None,
    batch_size: int | None = None,
) -> Evaluation:
    """Score a text; see `score_tokens`.

    Args:
        model: scored as it is, in evaluation mode; any causal language model.
        vocabulary: the model's.
        data: a source, as `switchhead.data.read_documents` takes it, or a prepared directory.
        chunk_length: tokens the model reads at once; default: what it was trained with.
        stride: tokens from one window to the next; default: `chunk_length`.
        batch_size: see `default_batch_size`.

    Raises:
        DataError: the source cannot be read.
        ValueError: a setting out of its range.
    """
    chunk_length = reading.chunk_length(model) if chunk_length is None else chunk_length
    batch_size = default_batch_size(model, chunk_length) if batch_size is None else batch_size
    text = load_tokens(data, vocabulary)
    return score_text(model, vocabulary, text, chunk_length=chunk_length, stride=stride, batch_size=batch_size)


def default_batch_size(model: PreTrainedModel, chunk_length: int) -> int:
    """1 for models with memory, which is exact; for others as many as are affordable, where it changes nothing."""
    return 1 if memory_length(model) else max(1, default_batch_tokens(model) // max(chunk_length, 1))


def count_lanes(n_scored: int, chunk_length: int, batch_size: int) -> int:
    """Lanes that a text is cut into: a lane of few chunks would spend most of them without a full memory."""
    return max(1, min(batch_size, n_scored // (16 * chunk_length)))


def score_text(model: PreTrainedModel, vocabulary: Vocabulary, tokens: TokenArray, **options: Any) -> Evaluation:
    """Score as `score_tokens` does, with the same options, and count the words and characters too."""
    score = score_tokens(model, vocabulary, tokens, **options)
    texts = [vocabulary.decode(part.tolist()) for part in documents_of(tokens[:], vocabulary.beginning)]
    words = sum(len(text.split()) + text.count("\n") for text in texts)
    return replace(score, characters=sum(map(len, texts)), words=words)


def score_tokens(
    model: PreTrainedModel,
    vocabulary: Vocabulary,
    tokens: TokenArray,
    *,
    chunk_length: int,
    batch_size: int,
    stride: int | None = None,
    ranks: Ranks | None = None,
    report: Callable[[float], None] | None = None,
) -> Evaluation:
    """Score every token but the first by those before it, under the autocast that is active.

    A model with memory reads the text from beginning to end in chunks and carries its memory; with `batch_size` > 1
    the text is cut into that many lanes (fewer when it is short), each of which starts without memory. A model without
    reads windows, `batch_size` at a time; with a `stride` below `chunk_length` they overlap, and all but the first
    score their last `stride` tokens only. The last, shorter chunk is scored like the others.

    Args:
        model: any causal language model; the same on all ranks, or its shards.
        vocabulary: counts bytes and words.
        tokens: at least two, the first of them a beginning token where the vocabulary has one.
        chunk_length: tokens read at once.
        batch_size: lanes, or windows read side by side; by all ranks together.
        stride: tokens from one window to the next; default: `chunk_length`.
        ranks: processes that score the text together, each its share of every batch; all have to ask, and each gets the
            score of the whole text. More of them change it only as far as smaller batches are rounded differently.
        report: told after each batch what share of the tokens is scored, up to 1.

    Raises:
        ValueError: a setting out of its range, or too few tokens.
    """
    stride = chunk_length if stride is None else stride
    _check(model, tokens, chunk_length=chunk_length, stride=stride, batch_size=batch_size)
    n_scored = len(tokens) - 1
    if memory_length(model):
        batches = _lanes(tokens, chunk_length, batch_size)
    else:
        batches = _windows(tokens, chunk_length, stride, batch_size)
    with evaluating(model):
        scored = _score(model, batches, ranks)
        scored = tracked(scored, total=n_scored, size=lambda part: int(part[2].sum()), unit="tokens", report=report)
        starts, sums, counts = (np.concatenate(parts) for parts in zip(*scored, strict=True))
    if ranks is not None:
        sums = np.array(ranks.sum(sums.tolist()))
    starts, sums, counts = starts[counts > 0], sums[counts > 0], counts[counts > 0]
    assert counts.sum() == n_scored
    loss = sums.sum() / n_scored
    in_order = np.argsort(starts)  # lanes are read side by side
    deviations = ((sums - counts * loss) / n_scored)[in_order]
    return Evaluation(
        loss=float(loss),
        standard_error=standard_error([deviations]),
        tokens=n_scored,
        bytes=vocabulary.count_bytes(tokens[:]),
        ends=counts[in_order].cumsum(),
        deviations=deviations,
    )


def _check(model: PreTrainedModel, tokens: TokenArray, *, chunk_length: int, stride: int, batch_size: int) -> None:
    for name, value in (("chunk_length", chunk_length), ("stride", stride), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if stride > chunk_length:
        raise ValueError(f"stride is {stride}; it must be at most chunk_length={chunk_length}, or tokens are left out")
    if stride < chunk_length and memory_length(model):
        raise ValueError(f"stride is {stride}, but a model with memory sees what is before a chunk: leave it out")
    context_length(model, chunk_length)
    if len(tokens) < 2:
        raise ValueError(f"{len(tokens)} tokens: nothing to score, every token but the first is")


# Batch by batch: where the chunks of its rows start, their inputs, and their targets.
_Batches = Iterator[tuple[np.ndarray, Int[Tensor, "rows T"], Int[Tensor, "rows T"]]]


def _lanes(tokens: TokenArray, chunk_length: int, batch_size: int) -> _Batches:
    n_scored = len(tokens) - 1
    n_lanes = count_lanes(n_scored, chunk_length, batch_size)
    lane_length = math.ceil(n_scored / n_lanes)
    ends = np.minimum(np.arange(1, n_lanes + 1) * lane_length, n_scored)
    for offset in range(0, lane_length, chunk_length):
        starts = np.arange(n_lanes) * lane_length + offset
        yield starts, *_pieces(tokens, starts, ends, min(chunk_length, lane_length - offset))


def _windows(tokens: TokenArray, chunk_length: int, stride: int, batch_size: int) -> _Batches:
    n_scored = len(tokens) - 1
    n_windows = 1 + math.ceil(max(0, n_scored - chunk_length) / stride)
    for first in range(0, n_windows, batch_size):
        starts = np.arange(first, min(first + batch_size, n_windows)) * stride
        length = min(chunk_length, n_scored - starts[0])
        inputs, targets = _pieces(tokens, starts, np.full_like(starts, n_scored), length)
        targets[(starts > 0).nonzero()[0], : chunk_length - stride] = IGNORED  # the window before has scored them
        yield starts, inputs, targets


def _pieces(tokens: TokenArray, starts: np.ndarray, ends: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
    """Inputs, and the targets that follow them, of pieces `[start, start + length)`; beyond their ends none are scored.

    A causal model lets no token see what is behind it, so that inputs there may be any.
    """
    positions = starts[:, None] + np.arange(length)  # [pieces, length]
    beyond = positions >= ends[:, None]
    positions = np.where(beyond, 0, positions)
    inputs, targets = (torch.from_numpy(tokens[at].astype(np.int64)) for at in (positions, positions + 1))
    return inputs, targets.masked_fill(torch.from_numpy(beyond), IGNORED)


def _score(
    model: PreTrainedModel, batches: _Batches, ranks: Ranks | None
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Batch by batch: where chunks start, their nats (0 for those of other ranks), their numbers of scored tokens.

    A sharded model needs all ranks in each forward pass: one without rows reads the first, which does not count.
    """
    state = {}
    for starts, inputs, targets in batches:
        share = range(len(starts)) if ranks is None else ranks.share(len(starts))
        own = slice(share.start, share.stop) if share else slice(1)
        output = model(input_ids=inputs[own].to(model.device), **state)
        if memory_length(model):
            state = {"memory": output.memory}
        sums = np.zeros(len(starts))
        if share:
            sums[own] = _sums(output.logits, targets[own])
        yield starts, sums, (targets != IGNORED).sum(dim=1).numpy()


def _sums(logits: Float[Tensor, "rows T vocab"], targets: Int[Tensor, "rows T"]) -> np.ndarray:
    """Nats of every row."""
    targets = targets.to(logits.device)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view_as(targets).double().sum(dim=1).cpu().numpy()


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf  # math.exp raises where a float ends

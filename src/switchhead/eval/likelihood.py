"""Log-likelihoods of continuations: what every task is scored by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise, takewhile
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from switchhead.data import Vocabulary
from switchhead.eval.progress import tracked
from switchhead.eval.reading import (
    State,
    context_length,
    default_batch_tokens,
    evaluating,
    read,
    read_beginnings,
    shareable_step,
)


class Request(NamedTuple):
    """What is scored: the tokens of `continuation`, given at least one of `context`."""

    context: Sequence[int]
    continuation: Sequence[int]


class Likelihood(NamedTuple):
    """Score of a continuation.

    Attributes:
        log_likelihood: nats, the sum over its tokens.
        greedy: whether each of its tokens is the likeliest one, the tokens before it given.
        cut: tokens on the left that its last token was scored without, to fit the model.
    """

    log_likelihood: float
    greedy: bool
    cut: int


def encode_request(vocabulary: Vocabulary, context: str, continuation: str) -> Request:
    """Tokens of a text, behind the beginning token, and where in them the continuation starts.

    The whole text is tokenised at once. Spaces at the end of the context belong to the continuation, and so does a
    token across the border. Without context and beginning token (Enwik8's bytes) the first token is context: nothing
    comes before it that could predict it.

    Raises:
        ValueError: nothing remains to be scored.
    """
    before = context.rstrip()
    tokens = vocabulary.encode(context + continuation).tolist()
    head = vocabulary.encode(before).tolist() if before else []
    border = _n_common(head, tokens)
    if vocabulary.beginning is not None:
        tokens, border = [vocabulary.beginning, *tokens], border + 1
    border = max(border, 1)
    if border >= len(tokens):
        raise ValueError(f"{continuation!r} tokenises to nothing that could be scored")
    return Request(tokens[:border], tokens[border:])


def score_continuations(
    model: PreTrainedModel,
    requests: Sequence[Request],
    *,
    batch_size: int | None = None,
    chunk_length: int | None = None,
) -> list[Likelihood]:
    """Likelihoods of continuations, in the order of the requests.

    Texts of like length are read together. A text that is the beginning of another (but for its last token, which is
    only predicted) is not read on its own: two sentences that differ in their last token cost one. A context that
    several continuations share is read once, up to a multiple of 32 tokens (of whole chunks, with memory).

    Args:
        model: any causal language model; scored in evaluation mode, under the autocast that is active.
        requests: from `encode_request`.
        batch_size: texts read side by side; default: see `default_batch_tokens`.
        chunk_length: tokens read at once; default: as in training. With memory, texts of any length are read in
            chunks. Without, `chunk_length` tokens are read at most, the others cut off on the left; what does not
            fit of a continuation that is longer itself is scored by half a chunk, after half a chunk.

    Raises:
        ValueError: a setting below 1.
    """
    for name, value in (("batch_size", batch_size), ("chunk_length", chunk_length)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    rows, cuts = _rows(requests, context_length(model, chunk_length))
    if step := shareable_step(model, chunk_length):
        _share(rows, step)
    totals, greedy = np.zeros(len(requests)), np.ones(len(requests), dtype=bool)
    with evaluating(model):
        batches = _batches(rows, batch_size, default_batch_tokens(model))
        for batch in tracked(batches, total=len(rows), size=len, unit="texts"):
            owner, values, matches = _score_batch(model, batch, chunk_length)
            np.add.at(totals, owner, values)
            np.logical_and.at(greedy, owner, matches)
    return [Likelihood(*score) for score in zip(totals.tolist(), greedy.tolist(), cuts, strict=True)]


@dataclass
class _Row:
    """Inputs to be read, and the targets `(request, first position, tokens)` that they predict.

    The first `shared` inputs, before any such position, begin other rows too.
    """

    inputs: tuple[int, ...]
    targets: list[tuple[int, int, Sequence[int]]]
    shared: int = 0

    @property
    def beginning(self) -> tuple[int, ...]:
        return self.inputs[: self.shared]


def _rows(requests: Sequence[Request], limit: int | None) -> tuple[list[_Row], list[int]]:
    """What must be read for the requests, each input once; and how many tokens each request lost."""
    by_inputs: dict[tuple[int, ...], _Row] = {}
    cuts = []
    for number, request in enumerate(requests):
        length = len(request.context) + len(request.continuation) - 1
        for inputs, first, tokens in _pieces(request, length if limit is None else limit):
            row = by_inputs.setdefault(inputs, _Row(inputs, []))
            row.targets.append((number, first, tokens))
        cuts.append(0 if limit is None else max(0, length - limit))
    return _without_beginnings_of_others(by_inputs), cuts


def _pieces(request: Request, limit: int) -> Iterator[tuple[tuple[int, ...], int, tuple[int, ...]]]:
    """Inputs of at most `limit` tokens, the first position whose prediction is needed, and the tokens predicted."""
    tokens = (*request.context, *request.continuation)
    position, room = len(request.context), limit
    while position < len(tokens):
        stop = min(len(tokens), position + room)
        start = max(0, stop - 1 - limit)
        yield tokens[start : stop - 1], position - 1 - start, tokens[position:stop]
        position, room = stop, max(1, limit // 2)


def _without_beginnings_of_others(by_inputs: dict[tuple[int, ...], _Row]) -> list[_Row]:
    """Rows of which none is the beginning of another, whose targets it hands on. In order, it is right before one."""
    rows: list[_Row] = []
    for inputs in sorted(by_inputs, reverse=True):
        if rows and rows[-1].inputs[: len(inputs)] == inputs:
            rows[-1].targets += by_inputs[inputs].targets
        else:
            rows.append(by_inputs[inputs])
    return rows


def _share(rows: list[_Row], step: int) -> None:
    """Find what rows share with a neighbour; they are in order, so that no other row has more in common with them."""
    common = [0, *(_n_common(row.inputs, other.inputs) for row, other in pairwise(rows)), 0]
    for row, either_side in zip(rows, pairwise(common), strict=True):
        first_scored = min(first for _, first, _ in row.targets)
        row.shared = min(first_scored, max(either_side)) // step * step


def _n_common(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _batches(rows: list[_Row], batch_size: int | None, batch_tokens: int) -> Iterator[list[_Row]]:
    """Rows that share equally many inputs, those that share the same ones side by side, longest first."""
    longest: dict[tuple[int, ...], int] = {}
    for row in rows:
        longest[row.beginning] = max(len(row.inputs), longest.get(row.beginning, 0))

    def order(row: _Row) -> tuple[int, int, tuple[int, ...]]:
        return row.shared, longest[row.beginning] if row.shared else len(row.inputs), row.beginning

    for shared, alike in groupby(sorted(rows, key=order, reverse=True), key=lambda row: row.shared):
        rows = list(alike)
        while rows:
            length = order(rows[0])[1]
            # What is shared costs memory (keys and values) but no time.
            size = batch_size or max(1, min(batch_tokens // (length - shared), 4 * batch_tokens // length))
            whole = size
            while shared and 0 < whole < len(rows) and rows[whole].beginning == rows[whole - 1].beginning:
                whole -= 1
            size = whole or size
            yield rows[:size]
            rows = rows[size:]


def _score_batch(
    model: PreTrainedModel, batch: list[_Row], chunk_length: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For every target token: its request, its log-likelihood, and whether it is the likeliest token."""
    shared = batch[0].shared
    after = _read_shared(model, batch, chunk_length) if shared else None
    lengths = np.array([len(row.inputs) - shared for row in batch])
    length = lengths.max()
    inputs = np.zeros((len(batch), length), dtype=np.int64)  # padded on the right, where nothing looks
    inputs[np.arange(length) < lengths[:, None]] = _flat(row.inputs[shared:] for row in batch)
    targets = [
        (number, owner, first - shared, tokens)
        for number, row in enumerate(batch)
        for owner, first, tokens in row.targets
    ]
    keep = int(length) - min(first for _, _, first, _ in targets)
    logits = read(model, torch.from_numpy(inputs).to(model.device), keep=keep, length=chunk_length, after=after)
    counts = np.array([len(tokens) for *_, tokens in targets])
    within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)  # place of a token in its target
    rows, owner, first = (np.repeat([target[i] for target in targets], counts) for i in range(3))
    values, matches = _select(logits, rows, first + within - (length - keep), _flat(tokens for *_, tokens in targets))
    return owner, values, matches


def _read_shared(model: PreTrainedModel, batch: list[_Row], chunk_length: int | None) -> State:
    numbers = {beginning: i for i, beginning in enumerate(dict.fromkeys(row.beginning for row in batch))}
    rows = torch.tensor([numbers[row.beginning] for row in batch], device=model.device)
    return read_beginnings(model, torch.tensor(list(numbers), device=model.device), rows, length=chunk_length)


def _flat(sequences: Iterable[Sequence[int]]) -> np.ndarray:
    return np.fromiter(chain.from_iterable(sequences), dtype=np.int64)


def _select(logits: Tensor, *index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log-likelihoods of tokens at `(row, position, token)`, and whether each is the likeliest there."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    rows, positions, tokens = (torch.from_numpy(i).to(logits.device) for i in index)
    values = logits[rows, positions, tokens] - logits.logsumexp(dim=-1)[rows, positions]
    matches = logits.argmax(dim=-1)[rows, positions] == tokens
    return values.double().cpu().numpy(), matches.cpu().numpy()

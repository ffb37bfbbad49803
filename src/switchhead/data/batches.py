"""Batches of a token array: functions of the batch's number, so that the position in the data is one integer.

Both kinds read the text as a circle: what follows the last token is the first, a beginning token. A rank of several
takes its rows of a batch; all ranks together read what one alone would.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from switchhead.data.tokens import TokenArray
from switchhead.errors import DataError


@dataclass(frozen=True)
class Batch:
    """Rows of one training step, on the CPU.

    Attributes:
        inputs: tokens, `[rows, chunk]`.
        targets: the tokens that follow them, `[rows, chunk]`.
        position_ids: place of each token in its document's part of the row, `[rows, chunk]`; None where documents are
            not masked from each other.
    """

    inputs: Int64[Tensor, "rows chunk"]
    targets: Int64[Tensor, "rows chunk"]
    position_ids: Int64[Tensor, "rows chunk"] | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    def rows(self, rows: slice) -> Batch:
        """Some of the rows."""
        positions = None if self.position_ids is None else self.position_ids[rows]
        return replace(self, inputs=self.inputs[rows], targets=self.targets[rows], position_ids=positions)


class Batches(Protocol):
    """Inputs and targets (the tokens that follow them) of every training step."""

    @property
    def batch_size(self) -> int:
        """Rows of a batch."""
        ...

    def batch(self, number: int, rows: range | None = None) -> Batch:
        """Batch `number` (0, 1, ...), or these rows of it; the same on every call."""
        ...


@dataclass(frozen=True)
class LaneBatches:
    """Contiguous lanes, for models with memory: lane i of batch n + 1 continues lane i of batch n.

    Lanes start evenly spread over the text; each reads on through the others' parts and around the end for as long
    as training lasts, so that no memory ever goes with a text that it does not precede.
    """

    tokens: TokenArray
    batch_size: int
    chunk_length: int

    def __post_init__(self) -> None:
        require_one_chunk(self.tokens, self.chunk_length)

    def batch(self, number: int, rows: range | None = None) -> Batch:
        """Batch `number`: chunk `number` of every lane."""
        lanes = np.arange(self.batch_size)[_as_slice(rows)] * len(self.tokens) // self.batch_size
        return _chunks_at(self.tokens, lanes + number * self.chunk_length, self.chunk_length)


@dataclass(frozen=True)
class WindowBatches:
    """Shuffled windows that do not overlap, for models without memory.

    Every pass over the text cuts it at another phase and shuffles the windows anew, both drawn from `seed` and the
    number of the pass. With `beginning`, the token before every document, positions restart at each one.
    """

    tokens: TokenArray
    batch_size: int
    chunk_length: int
    seed: int
    beginning: int | None = None

    def __post_init__(self) -> None:
        require_one_chunk(self.tokens, self.chunk_length)

    def batch(self, number: int, rows: range | None = None) -> Batch:
        """Batch `number`: windows `number * batch_size` and following of the shuffled passes."""
        n_windows = len(self.tokens) // self.chunk_length
        windows = range(number * self.batch_size, (number + 1) * self.batch_size)[_as_slice(rows)]
        starts = [
            _window_starts(self.seed, w // n_windows, n_windows, self.chunk_length)[w % n_windows] for w in windows
        ]
        batch = _chunks_at(self.tokens, np.array(starts, dtype=np.int64), self.chunk_length)
        return batch if self.beginning is None else replace(batch, position_ids=_positions(batch, self.beginning))


def require_one_chunk(tokens: TokenArray, chunk_length: int) -> None:
    """Raise a `DataError` unless the text has one chunk and the token after it."""
    if len(tokens) <= chunk_length:
        raise DataError(
            f"the training text has {len(tokens)} tokens, fewer than one chunk and its next token "
            f"(chunk_length + 1 = {chunk_length + 1}): use more text or a shorter chunk_length"
        )


def _as_slice(rows: range | None) -> slice:
    return slice(None) if rows is None else slice(rows.start, rows.stop, rows.step)


@lru_cache(maxsize=2)  # a batch touches the end of one pass and the start of the next
def _window_starts(seed: int, epoch: int, n_windows: int, chunk_length: int) -> np.ndarray:
    random = np.random.default_rng([seed, epoch])
    phase = random.integers(chunk_length)
    return phase + random.permutation(n_windows) * chunk_length


def _chunks_at(tokens: TokenArray, starts: np.ndarray, chunk_length: int) -> Batch:
    chunks = np.empty((len(starts), chunk_length + 1), dtype=np.int64)
    for row, start in enumerate(starts % len(tokens)):
        if start + chunk_length < len(tokens):
            chunks[row] = tokens[start : start + chunk_length + 1]
        else:  # around the end
            chunks[row] = tokens[(start + np.arange(chunk_length + 1)) % len(tokens)]
    both = torch.from_numpy(chunks)
    return Batch(both[:, :-1].contiguous(), both[:, 1:].contiguous())


def _positions(batch: Batch, beginning: int) -> Tensor:
    """Distance of every token from the last beginning token before it, or from the row's first."""
    places = torch.arange(batch.inputs.shape[1]).expand_as(batch.inputs)
    starts = torch.where(batch.inputs == beginning, places, 0)
    return places - starts.cummax(dim=1).values

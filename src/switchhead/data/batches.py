"""Batches of a token array: functions of the batch's number, so that the position in the data is one integer.

Both kinds read the text as a circle: what follows the last token is the first, a beginning token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from switchhead.data.vocabulary import Tokens
from switchhead.errors import DataError

Batch = tuple[Int64[Tensor, "batch chunk"], Int64[Tensor, "batch chunk"]]


class Batches(Protocol):
    """Inputs and targets (the tokens that follow them) of every training step."""

    def batch(self, number: int) -> Batch:
        """Batch `number` (0, 1, ...) on the CPU; the same on every call."""
        ...


@dataclass(frozen=True)
class LaneBatches:
    """Contiguous lanes, for models with memory: lane i of batch n + 1 continues lane i of batch n.

    Lanes start evenly spread over the text; each reads on through the others' parts and around the end for as long
    as training lasts, so that no memory ever goes with a text that it does not precede.
    """

    tokens: Tokens
    batch_size: int
    chunk_length: int

    def __post_init__(self) -> None:
        require_one_chunk(self.tokens, self.chunk_length)

    def batch(self, number: int) -> Batch:
        """Batch `number`: chunk `number` of every lane."""
        lanes = np.arange(self.batch_size) * len(self.tokens) // self.batch_size
        return _chunks_at(self.tokens, lanes + number * self.chunk_length, self.chunk_length)


@dataclass(frozen=True)
class WindowBatches:
    """Shuffled windows that do not overlap, for models without memory.

    Every pass over the text cuts it at another phase and shuffles the windows anew, both drawn from `seed` and the
    number of the pass.
    """

    tokens: Tokens
    batch_size: int
    chunk_length: int
    seed: int

    def __post_init__(self) -> None:
        require_one_chunk(self.tokens, self.chunk_length)

    def batch(self, number: int) -> Batch:
        """Batch `number`: windows `number * batch_size` and following of the shuffled passes."""
        n_windows = len(self.tokens) // self.chunk_length
        windows = range(number * self.batch_size, (number + 1) * self.batch_size)
        starts = [
            _window_starts(self.seed, w // n_windows, n_windows, self.chunk_length)[w % n_windows] for w in windows
        ]
        return _chunks_at(self.tokens, np.array(starts), self.chunk_length)


def require_one_chunk(tokens: Tokens, chunk_length: int) -> None:
    """Raise a `DataError` unless the text has one chunk and the token after it."""
    if len(tokens) <= chunk_length:
        raise DataError(
            f"the training text has {len(tokens)} tokens, fewer than one chunk and its next token "
            f"(chunk_length + 1 = {chunk_length + 1}): use more text or a shorter chunk_length"
        )


@lru_cache(maxsize=2)  # a batch touches the end of one pass and the start of the next
def _window_starts(seed: int, epoch: int, n_windows: int, chunk_length: int) -> np.ndarray:
    random = np.random.default_rng([seed, epoch])
    phase = random.integers(chunk_length)
    return phase + random.permutation(n_windows) * chunk_length


def _chunks_at(tokens: Tokens, starts: np.ndarray, chunk_length: int) -> Batch:
    positions = (starts[:, None] + np.arange(chunk_length + 1)) % len(tokens)  # [batch, chunk + 1]
    chunks = torch.from_numpy(tokens[positions].astype(np.int64))
    return chunks[:, :-1].contiguous(), chunks[:, 1:].contiguous()

"""A text as one array of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from switchhead.data.shards import ShardedTokens
from switchhead.data.vocabulary import Tokens, Vocabulary, dtype_of
from switchhead.errors import DataError


class TokenArray(Protocol):
    """Tokens in memory or in files: a numpy array, or what is read like one."""

    @property
    def dtype(self) -> np.dtype:
        """uint16 or uint32."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice | np.ndarray, /) -> Tokens:
        """The tokens of a slice, or at an array of positions (0 .. len - 1), in its shape."""
        ...


def join_documents(documents: Iterable[str], vocabulary: Vocabulary) -> Tokens:
    """Documents as one array, each behind a beginning token (if the vocabulary has one)."""
    beginning = beginning_of(vocabulary)
    return np.concatenate([part for text in documents for part in (beginning, vocabulary.encode(text))])


def split_tail(tokens: TokenArray, fraction: float, vocabulary: Vocabulary) -> tuple[TokenArray, Tokens]:
    """Training tokens, and the last `fraction` of the text (behind a beginning token) for validation.

    Raises:
        DataError: the text is too short for both parts to have a token to predict.
    """
    cut = len(tokens) - max(1, round(len(tokens) * fraction))
    if cut < 2:
        raise DataError(f"a text of {len(tokens)} tokens cannot be split for training and validation")
    head = tokens.part(slice(cut)) if isinstance(tokens, ShardedTokens) else tokens[:cut]
    return head, np.concatenate([beginning_of(vocabulary), tokens[cut:]])


def beginning_of(vocabulary: Vocabulary) -> Tokens:
    """The beginning token as an array: of one, or of none where the vocabulary has none."""
    values = [] if vocabulary.beginning is None else [vocabulary.beginning]
    return np.array(values, dtype=dtype_of(vocabulary))

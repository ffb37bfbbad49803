"""A text as one array of tokens."""

from __future__ import annotations

import numpy as np

from switchhead.data.sources import read_documents
from switchhead.data.vocabulary import Tokens, Vocabulary
from switchhead.errors import DataError


def load_tokens(spec: str, vocabulary: Vocabulary) -> Tokens:
    """The documents of a source one after the other, each behind a beginning token.

    Raises:
        DataError: see `read_documents`.
    """
    beginning = np.array([vocabulary.beginning], dtype=np.uint16)
    return np.concatenate([part for text in read_documents(spec) for part in (beginning, vocabulary.encode(text))])


def split_tail(tokens: Tokens, fraction: float, vocabulary: Vocabulary) -> tuple[Tokens, Tokens]:
    """Training tokens, and the last `fraction` of the text (behind a beginning token) for validation.

    Raises:
        DataError: the text is too short for both parts to have a token to predict.
    """
    cut = len(tokens) - max(1, round(len(tokens) * fraction))
    if cut < 2:
        raise DataError(f"a text of {len(tokens)} tokens cannot be split for training and validation")
    tail = np.concatenate([np.array([vocabulary.beginning], dtype=np.uint16), tokens[cut:]])
    return tokens[:cut], tail

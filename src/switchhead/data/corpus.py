"""What a model is trained on: two token arrays, their vocabulary, and what identifies them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from switchhead.data.tokens import TokenArray, load_tokens, split_tail
from switchhead.data.vocabulary import ByteVocabulary, Vocabulary


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Text for training and validation.

    Attributes:
        training: its tokens.
        validation: its tokens, the first of them a beginning token (if the vocabulary has one).
        vocabulary: of both.
        description: `training_tokens`, `validation_tokens`, and `sha256` of the tokens: what says, wherever the text
            lies, that it is this text.
    """

    training: TokenArray
    validation: TokenArray
    vocabulary: Vocabulary
    description: dict[str, Any]


def open_corpus(data: str, valid: str | None = None, *, validation_fraction: float) -> Corpus:
    """The text of a `--data` argument and, if there is one, of a `--valid` argument.

    Args:
        data: `text:FILE|GLOB` or `jsonl:GLOB#field`, read as bytes.
        valid: the same for validation.
        validation_fraction: tail of `data` that is held out where nothing else is given for validation.

    Raises:
        DataError: the text cannot be read or is too short.
    """
    vocabulary = ByteVocabulary()
    tokens = load_tokens(data, vocabulary)
    if valid is None:
        training, validation = split_tail(tokens, validation_fraction, vocabulary)
    else:
        training, validation = tokens, load_tokens(valid, vocabulary)
    digest = hashlib.sha256(training.tobytes())
    digest.update(validation.tobytes())
    description = {
        "training_tokens": len(training),
        "validation_tokens": len(validation),
        "sha256": digest.hexdigest(),
    }
    return Corpus(training=training, validation=validation, vocabulary=vocabulary, description=description)

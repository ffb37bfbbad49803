"""What a model is trained on and scored on: token arrays, their vocabulary, and what identifies them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from switchhead.data.prepared import Prepared, open_prepared
from switchhead.data.sources import FORMS, KINDS, read_documents, unknown_form
from switchhead.data.tokens import TokenArray, join_documents, split_tail
from switchhead.data.vocabulary import ByteVocabulary, Vocabulary
from switchhead.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Text for training and validation.

    Attributes:
        training: its tokens.
        validation: its tokens, the first of them a beginning token (if the vocabulary has one).
        vocabulary: of both.
        description: `training_tokens`, `validation_tokens`, and `sha256` of the tokens: what says, wherever the text
            lies, that it is this text. Of a prepared directory also `documents` (of the training split) and
            `tokenizer` (its hash).
    """

    training: TokenArray
    validation: TokenArray
    vocabulary: Vocabulary
    description: dict[str, Any]


def open_corpus(data: str, valid: str | None = None, *, validation_fraction: float, verify: bool = True) -> Corpus:
    """The text of a `--data` argument and, if there is one, of a `--valid` argument.

    Args:
        data: a directory made by `switchhead prepare`; or text as `read_documents` takes it, which is read as bytes.
        valid: the same for validation; default: the directory's validation split, if it has one.
        validation_fraction: tail of `data` that is held out where there is nothing else for validation.
        verify: compare the checksums of a directory's shards.

    Raises:
        DataError: the text cannot be read or is too short, a shard is damaged, or `valid` has another tokenizer.
        RunError: a directory's tokenizer cannot be read.
    """
    prepared = _prepared(data)
    if prepared is not None:
        return _open_prepared_corpus(prepared, valid, validation_fraction, verify)
    vocabulary = ByteVocabulary()
    tokens = join_documents(read_documents(data), vocabulary)
    if valid is None:
        training, validation = split_tail(tokens, validation_fraction, vocabulary)
    else:
        training, validation = tokens, load_tokens(valid, vocabulary)
    digest = hashlib.sha256(np.asarray(training).tobytes())
    digest.update(np.asarray(validation).tobytes())
    description = _describe(training, validation, digest.hexdigest())
    return Corpus(training=training, validation=validation, vocabulary=vocabulary, description=description)


def load_tokens(spec: str, vocabulary: Vocabulary, *, split: str = "validation") -> TokenArray:
    """Tokens to score.

    Args:
        spec: text as `read_documents` takes it, whose documents come one after the other, each behind a beginning
            token (if the vocabulary has one); or a directory made by `switchhead prepare`, DIR or DIR#SPLIT.
        vocabulary: of the model.
        split: of a directory whose `spec` names none.

    Raises:
        DataError: see `read_documents` and `Prepared.tokens`; or a directory's tokens are of another vocabulary.
        RunError: a directory's tokenizer cannot be read.
    """
    prepared = _prepared(spec)
    if prepared is None:
        return join_documents(read_documents(spec), vocabulary)
    if prepared.vocabulary.fingerprint != vocabulary.fingerprint:
        raise DataError(
            f"{prepared.path} was tokenized with another tokenizer than the model's: prepare the text with "
            "--tokenizer and the model's, or give it as text:FILE or jsonl:GLOB#field"
        )
    path, separator, named = spec.rpartition("#")
    return prepared.tokens(named if separator and Path(path).is_dir() else split)


def _open_prepared_corpus(prepared: Prepared, valid: str | None, validation_fraction: float, verify: bool) -> Corpus:
    vocabulary = prepared.vocabulary
    training: TokenArray = prepared.tokens("train", verify=verify)
    identities = [prepared.identity("train")]
    if valid is None and "validation" in prepared.splits:
        validation: TokenArray = prepared.tokens("validation", verify=verify)
        identities.append(prepared.identity("validation"))
    elif valid is None:
        training, validation = split_tail(training, validation_fraction, vocabulary)
    else:
        validation = load_tokens(valid, vocabulary)
        identities.append(hashlib.sha256(np.asarray(validation).tobytes()).hexdigest())
    description = {
        **_describe(training, validation, hashlib.sha256("".join(identities).encode()).hexdigest()),
        "documents": prepared.splits["train"]["documents"],
        "tokenizer": vocabulary.fingerprint,
    }
    return Corpus(training=training, validation=validation, vocabulary=vocabulary, description=description)


def _describe(training: TokenArray, validation: TokenArray, sha256: str) -> dict[str, Any]:
    return {"training_tokens": len(training), "validation_tokens": len(validation), "sha256": sha256}


def _prepared(spec: str) -> Prepared | None:
    """The directory of a `--data` argument; None where it names text."""
    path = spec.rpartition("#")[0]
    for directory in (spec, path):
        if directory and Path(directory).is_dir():
            return open_prepared(Path(directory))
    if spec.partition(":")[0] not in KINDS:
        raise unknown_form(spec, f"{FORMS}, or a directory made by `switchhead prepare`")
    return None

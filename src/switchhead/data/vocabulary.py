"""Text to token ids and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import UInt16, UInt32

from switchhead.data.files import flush_to_disk
from switchhead.errors import DataError, RunError

Tokens = UInt16[np.ndarray, " tokens"] | UInt32[np.ndarray, " tokens"]

FILE_NAME = "vocabulary.json"


class Vocabulary(Protocol):
    """What training, scoring and generation ask of a vocabulary."""

    @property
    def size(self) -> int:
        """Number of ids, the beginning token included."""
        ...

    @property
    def beginning(self) -> int | None:
        """Id of the token that stands before every document, so that its first real token has something to follow.

        None where the published experiment has none: Enwik8's 205 bytes.
        """
        ...

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all that decides the ids of a text."""
        ...

    def encode(self, text: str) -> Tokens:
        """Ids of a text, without the beginning token."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; beginning tokens give none, bytes that are not UTF-8 give U+FFFD."""
        ...

    def count_bytes(self, tokens: Tokens) -> int:
        """UTF-8 bytes of the text that the tokens stand for."""
        ...

    def count_words(self, tokens: Tokens) -> int:
        """Words of that text, separated by white space or the end of a document."""
        ...

    def save(self, directory: Path) -> None:
        """Write what `load_vocabulary` reads."""
        ...


class ByteVocabulary:
    """The 256 bytes of UTF-8 text and a beginning token."""

    size = 257
    beginning = 256

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all that decides the ids of a text."""
        return fingerprint_of(self._content())

    def encode(self, text: str) -> Tokens:
        """Ids of a text, without the beginning token."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; beginning tokens give none, bytes that are not UTF-8 give U+FFFD."""
        return bytes(i for i in ids if i != self.beginning).decode("utf-8", errors="replace")

    def count_bytes(self, tokens: Tokens) -> int:
        """UTF-8 bytes of the text that the tokens stand for."""
        return int(np.count_nonzero(tokens != self.beginning))

    def count_words(self, tokens: Tokens) -> int:
        """Words of that text, separated by white space or the end of a document."""
        return sum(len(self.decode(document.tolist()).split()) for document in documents_of(tokens, self.beginning))

    def save(self, directory: Path) -> None:
        """Write what `load_vocabulary` reads."""
        write_vocabulary(directory, self._content())

    def _content(self) -> dict[str, Any]:
        return {"format": 1, "kind": "bytes", "size": self.size, "beginning": self.beginning}


class ByteSubsetVocabulary:
    """The bytes that occur in one text, and no beginning token: the 205 of Enwik8.

    Args:
        values: the bytes, in the order of their ids.
    """

    beginning = None

    def __init__(self, values: bytes) -> None:
        self.values = values
        self._byte_of = np.frombuffer(values, dtype=np.uint8)
        self._id_of = np.full(256, len(values), dtype=np.uint16)
        self._id_of[self._byte_of] = np.arange(len(values), dtype=np.uint16)

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(self.values)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all that decides the ids of a text."""
        return fingerprint_of(self._content())

    def encode(self, text: str) -> Tokens:
        """Ids of a text.

        Raises:
            DataError: it has a byte that the vocabulary lacks.
        """
        return self.encode_bytes(text.encode("utf-8"))

    def encode_bytes(self, raw: bytes) -> Tokens:
        """Ids of bytes, which need not be UTF-8; see `encode`."""
        ids = self._id_of[np.frombuffer(raw, dtype=np.uint8)]
        if unknown := np.flatnonzero(ids == self.size)[:1].tolist():
            raise DataError(
                f"byte 0x{raw[unknown[0]]:02x} of this text (at {unknown[0]}) is not among the {self.size} bytes of "
                "the model's vocabulary: use text of the kind that it was trained on"
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; bytes that are not UTF-8 give U+FFFD."""
        return bytes(self.values[i] for i in ids).decode("utf-8", errors="replace")

    def count_bytes(self, tokens: Tokens) -> int:
        """Bytes of the text: as many as tokens."""
        return len(tokens)

    def count_words(self, tokens: Tokens) -> int:
        """Words of that text, separated by white space."""
        return len(self._byte_of[np.asarray(tokens)].tobytes().split())

    def save(self, directory: Path) -> None:
        """Write what `load_vocabulary` reads."""
        write_vocabulary(directory, self._content())

    def _content(self) -> dict[str, Any]:
        return {"format": 1, "kind": "byte subset", "size": self.size, "beginning": None, "bytes": list(self.values)}


def load_vocabulary(directory: Path, *, size: int | None = None) -> Vocabulary:
    """The vocabulary saved in a directory, for a model with `size` token ids if that is given.

    Raises:
        RunError: the file is missing or unreadable, of an unknown kind, or does not fit the model.
    """
    path = directory / FILE_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        kind, saved_size = content["kind"], content["size"]
    except OSError as error:
        raise RunError(f"cannot read vocabulary {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is not a vocabulary of this program") from error
    if kind not in ("bytes", "byte subset", "tokenizer"):
        raise RunError(
            f'{path} is a vocabulary of unknown kind {kind!r}; this version reads "bytes", "byte subset", "tokenizer"'
        )
    if size not in (None, saved_size):
        raise RunError(f"{path} has {saved_size} tokens, the model {size}: it belongs to another run")
    if kind == "bytes":
        return ByteVocabulary()
    if kind == "byte subset":
        values = content.get("bytes")
        if not isinstance(values, list) or len(set(values)) != len(values) or not set(values) <= set(range(256)):
            raise RunError(f"{path} is damaged: it does not list the bytes of its vocabulary")
        return ByteSubsetVocabulary(bytes(values))
    from switchhead.data.tokenizer import TokenizerVocabulary  # needs transformers, which bytes do not

    return TokenizerVocabulary.load(directory, content)


def dtype_of(vocabulary: Vocabulary) -> np.dtype:
    """The smallest dtype of tokens that holds every id: uint16 or uint32."""
    return np.dtype(np.uint16 if vocabulary.size <= 1 << 16 else np.uint32)


def documents_of(tokens: Tokens, beginning: int | None) -> Iterator[Tokens]:
    """The parts of a token array that start with a beginning token, and what stands before the first."""
    starts = np.flatnonzero(tokens == beginning) if beginning is not None else np.array([], dtype=int)
    yield from (part for part in np.split(tokens, starts) if len(part))


def fingerprint_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_vocabulary(directory: Path, content: Mapping[str, Any]) -> None:
    """Write `vocabulary.json`, whole or not at all, into a directory that is made if it is missing.

    It comes after any other file of a vocabulary, and when they are on the disk: where it is, all of them are.
    """
    directory.mkdir(exist_ok=True)
    temporary = directory / f"{FILE_NAME}.tmp"
    temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
    for path in directory.iterdir():
        flush_to_disk(path)
    temporary.rename(directory / FILE_NAME)
    flush_to_disk(directory)

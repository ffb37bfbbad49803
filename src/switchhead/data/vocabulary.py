"""Text to token ids and back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import UInt16

from switchhead.errors import RunError

Tokens = UInt16[np.ndarray, " tokens"]

FILE_NAME = "vocabulary.json"


class Vocabulary(Protocol):
    """What training, scoring and generation ask of a vocabulary."""

    @property
    def size(self) -> int:
        """Number of ids, the beginning token included."""
        ...

    @property
    def beginning(self) -> int:
        """Id of the token that stands before every document, so that its first real token has something to follow."""
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

    def save(self, directory: Path) -> None:
        """Write what `load_vocabulary` reads."""
        ...


class ByteVocabulary:
    """The 256 bytes of UTF-8 text and a beginning token."""

    size = 257
    beginning = 256

    def encode(self, text: str) -> Tokens:
        """Ids of a text, without the beginning token."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; beginning tokens give none, bytes that are not UTF-8 give U+FFFD."""
        return bytes(i for i in ids if i != self.beginning).decode("utf-8", errors="replace")

    def count_bytes(self, tokens: Tokens) -> int:
        """UTF-8 bytes of the text that the tokens stand for."""
        return int(np.count_nonzero(tokens != self.beginning))

    def save(self, directory: Path) -> None:
        """Write what `load_vocabulary` reads."""
        directory.mkdir(exist_ok=True)
        content = {"format": 1, "kind": "bytes", "size": self.size, "beginning": self.beginning}
        (directory / FILE_NAME).write_text(json.dumps(content) + "\n", encoding="utf-8")


def load_vocabulary(directory: Path, *, size: int) -> Vocabulary:
    """The vocabulary saved in a directory, for a model with `size` token ids.

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
    if kind != "bytes":
        raise RunError(f'{path} is a vocabulary of unknown kind {kind!r}; this version reads "bytes"')
    if saved_size != size:
        raise RunError(f"{path} has {saved_size} tokens, the model {size}: it belongs to another run")
    return ByteVocabulary()

"""Directories made by `switchhead prepare`: what is in them, and how they are read.

manifest.json                  what the data is: source, settings, tokenizer, splits, shards with their checksums
tokenizer/                     the vocabulary
train-00000.safetensors ...    token shards; validation-*, test-* likewise
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from switchhead.data.shards import Shard, ShardedTokens, check_file
from switchhead.data.vocabulary import Vocabulary, load_vocabulary
from switchhead.errors import DataError

FORMAT = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class Prepared:
    """A finished directory and its vocabulary."""

    path: Path
    manifest: Mapping[str, Any]
    vocabulary: Vocabulary

    @property
    def splits(self) -> Mapping[str, Mapping[str, Any]]:
        """`documents`, `tokens`, `bytes` and `shards` of every split: train, perhaps validation and test."""
        return self.manifest["splits"]

    def tokens(self, split: str, *, verify: bool = True) -> ShardedTokens:
        """The tokens of a split, memory-mapped.

        Args:
            split: one of `splits`.
            verify: compare all checksums, a second for every gigabyte or two; sizes are always compared.

        Raises:
            DataError: there is no such split; or a shard is missing, damaged or cut off: names the file.
        """
        shards = self._shards(split)
        for shard in shards:
            check_file(self.path / shard["file"], shard["size"], shard["sha256"] if verify else None)
        arrays = [Shard(self.path / shard["file"]).tokens for shard in shards]
        return ShardedTokens(arrays, np.dtype(self.manifest["dtype"]))

    def identity(self, split: str) -> str:
        """SHA-256 that stands for the tokens of a split."""
        return hashlib.sha256("".join(shard["sha256"] for shard in self._shards(split)).encode()).hexdigest()

    def _shards(self, split: str) -> list[dict[str, Any]]:
        if split not in self.splits:
            raise DataError(
                f"{self.path} has no split {split!r} (it has: {', '.join(self.splits)}); "
                f"eval takes another as {self.path}#{next(iter(self.splits))}"
            )
        return self.splits[split]["shards"]


def open_prepared(path: Path) -> Prepared:
    """A directory made by `switchhead prepare`.

    Raises:
        DataError: it is none, is not finished, or holds another tokenizer than its tokens were made with.
        RunError: the tokenizer cannot be read.
    """
    manifest = read_manifest(path)
    if manifest is None:
        raise DataError(f"{path} is not a prepared directory: it has no {MANIFEST} (see `switchhead prepare`)")
    if not manifest["complete"]:
        raise DataError(f"{path} is not finished: run its `switchhead prepare` again, it goes on where it stopped")
    return Prepared(path, manifest, vocabulary_of(path, manifest))


def vocabulary_of(path: Path, manifest: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary of a directory; see `open_prepared`."""
    vocabulary = load_vocabulary(path / TOKENIZER)
    if vocabulary.fingerprint != manifest["tokenizer"]["sha256"]:
        raise DataError(
            f"{path / TOKENIZER} is not the tokenizer that the tokens of {path} were made with: put that one back, "
            "or prepare the data again into another directory"
        )
    return vocabulary


def read_manifest(path: Path) -> dict[str, Any] | None:
    """What `manifest.json` says, or None where there is none.

    Raises:
        DataError: it cannot be read, or is of another format.
    """
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        version = manifest["format"]
        missing = [n for n in ("settings", "tokenizer", "dtype", "splits", "complete") if n not in manifest]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} is not the manifest of a prepared directory") from error
    if version != FORMAT:
        raise DataError(f"{file} has format {version}; this version reads {FORMAT}")
    if missing:
        raise DataError(f"{file} is damaged: it lacks {missing[0]!r}")
    return manifest

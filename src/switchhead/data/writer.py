"""Writes a prepared directory: shards, and a manifest that says how far the source has been read into them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from switchhead.data.encoding import Encoded, Position
from switchhead.data.prepared import MANIFEST
from switchhead.data.shards import Shard, write_file, write_shard
from switchhead.data.vocabulary import Vocabulary
from switchhead.errors import DataError

_SHARD = re.compile(r"(train|validation|test|unshuffled)-\d{5,}\.safetensors(\.tmp)?")


class Writer:
    """Collects tokens of the splits, and writes them as shards together with how far the source has been read.

    Args:
        out: the directory; files in it that the manifest does not know are removed.
        manifest: what is there already; kept up to date.
        vocabulary: of the tokens.
        shard_tokens: tokens of a split that make a shard.
    """

    def __init__(self, out: Path, manifest: dict[str, Any], vocabulary: Vocabulary, shard_tokens: int) -> None:
        self._out, self._manifest, self._vocabulary, self._shard_tokens = out, manifest, vocabulary, shard_tokens
        self._waiting: dict[str, list[Encoded]] = {}
        remove_unknown(out, manifest)
        self._write_manifest()

    @property
    def tokens(self) -> int:
        """Tokens so far, over all splits."""
        return sum(self.tokens_of(split) for split in self._manifest["splits"].keys() | self._waiting.keys())

    def tokens_of(self, split: str) -> int:
        """Tokens of a split so far."""
        return self._manifest["splits"].get(split, {"tokens": 0})["tokens"] + self._waiting_tokens(split)

    def begin(self, name: str, n_parts: int) -> Position | None:
        """Start a pass over parts of a source: where to go on; None where it is done.

        Raises:
            DataError: the parts are not those that an earlier call read.
        """
        new = {"parts": n_parts, "part": 0, "documents": 0, "done": False}
        self._pass = self._manifest["passes"].setdefault(name, new)
        if self._pass["parts"] != n_parts:
            raise DataError(
                f"the source of {self._out} had {self._pass['parts']} files and has {n_parts} now: put them back, or "
                "prepare into another directory"
            )
        return None if self._pass["done"] else Position(self._pass["part"], self._pass["documents"])

    def append(self, encoded: Mapping[str, Encoded], position: Position) -> None:
        """Take the next tokens of a pass, its source having been read up to a position."""
        self._pass.update(part=position.part, documents=position.documents)
        for split, part in encoded.items():
            self._waiting.setdefault(split, []).append(part)
        if any(self._waiting_tokens(split) >= self._shard_tokens for split in self._waiting):
            self._flush()

    def end(self) -> None:
        """Write what is left of a pass."""
        self._pass["done"] = True
        self._flush()

    def shuffle(self, source: str, split: str, seed: int, limit: int | None) -> None:
        """Write a split: the documents of another in random order, of which at most `limit` tokens.

        An interrupted call is taken up where it was; every shard is a function of its number.
        """
        written = self._manifest["splits"].get(source, {"tokens": 0, "shards": []})
        files = [Shard(self._out / shard["file"]) for shard in written["shards"]]
        first_of = np.cumsum([0, *(len(file.documents) for file in files)])
        order = np.random.default_rng(seed).permutation(first_of[-1])
        file_of = np.searchsorted(first_of, order, side="right") - 1
        number_of = order - first_of[file_of]
        at = self._manifest["splits"].get(split, {"documents": 0})["documents"]
        missing = min(limit or written["tokens"], written["tokens"]) - self.tokens_of(split)
        while missing > 0:
            documents: list[np.ndarray] = []
            size = 0
            while size < min(self._shard_tokens, missing):
                documents.append(files[file_of[at]].document(int(number_of[at])))
                size += len(documents[-1])
                at += 1
            part = Encoded(np.concatenate(documents), np.array([len(document) for document in documents]))
            self._waiting[split] = [part.first(missing)]
            self._flush()
            missing -= size

    def drop(self, split: str) -> None:
        """Remove a split."""
        self._manifest["splits"].pop(split, None)

    def complete(self) -> None:
        """Mark the directory as finished."""
        del self._manifest["passes"]
        self._manifest["splits"] = dict(sorted(self._manifest["splits"].items()))
        self._manifest["complete"] = True
        self._write_manifest()
        remove_unknown(self._out, self._manifest)

    def _flush(self) -> None:
        """Write what was taken, one shard a split, and then the manifest that knows them."""
        for split, parts in sorted(self._waiting.items()):
            tokens = np.concatenate([part.tokens for part in parts])
            self._write_shard(split, tokens, np.concatenate([part.lengths for part in parts]))
        self._waiting.clear()
        self._write_manifest()

    def _write_shard(self, split: str, tokens: np.ndarray, lengths: np.ndarray) -> None:
        counts = self._manifest["splits"].setdefault(split, {"documents": 0, "tokens": 0, "bytes": 0, "shards": []})
        path = self._out / f"{split}-{len(counts['shards']):05d}.safetensors"
        described = write_shard(path, tokens, documents=np.cumsum(lengths) - lengths)
        counts["shards"].append({**described, "documents": len(lengths), "tokens": len(tokens)})
        counts["documents"] += len(lengths)
        counts["tokens"] += len(tokens)
        counts["bytes"] += self._vocabulary.count_bytes(tokens)

    def _waiting_tokens(self, split: str) -> int:
        return sum(len(part.tokens) for part in self._waiting.get(split, []))

    def _write_manifest(self) -> None:
        write_file(self._out / MANIFEST, (json.dumps(self._manifest, indent=2) + "\n").encode())


def remove_unknown(out: Path, manifest: Mapping[str, Any]) -> None:
    """Remove shards that the manifest does not name: those that a call did not come to record, or dropped."""
    known = {shard["file"] for split in manifest["splits"].values() for shard in split["shards"]}
    for path in out.iterdir():
        if _SHARD.fullmatch(path.name) and path.name not in known:
            path.unlink()

"""Token arrays in files: memory-mapped safetensors, each with `tokens` and `documents` (where each begins)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from switchhead.data.files import flush_to_disk
from switchhead.data.vocabulary import Tokens
from switchhead.errors import DataError

TEMPORARY = ".tmp"
_DTYPES = {"U16": np.dtype("<u2"), "U32": np.dtype("<u4"), "I64": np.dtype("<i8")}


class Shard:
    """One file, memory-mapped.

    Attributes:
        tokens: `[tokens]`, uint16 or uint32.
        documents: `[documents]`, the position in `tokens` where each begins.

    Raises:
        DataError: the file cannot be read, or is no shard.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header: dict[str, Any] = json.loads(file.read(length))
            arrays = [self._map(header[name], 8 + length) for name in ("tokens", "documents")]
        except OSError as error:
            raise DataError(f"cannot read shard {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
            raise DataError(f"{path} is no token shard, or damaged") from error
        self.tokens, self.documents = arrays

    def document(self, number: int) -> Tokens:
        """The tokens of a document."""
        start, *end = self.documents[number : number + 2].tolist()
        return self.tokens[start : end[0] if end else len(self.tokens)]

    def _map(self, entry: dict[str, Any], base: int) -> np.ndarray:
        start, end = entry["data_offsets"]
        dtype = _DTYPES[entry["dtype"]]
        if start == end:  # nothing, which cannot be mapped
            return np.empty(0, dtype=dtype)
        return np.memmap(
            self.path, dtype=dtype, mode="r", offset=base + start, shape=((end - start) // dtype.itemsize,)
        )


class ShardedTokens:
    """Consecutive tokens of many files, read like one array; nothing is in memory but what was asked for."""

    def __init__(self, arrays: Sequence[np.ndarray], dtype: np.dtype) -> None:
        self.dtype = dtype
        self._arrays = [array for array in arrays if len(array)]
        self._starts = np.cumsum([0, *(len(array) for array in self._arrays)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: slice | np.ndarray) -> Tokens:
        """The tokens of a slice, or at an array of positions (0 .. len - 1), in its shape.

        Raises:
            IndexError: a position is outside.
            ValueError: a slice with a step.
        """
        if isinstance(index, slice):
            return np.concatenate([np.empty(0, dtype=self.dtype), *self._pieces(index)])
        positions = np.asarray(index)
        flat = positions.ravel()
        if len(flat) and not (flat.min() >= 0 and flat.max() < len(self)):
            raise IndexError(f"positions {flat.min()} .. {flat.max()} of {len(self)} tokens")
        found = np.empty(len(flat), dtype=self.dtype)
        arrays = np.searchsorted(self._starts, flat, side="right") - 1
        for number in np.unique(arrays):
            here = arrays == number
            found[here] = self._arrays[number][flat[here] - self._starts[number]]
        return found.reshape(positions.shape)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("tokens in files become an array by being read into memory")
        return self[:].astype(dtype or self.dtype, copy=False)

    def part(self, where: slice) -> ShardedTokens:
        """The tokens of a slice, still in their files."""
        return ShardedTokens(self._pieces(where), self.dtype)

    def _pieces(self, where: slice) -> list[np.ndarray]:
        """What a slice has of each file. Others are not looked at: a batch asks for many slices, of many files."""
        start, stop, step = where.indices(len(self))
        if step != 1:
            raise ValueError(f"a slice of tokens has step {step}; only 1 is possible")
        first, last = np.searchsorted(self._starts, start, side="right") - 1, np.searchsorted(self._starts, stop)
        pairs = zip(self._arrays[first:last], self._starts[first:last].tolist(), strict=False)
        return [array[max(start - at, 0) : stop - at] for array, at in pairs]


def write_shard(path: Path, tokens: Tokens, documents: np.ndarray) -> dict[str, Any]:
    """Write a shard, whole or not at all; its `file` name, `size` in bytes, and `sha256`.

    Raises:
        DataError: it cannot be written.
    """
    content = save({"tokens": np.ascontiguousarray(tokens), "documents": documents.astype(np.int64)})
    write_file(path, content)
    return {"file": path.name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def write_file(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all: under a temporary name, flushed to the disk, and renamed.

    Raises:
        DataError: it cannot be written.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        flush_to_disk(path.parent)
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror}. Mend that and run the same command again: it goes on from here"
        ) from error


def check_file(path: Path, size: int, sha256: str | None) -> None:
    """See that a file has its size and, unless it is None, its checksum.

    Raises:
        DataError: it has not; names it.
    """
    again = "prepare the data again into an empty directory, or fetch this file again from where it was copied"
    try:
        found = path.stat().st_size
        if found != size:
            raise DataError(f"shard {path} has {found} bytes instead of {size}: {again}")
        if sha256 is not None:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != sha256:
                raise DataError(f"shard {path} is damaged, its checksum is not that of the manifest: {again}")
    except OSError as error:
        raise DataError(f"cannot read shard {path}: {error.strerror}") from error

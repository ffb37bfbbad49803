"""Enwik8: the first 100,000,000 bytes of an English Wikipedia, as bytes."""

from __future__ import annotations

import hashlib
import shutil
import urllib.request
import zipfile
import zlib
from pathlib import Path

import numpy as np

from switchhead.data.shards import TEMPORARY
from switchhead.errors import DataError

ARCHIVE = "enwik8.zip"
URL = f"http://mattmahoney.net/dc/{ARCHIVE}"
SHA256 = "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"
SPLIT = {"train": 90_000_000, "validation": 5_000_000, "test": 5_000_000}  # bytes, in this order


def read_enwik8(copy: Path | None, cache: Path) -> bytes:
    """The text: from a local copy, or fetched.

    Args:
        copy: `enwik8.zip` or `enwik8`, or a directory with one of them.
        cache: where the archive is kept that is fetched.

    Raises:
        DataError: there is no such file, or it is something else.
    """
    if copy is not None:
        return _read(_find(copy))
    path = _fetch(cache / ARCHIVE)
    try:
        return _read(path)
    except DataError:
        path.unlink()  # so that the next call fetches it again
        raise


def _read(path: Path) -> bytes:
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                raw = archive.read("enwik8")
        else:
            raw = path.read_bytes()
    except (OSError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"cannot read Enwik8 from {path}: {error}") from error
    if hashlib.sha256(raw).hexdigest() != SHA256:
        raise DataError(f"{path} is not Enwik8 ({len(raw):,} bytes, of another checksum): fetch {URL} again")
    return raw


def split_bytes(raw: bytes, lengths: dict[str, int]) -> tuple[bytes, dict[str, bytes]]:
    """The bytes that occur, in order of their values, and the consecutive parts of the text."""
    ends = np.cumsum(list(lengths.values()))
    parts = {name: raw[end - length : end] for (name, length), end in zip(lengths.items(), ends, strict=True)}
    return np.unique(np.frombuffer(raw, dtype=np.uint8)).tobytes(), parts


def _find(copy: Path) -> Path:
    for path in (copy / ARCHIVE, copy / "enwik8", copy):
        if path.is_file():
            return path
    raise DataError(f"{copy} holds neither enwik8.zip nor enwik8")


def _fetch(path: Path) -> Path:
    if path.exists():
        return path
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with urllib.request.urlopen(URL, timeout=60) as response, temporary.open("wb") as file:
            shutil.copyfileobj(response, file)
        temporary.replace(path)
    except OSError as error:
        raise DataError(
            f"cannot fetch {URL} ({error}). Without a network, fetch it on another machine and give --copy enwik8.zip"
        ) from error
    return path

"""Files of text, compressed or not; and how a file comes to the disk."""

from __future__ import annotations

import fcntl
import glob
import gzip
import io
import logging
import lzma
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from switchhead.errors import DataError

logger = logging.getLogger(__name__)


def matching_files(pattern: str) -> list[str]:
    """Files whose names match, in the order of their names.

    Raises:
        DataError: there is none.
    """
    # A name that exists means itself, whatever characters it has.
    paths = sorted(glob.glob(pattern, recursive=True)) or glob.glob(glob.escape(pattern))
    if not paths:
        raise DataError(f"no file matches {pattern!r}")
    return paths


def read_lines(path: str) -> Iterator[bytes]:
    """Lines of a file, decompressed by the ending of its name: .gz, .xz, .zst, or none of these.

    Raises:
        DataError: the file cannot be read, or its compressed data is damaged or cut off.
    """
    try:
        with _open(path) as file:
            yield from file
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{path!r} is damaged or cut off ({error}): fetch it again") from error
    except OSError as error:
        raise DataError(f"cannot read {path!r}: {error.strerror or error}") from error


def lock_directory(path: Path) -> int:
    """Make a directory and keep other processes of this host from locking it, until the descriptor is closed.

    Whoever dies lets go of it. (Locks that hold between hosts would outlive a host that does not come back.)

    Raises:
        BlockingIOError: another process has it.
        OSError: it cannot be made.
    """
    path.mkdir(parents=True, exist_ok=True)
    directory = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(directory)
        raise
    except OSError as error:  # some file systems of clusters have no locks
        logger.warning("%s cannot be locked (%s): see that no other process writes there", path, error.strerror)
    return directory


def flush_to_disk(path: Path) -> None:
    """Have the operating system put a file, or a directory's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open(path: str) -> BinaryIO:
    if path.endswith(".gz"):
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.endswith(".xz"):
        return cast(BinaryIO, lzma.open(path, "rb"))
    if path.endswith((".zst", ".zstd")):
        return cast(BinaryIO, io.BufferedReader(_ZstdFile(path), 1 << 20))
    return open(path, "rb")


class _ZstdFile(io.RawIOBase):
    """Zstandard frames one after the other; zstandard's own reader takes a file that is cut off for a shorter one."""

    def __init__(self, path: str) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise DataError(f"reading {path!r} needs zstandard: pip install 'switchhead[data]'") from error
        self._file = open(path, "rb")  # noqa: SIM115 (closed by close)
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # zstd --long=31
        self._damaged = zstandard.ZstdError
        self._frame = self._decompressor.decompressobj()
        self._inside = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Fill the buffer with what follows; 0 at the end."""
        while not self._ready:
            packed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._inside = self._decompressor.decompressobj(), False
            packed = packed or self._file.read(1 << 17)
            if not packed:
                if self._inside:
                    raise EOFError("it ends inside a Zstandard frame")
                return 0
            self._inside = True
            try:
                self._ready = memoryview(self._frame.decompress(packed))
            except self._damaged as error:
                raise EOFError(str(error)) from error
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def close(self) -> None:
        """Close the file."""
        if hasattr(self, "_file"):  # not where it could not be opened
            self._file.close()
        super().close()

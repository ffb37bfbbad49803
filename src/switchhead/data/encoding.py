"""Documents to tokens, by several processes; the result does not depend on how many."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from switchhead.data.sources import Part
from switchhead.data.tokens import beginning_of
from switchhead.data.vocabulary import Tokens, Vocabulary, load_vocabulary
from switchhead.errors import DataError

CHUNK = 1 << 20  # characters that a process gets at a time


@dataclass(frozen=True)
class Position:
    """A place in a source: documents read of a part, all of those before it having been read whole."""

    part: int = 0
    documents: int = 0


@dataclass(frozen=True)
class Chunk:
    """Consecutive documents by the split that they belong to, and where the next one is."""

    documents: Mapping[str, Sequence[str]]
    end: Position


@dataclass(frozen=True)
class Encoded:
    """Documents one after the other, each behind a beginning token (if the vocabulary has one).

    Attributes:
        tokens: `[tokens]`.
        lengths: tokens of each document, `[documents]`.
    """

    tokens: Tokens
    lengths: np.ndarray

    def first(self, count: int) -> Encoded:
        """At most so many tokens, the last document being cut."""
        if count >= len(self.tokens):
            return self
        ends = np.minimum(np.cumsum(self.lengths), count)
        lengths = np.diff(ends, prepend=0)
        return Encoded(self.tokens[:count], lengths[lengths > 0])


def read_chunks(parts: Sequence[Part], start: Position, split_of: Callable[[str], str]) -> Iterator[Chunk]:
    """The documents of a source from a place on; wherever a chunk ended before, the same chunks follow."""
    documents: dict[str, list[str]] = {}
    size = 0
    for number in range(start.part, len(parts)):
        done = start.documents if number == start.part else 0
        for count, text in enumerate(parts[number].read(), start=1):
            if count <= done or not text:
                continue
            documents.setdefault(split_of(text), []).append(text)
            size += len(text)
            if size >= CHUNK:
                yield Chunk(documents, Position(number, count))
                documents, size = {}, 0
    if documents:
        yield Chunk(documents, Position(len(parts), 0))


def encode_chunks(
    chunks: Iterable[Chunk], directory: Path, processes: int
) -> Iterator[tuple[Mapping[str, Encoded], Position]]:
    """Every chunk by split, in order, and where the next one begins.

    Args:
        chunks: read ahead by a few for each process.
        directory: of the vocabulary.
        processes: 1: this one.

    Raises:
        DataError: a process was killed.
    """
    if processes == 1:
        vocabulary = load_vocabulary(directory)
        for chunk in chunks:
            yield _encode(chunk.documents, vocabulary), chunk.end
        return
    waiting: deque[tuple[Future[Mapping[str, Encoded]], Position]] = deque()
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_start, initargs=(directory,)) as pool:
        try:
            for chunk in chunks:
                waiting.append((pool.submit(_encode_here, chunk.documents), chunk.end))
                if len(waiting) > 3 * processes:
                    encoded, end = waiting.popleft()
                    yield encoded.result(), end
            for encoded, end in waiting:
                yield encoded.result(), end
        except BrokenProcessPool as error:
            raise DataError(
                "a process that encodes text was killed, perhaps for want of memory: "
                "run the same command again with fewer processes; it goes on from here"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _encode(documents: Mapping[str, Sequence[str]], vocabulary: Vocabulary) -> dict[str, Encoded]:
    beginning = beginning_of(vocabulary)
    encoded = {}
    for split, texts in documents.items():
        parts = [np.concatenate([beginning, vocabulary.encode(text)]) for text in texts]
        encoded[split] = Encoded(np.concatenate(parts), np.array([len(part) for part in parts]))
    return encoded


_vocabulary: Vocabulary | None = None  # of a worker


def _start(directory: Path) -> None:
    global _vocabulary
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a process
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _vocabulary = load_vocabulary(directory)


def _encode_here(documents: Mapping[str, Sequence[str]]) -> Mapping[str, Encoded]:
    assert _vocabulary is not None
    return _encode(documents, _vocabulary)


def _die_with_parent() -> None:
    """End a worker whose parent was killed; it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

"""Documents to tokens, by several processes; the result does not depend on how many."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

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
    with _Workers(directory, processes) as workers, ThreadPoolExecutor(processes) as pool:
        try:
            for chunk in chunks:
                waiting.append((pool.submit(workers.encode, chunk.documents), chunk.end))
                if len(waiting) > 3 * processes:
                    encoded, end = waiting.popleft()
                    yield encoded.result(), end
            for encoded, end in waiting:
                yield encoded.result(), end
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _encode(documents: Mapping[str, Sequence[str]], vocabulary: Vocabulary) -> dict[str, Encoded]:
    beginning = beginning_of(vocabulary)
    encoded = {}
    for split, texts in documents.items():
        parts = [np.concatenate([beginning, vocabulary.encode(text)]) for text in texts]
        encoded[split] = Encoded(np.concatenate(parts), np.array([len(part) for part in parts]))
    return encoded


class _Workers(contextlib.ExitStack):
    """Processes that encode, each behind a pipe of its own: whichever side is killed, the other one reads its end.

    (A `ProcessPoolExecutor` waits for ever for the rest of a result when its worker is killed on the way.)
    """

    def __init__(self, directory: Path, count: int) -> None:
        super().__init__()
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, directory), daemon=True)
            process.start()
            theirs.close()
            self.callback(process.join)
            self.callback(ours.close)
            self._idle.put(ours)

    def encode(self, documents: Mapping[str, Sequence[str]]) -> Mapping[str, Encoded]:
        """What `_encode` gives, from a process that has nothing to do; called by as many threads as there are."""
        worker = self._idle.get()
        try:
            worker.send(documents)
            answer = worker.recv()
        except (EOFError, OSError) as error:
            raise DataError(
                "a process that encodes text was killed, perhaps for want of memory: "
                "run the same command again with fewer processes; it goes on from here"
            ) from error
        finally:
            self._idle.put(worker)
        if isinstance(answer, Exception):
            raise answer
        return answer


def _work(connection: Connection, directory: Path) -> None:
    """Answer with encoded documents until the other side is gone."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a process
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        vocabulary = load_vocabulary(directory)
        while True:
            documents = connection.recv()
            try:
                answer = _encode(documents, vocabulary)
            except Exception as error:
                answer = error
            connection.send(answer)

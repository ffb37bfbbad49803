"""`prepare`: from a source of text to a directory of tokens that training reads without delay.

Everything that is made depends on the source and the settings alone, not on the number of processes or on how often
the work was interrupted: documents keep their order, and shards end at places that only the documents decide.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from switchhead.data import enwik8, hub
from switchhead.data.bpe import train_bpe
from switchhead.data.encoding import Encoded, Position, encode_chunks, read_chunks
from switchhead.data.files import lock_directory
from switchhead.data.prepared import FORMAT, MANIFEST, TOKENIZER, Prepared, open_prepared, read_manifest, vocabulary_of
from switchhead.data.shards import TEMPORARY
from switchhead.data.sources import KINDS, Part, Source, open_files
from switchhead.data.tokenizer import load_tokenizer
from switchhead.data.vocabulary import ByteSubsetVocabulary, ByteVocabulary, Vocabulary, dtype_of
from switchhead.data.writer import Writer, remove_unknown
from switchhead.errors import DataError

SHARD_TOKENS = 1 << 26
HELD_OUT = 0.005  # the paper's part of C4 and peS2o
SAMPLE_CHARACTERS = 1 << 28  # of text that a tokenizer is trained on
SAMPLE_PARTS = 8  # they come from that many parts at least, where there are so many
UNSHUFFLED = "unshuffled"  # the training split until its documents are in their final order


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides what is made of a source.

    Attributes:
        source: `c4`, `pes2o`, `wikitext103`, `enwik8`, `hf:NAME/CONFIG#column`, or what `read_documents` takes.
        valid: text for validation, as `read_documents` takes it; default: the source's own, or documents held out.
        test: text for a test split; default: the source's own.
        held_out: part of the documents that is kept for validation where there is none of its own or given. A
            document's text alone decides, so that copies of one are on the same side.
        tokenizer: "bytes", or a Hugging Face tokenizer by directory or name; default: one trained on the source.
        vocab_size: pieces of the one that is trained.
        limit_tokens: exact number of training tokens, the first of the source (or of the shuffled documents).
        shuffle: seed of a random order of the training documents; default: the source's order.
        shard_tokens: a shard ends after the first MiB of text that brings it to so many.
    """

    source: str
    valid: str | None = None
    test: str | None = None
    held_out: float | None = None
    tokenizer: str | None = None
    vocab_size: int = 8000
    limit_tokens: int | None = None
    shuffle: int | None = None
    shard_tokens: int = SHARD_TOKENS

    def __post_init__(self) -> None:
        """Raise a `ValueError` that names the first field out of its range."""
        if self.held_out is not None and not 0 <= self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}; it must be at least 0 and below 1")
        if self.held_out is not None and self.valid is not None:
            raise ValueError("held_out and valid exclude each other: validation text is either held out or given")
        if self.vocab_size < 300:
            raise ValueError(f"vocab_size is {self.vocab_size}; it must be at least 300 (256 of them are bytes)")
        for name in ("limit_tokens", "shard_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.shuffle is not None and self.shuffle < 0:
            raise ValueError(f"shuffle is {self.shuffle}; a seed must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a preparation is.

    Attributes:
        doing: in words.
        part: parts of the source begun, of `parts`.
        tokens: made so far, over all splits.
    """

    doing: str
    part: int = 0
    parts: int = 0
    tokens: int = 0


def prepare(
    settings: Settings,
    out: str | Path,
    *,
    copy: str | Path | None = None,
    processes: int = 1,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Prepared:
    """Tokenize a source into a directory, or go on with it where an earlier call was interrupted.

    A directory that is finished is verified.

    Args:
        settings: what to make.
        out: a new or empty directory, or one that was begun with the same settings.
        copy: local copy of the repository's files, for sources that are on the hub.
        processes: that encode text side by side; with several, the calling script needs the usual
            `if __name__ == "__main__"`.
        progress: called now and then.

    Raises:
        DataError: the source cannot be read, or `out` cannot be written or holds something else.
        ValueError: `processes` is below 1.
    """
    if processes < 1:
        raise ValueError(f"processes is {processes}; it must be at least 1")
    out = Path(out)
    with _locked(out):
        work = _Work(settings, out, _begun(out, settings), progress)
        if work.manifest is None or not work.manifest["complete"]:
            copy = Path(copy) if copy is not None else None
            if settings.source == "enwik8":
                _prepare_enwik8(work, copy)
            else:
                _prepare_documents(work, copy, processes)
        prepared = open_prepared(out)
        remove_unknown(out, prepared.manifest)
        progress(Progress(doing="verifying checksums"))
        for split in prepared.splits:
            prepared.tokens(split, verify=True)
    return prepared


def open_source(spec: str, *, copy: Path | None = None, revision: str | None = None) -> Source:
    """The documents of a source and the splits that it has; see `Settings`.

    Raises:
        DataError: it cannot be found.
    """
    if spec in hub.REPOSITORIES:
        return hub.open_repository(hub.REPOSITORIES[spec], copy=copy, revision=revision)
    if copy is not None:
        raise DataError(f"a copy can be read of {', '.join(hub.REPOSITORIES)} and enwik8, not of {spec}")
    if spec.startswith("hf:"):
        return hub.open_dataset(spec.removeprefix("hf:"), revision=revision)
    try:
        return open_files(spec)
    except DataError as error:
        if spec.partition(":")[0] in KINDS:
            raise
        known = ", ".join([*hub.REPOSITORIES, "enwik8", "hf:NAME/CONFIG#column"])
        raise DataError(f"{error}, {known}") from error


def _prepare_documents(work: _Work, copy: Path | None, processes: int) -> None:
    settings, manifest = work.settings, work.manifest
    source = open_source(settings.source, copy=copy, revision=manifest["revision"] if manifest else None)
    passes = _passes(settings, source)
    split_of = _splitter(settings, held_out="validation" not in passes)
    if manifest is None:
        work.progress(Progress(doing="looking for text for validation"))
        _require_text(settings, passes, split_of)
        work.progress(Progress(doing="making the tokenizer"))
        manifest = work.begin(_make_vocabulary(settings, passes["train"], split_of), source.revision)
    writer = Writer(work.out, manifest, vocabulary_of(work.out, manifest), settings.shard_tokens)
    for name, parts in passes.items():
        _write_pass(work, writer, name, parts, split_of if name == "train" else lambda _, name=name: name, processes)
    if settings.shuffle is not None:
        work.progress(Progress(doing="shuffling", tokens=writer.tokens))
        writer.shuffle(UNSHUFFLED, "train", settings.shuffle, settings.limit_tokens)
        writer.drop(UNSHUFFLED)
    _require_splits(settings, writer)
    writer.complete()


def _write_pass(
    work: _Work, writer: Writer, name: str, parts: Sequence[Part], split_of: Callable[[str], str], processes: int
) -> None:
    """Encode parts of a source, from where an earlier call left off."""
    start = writer.begin(name, len(parts))
    if start is None:
        return
    limit = work.settings.limit_tokens if name == "train" else None
    chunks = () if limit == writer.tokens_of("train") else read_chunks(parts, start, split_of)
    for encoded, position in encode_chunks(chunks, work.out / TOKENIZER, processes):
        if limit is not None and "train" in encoded:
            missing = limit - writer.tokens_of("train")
            encoded = {**encoded, "train": encoded["train"].first(missing)}
        writer.append(encoded, position)
        begun = min(position.part + 1, len(parts))
        work.progress(Progress(doing=f"encoding {name}", part=begun, parts=len(parts), tokens=writer.tokens))
        if limit == writer.tokens_of("train"):
            break
    writer.end()


def _prepare_enwik8(work: _Work, copy: Path | None) -> None:
    if work.settings != Settings(source="enwik8", shard_tokens=work.settings.shard_tokens):
        raise DataError("enwik8 has its published splits, bytes for tokens and no documents: no setting applies to it")
    work.progress(Progress(doing="reading Enwik8"))
    values, parts = enwik8.split_bytes(enwik8.read_enwik8(copy, work.out), enwik8.SPLIT)
    vocabulary = ByteSubsetVocabulary(values)
    writer = Writer(work.out, work.begin(vocabulary, None), vocabulary, work.settings.shard_tokens)
    writer.begin("all", 1)
    for split, raw in parts.items():
        writer.append({split: Encoded(vocabulary.encode_bytes(raw), np.array([len(raw)]))}, Position())
    writer.end()
    writer.complete()
    (work.out / enwik8.ARCHIVE).unlink(missing_ok=True)


@dataclass
class _Work:
    """A call of `prepare`."""

    settings: Settings
    out: Path
    manifest: dict[str, Any] | None
    progress: Callable[[Progress], None]

    def begin(self, vocabulary: Vocabulary, revision: str | None) -> dict[str, Any]:
        """Save the vocabulary and give the manifest of a directory that has nothing else yet."""
        try:
            vocabulary.save(self.out / TOKENIZER)
        except OSError as error:
            raise DataError(f"cannot write {self.out / TOKENIZER}: {error.strerror}") from error
        return {
            "format": FORMAT,
            "complete": False,
            "settings": asdict(self.settings),
            "revision": revision,
            "tokenizer": {
                "size": vocabulary.size,
                "beginning": vocabulary.beginning,
                "sha256": vocabulary.fingerprint,
            },
            "dtype": dtype_of(vocabulary).name,
            "splits": {},
            "passes": {},
        }


def _passes(settings: Settings, source: Source) -> dict[str, Sequence[Part]]:
    """The parts of every split that has its own."""
    passes = {"train": source.splits["train"]}
    for name, given in (("validation", settings.valid), ("test", settings.test)):
        if given is not None:
            passes[name] = open_source(given).splits["train"]
        elif name in source.splits and not (name == "validation" and settings.held_out is not None):
            passes[name] = source.splits[name]
    return passes


def _splitter(settings: Settings, *, held_out: bool) -> Callable[[str], str]:
    """Which split a document of the training source belongs to."""
    train = "train" if settings.shuffle is None else UNSHUFFLED
    fraction = HELD_OUT if settings.held_out is None else settings.held_out
    bound = int(fraction * 2**64) if held_out else 0

    def split_of(text: str) -> str:
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        return "validation" if number < bound else train

    return split_of if bound else lambda _: train


def _make_vocabulary(settings: Settings, parts: Sequence[Part], split_of: Callable[[str], str]) -> Vocabulary:
    if settings.tokenizer == "bytes":
        return ByteVocabulary()
    if settings.tokenizer is not None:
        return load_tokenizer(settings.tokenizer)
    return train_bpe((text for text in _sample(parts) if split_of(text) != "validation"), settings.vocab_size)


def _sample(parts: Sequence[Part]) -> Iterator[str]:
    """Documents to train a tokenizer on: equally from the beginnings of parts that are far from each other."""
    width = len(parts).bit_length()
    spread = sorted(range(len(parts)), key=lambda number: f"{number:0{width}b}"[::-1])  # 0, half, a quarter, ...
    left = SAMPLE_CHARACTERS
    for number in spread:
        of_part = min(left, SAMPLE_CHARACTERS // min(len(parts), SAMPLE_PARTS))
        for text in parts[number].read():
            if of_part <= 0:
                break
            yield text[:of_part]
            of_part -= len(text)
            left -= len(text)
        if left <= 0:
            return


def _require_text(settings: Settings, passes: Mapping[str, Sequence[Part]], split_of: Callable[[str], str]) -> None:
    """Raise a `DataError`, before there is any work to lose, where a text for validation or test is empty."""
    for name, given in (("validation", settings.valid), ("test", settings.test)):
        if given is not None and not any(text for part in passes[name] for text in part.read()):
            raise _no_text(given)
    if "validation" not in passes and settings.held_out != 0:
        splits = (split_of(text) for part in passes["train"] for text in part.read() if text)
        first = next(splits, None)
        if first is None:
            raise _no_text(settings.source)
        if first != "validation" and "validation" not in splits:  # which reads no further than that
            raise _no_validation(settings)


def _require_splits(settings: Settings, writer: Writer) -> None:
    """Raise a `DataError` where a split has come out empty or shorter than was asked for."""
    tokens = writer.tokens_of("train")
    if not tokens:
        raise _no_text(settings.source)
    if settings.limit_tokens is not None and tokens < settings.limit_tokens:
        raise DataError(
            f"{settings.source} has {tokens:,} training tokens, fewer than limit_tokens = {settings.limit_tokens:,}: "
            "prepare it without a limit, into another directory"
        )
    if settings.held_out != 0 and not writer.tokens_of("validation"):  # none before the limit was reached
        raise _no_validation(settings, where="into another directory, ")


def _no_text(source: str) -> DataError:
    return DataError(f"{source} holds no text")


def _no_validation(settings: Settings, where: str = "") -> DataError:
    return DataError(
        f"no document of {settings.source} has come out for validation: {where}hold out a larger part, give validation "
        "text (--valid), or hold out 0 (--held-out 0: training then sets the end of the text aside)"
    )


def _begun(out: Path, settings: Settings) -> dict[str, Any] | None:
    """The manifest of a directory that was begun with these settings; None where nothing was."""
    manifest = read_manifest(out)
    if manifest is not None:
        there, asked = manifest["settings"], asdict(settings)
        names = [name for name in asked if there.get(name) != asked[name]]
        if names:
            differences = "; ".join(f"{name} is {there.get(name)!r} there and {asked[name]!r} here" for name in names)
            raise DataError(f"{out} was prepared with other settings ({differences}): choose another directory")
        return manifest
    begun = {TOKENIZER, MANIFEST + TEMPORARY, enwik8.ARCHIVE, enwik8.ARCHIVE + TEMPORARY}  # of a call that was killed
    if found := sorted(path.name for path in out.iterdir() if path.name not in begun):
        raise DataError(f"{out} is not empty (it holds {found[0]!r}): choose another directory")
    return None


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Make a directory, and keep other processes from preparing into it."""
    try:
        directory = lock_directory(out)
    except BlockingIOError as error:
        raise DataError(f"another process is preparing {out}: wait for it, or stop it") from error
    except OSError as error:
        raise DataError(f"cannot make directory {out}: {error.strerror}") from error
    try:
        yield
    finally:
        os.close(directory)

"""Where text comes from: the `--data` argument, read as documents."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from switchhead.data.files import matching_files, read_lines
from switchhead.errors import DataError

KINDS = ("text", "jsonl", "parquet")
FORMS = "text:FILE|GLOB, jsonl:GLOB#field or parquet:GLOB#column"


@dataclass(frozen=True)
class Part:
    """A file of a source, or what is read like one.

    Attributes:
        name: of the file.
        read: gives its documents, in a fixed order, from the first on every call.
    """

    name: str
    read: Callable[[], Iterator[str]]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Documents in parts.

    Attributes:
        splits: "train", and "validation" and "test" where the source has its own.
        revision: of a repository, where the source is one.
    """

    splits: Mapping[str, Sequence[Part]]
    revision: str | None = None


def unknown_form(spec: str, forms: str) -> DataError:
    """The error for data that is none of the forms; a file's bare name is taken for its text, as it most often is."""
    meant = f"; did you mean text:{spec}?" if Path(spec).is_file() else ""
    return DataError(f"cannot read data {spec!r}: expected {forms}{meant}")


def open_files(spec: str) -> Source:
    """A source of local files, in the order of their names; see `read_documents`.

    Raises:
        DataError: the form is unknown, or there is no such file.
    """
    kind, separator, rest = spec.partition(":")
    if kind not in _READERS or not rest:
        raise unknown_form(spec, FORMS)
    if kind == "text":
        return Source(splits={"train": [Part(path, partial(_read_text, path)) for path in matching_files(rest)]})
    pattern, separator, field = rest.rpartition("#")
    if not separator or not pattern or not field:
        raise DataError(f"{spec} names no {_FIELD[kind]}: expected {kind}:GLOB#{_FIELD[kind]}")
    read = _READERS[kind]
    return Source(splits={"train": [Part(path, partial(read, path, field)) for path in matching_files(pattern)]})


def read_documents(spec: str) -> Iterator[str]:
    """The documents of local files, in a fixed order.

    Args:
        spec: `text:FILE|GLOB`, UTF-8 files each of which is one document; `jsonl:GLOB#field`, one JSON object a line
            whose `field` is a document, as they are or compressed (.gz, .xz, .zst); or `parquet:GLOB#column`, a
            document a row. Files come in the order of their names; documents without text are left out.

    Raises:
        DataError: the source cannot be read as what it claims to be, or holds no text; names file and place.
    """
    found_text = False
    for part in open_files(spec).splits["train"]:
        for document in part.read():
            if document:
                found_text = True
                yield document
    if not found_text:
        raise DataError(f"{spec} holds no text")


def read_jsonl(path: str, field: str) -> Iterator[str]:
    """A field of every line of a file.

    Raises:
        DataError: a line is no JSON object, or has no such text; names the line.
    """
    for number, line in enumerate(read_lines(path), start=1):
        if not line.isspace():
            yield _field_of(line, field, place=f"{path}:{number}")


def read_parquet(path: str, column: str) -> Iterator[str]:
    """A column of every row of a file.

    Raises:
        DataError: the file is no Parquet, or a row has no such text; names the row.
    """
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError(f"reading {path!r} needs pyarrow: pip install 'switchhead[data]'") from error
    row = 0
    try:
        with ParquetFile(path) as file:
            if column not in file.schema_arrow.names:
                raise DataError(f"{path!r} has no column {column!r} (it has: {', '.join(file.schema_arrow.names)})")
            for batch in file.iter_batches(batch_size=1024, columns=[column]):
                for text in batch.column(0).to_pylist():
                    if not isinstance(text, str):
                        raise DataError(f"{path}: row {row} of column {column!r} is no text")
                    yield text
                    row += 1
    except ArrowException as error:
        raise DataError(f"{path!r} is no Parquet file, or damaged: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path!r} is not UTF-8 in column {column!r}, near row {row}: convert it to UTF-8") from error
    except OSError as error:
        raise DataError(f"cannot read {path!r}: {error}") from error


def _read_text(path: str) -> Iterator[str]:
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read text file {path!r}: {error.strerror}") from error
    try:
        yield raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"text file {path!r} is not UTF-8 (byte {error.start} is 0x{raw[error.start]:02x}): convert it to UTF-8"
        ) from error


def _field_of(line: bytes, field: str, place: str) -> str:
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise DataError(f"{place} is not UTF-8: convert it to UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON that can be read: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{place} is no JSON object but a {type(record).__name__}")
    if field not in record:
        raise DataError(f"{place} has no field {field!r} (it has: {', '.join(sorted(record))})")
    text = record[field]
    if not isinstance(text, str):
        raise DataError(f"{place}: field {field!r} is no text but {json.dumps(text)[:40]}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: field {field!r} has half a surrogate pair, which no text can hold") from error
    return text


_READERS: dict[str, Callable[..., Iterator[str]]] = {"text": _read_text, "jsonl": read_jsonl, "parquet": read_parquet}
_FIELD = {"jsonl": "field", "parquet": "column"}

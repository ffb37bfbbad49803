"""Where text comes from: the `--data` argument, read as documents."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from switchhead.data.files import matching_files, read_lines
from switchhead.errors import DataError

FORMS = "text:FILE|GLOB or jsonl:GLOB#field"


def read_documents(spec: str) -> Iterator[str]:
    """The documents of a source, in a fixed order.

    Args:
        spec: `text:FILE|GLOB`, UTF-8 files each of which is one document; or `jsonl:GLOB#field`, one JSON object a
            line whose `field` is a document, as they are or compressed (.gz, .xz, .zst). Files come in the order of
            their names.

    Raises:
        DataError: the source cannot be read as what it claims to be, or holds no text; names file and place.
    """
    kind, separator, rest = spec.partition(":")
    if not separator or kind not in _READERS or not rest:
        raise DataError(f"cannot read data {spec!r}: expected {FORMS}")
    found_text = False
    for document in _READERS[kind](rest):
        if document:
            found_text = True
            yield document
    if not found_text:
        raise DataError(f"{spec} holds no text")


def _read_text(pattern: str) -> Iterator[str]:
    for path in matching_files(pattern):
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


def _read_jsonl(rest: str) -> Iterator[str]:
    pattern, separator, field = rest.rpartition("#")
    if not separator or not pattern or not field:
        raise DataError(f"jsonl:{rest} names no field: expected jsonl:GLOB#field")
    for path in matching_files(pattern):
        yield from read_jsonl_file(path, field)


def read_jsonl_file(path: str, field: str) -> Iterator[str]:
    """The field of every line of one file.

    Raises:
        DataError: a line is no JSON object, or has no such text; names the line.
    """
    for number, line in enumerate(read_lines(path), start=1):
        if not line.isspace():
            yield _field_of(line, field, place=f"{path}:{number}")


def _field_of(line: bytes, field: str, place: str) -> str:
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise DataError(f"{place} is not UTF-8: convert it to UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{place} is not JSON: {error}") from error
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        known = ", ".join(sorted(record)) if isinstance(record, dict) else f"not an object, {type(record).__name__}"
        raise DataError(f"{place} has no text field {field!r} (it has: {known})")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: field {field!r} has half a surrogate pair, which no text can hold") from error
    return text


_READERS: dict[str, Callable[[str], Iterator[str]]] = {"text": _read_text, "jsonl": _read_jsonl}

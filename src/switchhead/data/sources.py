"""Where text comes from: the `--data` argument, read as documents."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from switchhead.errors import DataError

FORMS = "text:FILE or jsonl:GLOB#field"


def read_documents(spec: str) -> Iterator[str]:
    """The documents of a source, in a fixed order.

    Args:
        spec: `text:FILE`, one UTF-8 text that is one document; or `jsonl:GLOB#field`, one JSON object a line whose
            `field` is a document, files in the order of their names.

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


def _read_jsonl(rest: str) -> Iterator[str]:
    pattern, separator, field = rest.rpartition("#")
    if not separator or not pattern or not field:
        raise DataError(f"jsonl:{rest} names no field: expected jsonl:GLOB#field")
    paths = sorted(glob.glob(pattern, recursive=True))
    if not paths:
        raise DataError(f"no file matches {pattern!r}")
    for path in paths:
        yield from _read_jsonl_file(path, field)


def _read_jsonl_file(path: str, field: str) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.isspace():
                    yield _field_of(line, field, place=f"{path}:{number}")
    except OSError as error:
        raise DataError(f"cannot read {path!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path!r} is not UTF-8: convert it to UTF-8") from error


def _field_of(line: str, field: str, place: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place} is not JSON: {error}") from error
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        known = ", ".join(sorted(record)) if isinstance(record, dict) else f"not an object, {type(record).__name__}"
        raise DataError(f"{place} has no text field {field!r} (it has: {known})")
    return text


_READERS: dict[str, Callable[[str], Iterator[str]]] = {"text": _read_text, "jsonl": _read_jsonl}

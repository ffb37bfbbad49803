"""Examples of tasks, from local files or the hub, each with the place that errors name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from switchhead.data import Vocabulary
from switchhead.data.files import read_lines
from switchhead.data.hub import require_model
from switchhead.errors import DataError
from switchhead.eval.likelihood import Request, encode_request

ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst")


@dataclass(frozen=True)
class Record:
    """One line of a task's data, and where it stands: `file:line`, or the hub's data set and row."""

    fields: dict[str, Any]
    place: str

    def text(self, *names: str) -> str:
        """The text under the first of these names that the record has.

        Raises:
            DataError: it has none of them, or something else there.
        """
        name = next((name for name in names if name in self.fields), None)
        if name is None:
            known = ", ".join(sorted(self.fields)) or "nothing"
            raise DataError(f"{self.place} has no field {' or '.join(map(repr, names))} (it has: {known})")
        value = self.fields[name]
        if not isinstance(value, str) or not value.strip():
            raise DataError(f"{self.place}: field {name!r} is no text, or an empty one: {json.dumps(value)[:40]}")
        return self._whole(value)

    def texts(self, name: str) -> list[str]:
        """The list of texts under a name, at least one, none of them empty.

        Raises:
            DataError: it is something else.
        """
        value = self.fields.get(name)
        if not isinstance(value, list) or not value:
            raise DataError(f"{self.place}: {name!r} is no list of texts, or an empty one")
        for index, text in enumerate(value):
            if not isinstance(text, str) or not text.strip():
                raise DataError(f"{self.place}: {name!r} has an empty text, number {index + 1} of {len(value)}")
        return list(map(self._whole, value))

    def _whole(self, text: str) -> str:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{self.place} has half a surrogate pair, which no text can hold: {text!r}") from error
        return text


@dataclass(frozen=True)
class HubData:
    """A data set on the Hugging Face hub, in some of its configurations; by default in all."""

    name: str
    split: str
    configurations: tuple[str, ...] = ()


Example = TypeVar("Example")


def load_examples(
    stem: str, hub: HubData, parse: Callable[[Record], Example], *, task_data: Path | None
) -> tuple[str, list[Example]]:
    """Where a task's examples come from, and the examples.

    Args:
        stem: name of the local file without its ending, or of a directory of such files.
        hub: used where there is no `task_data`.
        parse: makes an example of a record, or raises a `DataError` that names its place.
        task_data: a directory that has `stem.jsonl` (or .gz, .xz, .zst), or `stem/*.jsonl`.

    Raises:
        DataError: there is no such file, or no network; or an example is faulty.
    """
    if task_data is None:
        source, records = hub.name, _from_hub(stem, hub)
    else:
        available([stem], task_data)
        files = find_files(task_data, stem)
        source, records = str(files[0] if len(files) == 1 else files[0].parent), _from_files(files)
    examples = [parse(record) for record in records]
    if not examples:
        raise DataError(f"{source} holds no examples")
    return source, examples


def available(stems: Sequence[str], task_data: Path | None) -> list[str]:
    """Those of a task's files, without their endings, that are there: on the hub all of them.

    Raises:
        DataError: a directory has none of them.
    """
    found = [stem for stem in stems if task_data is None or find_files(task_data, stem)]
    if not found:
        names = " or ".join(f"{stem}.jsonl" for stem in stems)
        raise DataError(f"{task_data} has no {names} (or .gz, .xz, .zst; or a directory of such files, {stems[0]}/)")
    return found


def find_files(task_data: Path, stem: str) -> list[Path]:
    """Local files of a task, in the order of their names; none where there are none."""
    for ending in ENDINGS:
        if (file := task_data / f"{stem}{ending}").is_file():
            return [file]
    directory = task_data / stem
    return sorted(path for path in directory.glob("*.jsonl*") if path.name.endswith(ENDINGS))


def encode(vocabulary: Vocabulary, place: str, context: str, continuation: str) -> Request:
    """An example's request; see `encode_request`.

    Raises:
        DataError: the continuation tokenises to nothing; names the place.
    """
    try:
        return encode_request(vocabulary, context, continuation)
    except ValueError as error:
        raise DataError(f"{place}: {error}") from error


def sha256_of(examples: Sequence[Any]) -> str:
    """SHA-256 of examples (dataclasses), wherever they stand."""
    digest = hashlib.sha256()
    for example in examples:
        content = {name: value for name, value in asdict(example).items() if name != "place"}
        digest.update(json.dumps(content, sort_keys=True, ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()


def _from_files(files: Sequence[Path]) -> Iterator[Record]:
    for file in files:
        for number, line in enumerate(read_lines(str(file)), start=1):
            if line.isspace():
                continue
            place = f"{file}:{number}"
            try:
                fields = json.loads(line.decode("utf-8-sig"))  # some editors begin a file with a mark
            except UnicodeDecodeError as error:
                raise DataError(f"{place} is not UTF-8: convert it to UTF-8") from error
            except ValueError as error:
                raise DataError(f"{place} is not JSON: {error}") from error
            if not isinstance(fields, dict):
                raise DataError(f"{place} is {type(fields).__name__}, not an object with fields")
            yield Record(fields, place)


def _from_hub(stem: str, hub: HubData) -> Iterator[Record]:
    local = f"or put {stem}.jsonl into a directory and name that with --task-data"
    try:
        from datasets import get_dataset_config_names, load_dataset
    except ImportError as error:
        raise DataError(f"{hub.name} needs datasets: pip install 'switchhead[data]', {local}") from error
    unreachable = _why_unreachable(hub.name)
    try:
        with _from_cache_only() if unreachable else nullcontext():
            names = hub.configurations or get_dataset_config_names(hub.name)
            loaded = {name: load_dataset(hub.name, name, split=hub.split) for name in names}
        for name, rows in loaded.items():
            for number, row in enumerate(rows, start=1):
                yield Record(dict(row), f"{hub.name}/{name} row {number}")
    except Exception as error:  # of the network, the hub and the file system, by many names
        reason = unreachable or _first_line(error)
        raise DataError(f"cannot fetch {hub.name} from the hub ({reason}): try again, {local}") from error


def _why_unreachable(name: str) -> str | None:
    """Why no connection to the hub comes about; None where one does, however slow or faulty its answer.

    `datasets` would try again for half a minute before it looks into its cache.
    """
    try:
        require_model(name)  # which asks once; that there is no model of this name is an answer too
    except OSError as error:
        cause = error.__cause__
        # Of httpx or httpx2, whichever the hub's library goes through.
        if isinstance(cause, Exception) and type(cause).__name__ in ("ConnectError", "ConnectTimeout"):
            return _first_line(cause)
    return None


@contextmanager
def _from_cache_only() -> Iterator[None]:
    """Inside, `datasets` takes what was fetched before, as with HF_HUB_OFFLINE=1, which it reads only once."""
    from datasets import config

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

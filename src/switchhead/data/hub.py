"""Corpora of the paper, and any other data set of the Hugging Face hub.

Those of the paper are read from their repositories' files, by the same code from the hub and from a local copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from switchhead.data.sources import Part, Source, read_jsonl, read_parquet
from switchhead.errors import DataError

_BLANK = " \n"  # a line of WikiText
_KEPT = ("config.json", "tokenizer.json")  # what there is of a model, or of a tokenizer alone, that was fetched


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A data set on the hub as files.

    Attributes:
        name: OWNER/NAME.
        files: pattern of each split's files.
        read: documents of local files.
        joined: whether a document may go on from one file to the next.
    """

    name: str
    files: Mapping[str, str]
    read: Callable[[Iterable[str]], Iterator[str]]
    joined: bool = False


def read_texts(paths: Iterable[str]) -> Iterator[str]:
    """The field "text" of files of JSON lines."""
    for path in paths:
        yield from read_jsonl(path, "text")


def read_wikitext(paths: Iterable[str]) -> Iterator[str]:
    """Articles of WikiText files whose rows are lines.

    The rows of the hub's files are the lines of the original ones, but that lines of a single space are empty; here
    they are spaces again. An article begins with its title, a line ` = Title = ` between two of those: without them it
    may be part of an equation.
    """
    lines: list[str] = []
    for row in (row for path in paths for row in read_parquet(path, "text")):
        lines.append(row or _BLANK)
        if len(lines) > 3 and lines[-3] == lines[-1] == _BLANK and _is_title(lines[-2]):
            yield "".join(lines[:-2])
            del lines[:-2]
    yield "".join(lines)


REPOSITORIES = {
    "c4": Repository(
        name="allenai/c4",
        files={"train": "en/c4-train.*.json.gz"},
        read=read_texts,
    ),
    "pes2o": Repository(
        name="allenai/peS2o",
        files={"train": "data/v2/train-*.json.gz"},
        read=read_texts,
    ),
    "wikitext103": Repository(
        name="Salesforce/wikitext",
        files={split: f"wikitext-103-raw-v1/{split}-*.parquet" for split in ("train", "validation", "test")},
        read=read_wikitext,
        joined=True,
    ),
}


def open_repository(repository: Repository, *, copy: Path | None = None, revision: str | None = None) -> Source:
    """A repository's files as a source; those of the hub are fetched one by one, when they are read.

    Args:
        repository: of `REPOSITORIES`.
        copy: directory with the repository's files, which are then not looked for on the hub.
        revision: commit to read; default: the newest.

    Raises:
        DataError: a split has no file, or the hub cannot be reached.
    """
    if copy is not None:
        names = [str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()]
        place, fetch = str(copy), partial(_path_in, copy)
    else:
        names, revision = _list_files(repository, revision)
        place, fetch = f"{repository.name} on the hub", partial(_fetch, repository, revision=revision)
    splits = {}
    for split, pattern in repository.files.items():
        matching = sorted(name for name in names if fnmatchcase(name, pattern))
        if not matching:
            raise DataError(f"{place} has no file {pattern}: is it a copy of {repository.name}?")
        groups = [matching] if repository.joined else [[name] for name in matching]
        splits[split] = [Part(names[0], partial(_read_fetched, repository.read, fetch, names)) for names in groups]
    return Source(splits=splits, revision=revision)


def open_dataset(rest: str, *, revision: str | None = None) -> Source:
    """What follows `hf:`, streamed through `datasets`: NAME/CONFIG#column, NAME#column, or a local directory.

    Args:
        rest: the data set and its column.
        revision: commit to read; default: the newest. A local directory has none.

    Raises:
        DataError: it cannot be found, or has no split "train".
    """
    path, separator, column = rest.rpartition("#")
    if not separator or not path or not column:
        raise DataError(f"hf:{rest} names no column: expected hf:NAME/CONFIG#column")
    name, config = path, None
    if not Path(path).is_dir() and path.count("/") == 2:
        name, config = path.rsplit("/", 1)
    try:
        import datasets
        from huggingface_hub import HfApi
    except ImportError as error:
        raise DataError(f"reading hf:{rest} needs datasets: pip install 'switchhead[data]'") from error
    try:
        if not Path(name).is_dir():
            revision = HfApi().dataset_info(name, revision=revision).sha
        found = datasets.get_dataset_split_names(name, config, revision=revision)
    except Exception as error:  # what `datasets` raises depends on where it fails
        if Path(name).is_dir():
            raise DataError(f"{name} is no data set that `datasets` can read: {_reason(error)}") from error
        raise _unreachable(f"hf:{rest}", error, f"read a local copy, hf:DIRECTORY#{column}") from error
    splits = [split for split in ("train", "validation", "test") if split in found]
    if "train" not in splits:
        raise DataError(f'hf:{rest} has no split "train" (it has: {", ".join(map(str, found))})')
    read = partial(_read_dataset, name, config, column, revision)
    return Source(splits={s: [Part(f"{path} {s}", partial(read, s))] for s in splits}, revision=revision)


def require_model(name: str) -> None:
    """Ask the hub once whether it has a model or tokenizer, unless it was fetched before.

    What loads one asks for half a minute, where nobody answers.

    Raises:
        OSError: it has none of that name, or cannot be reached.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        if not any(isinstance(try_to_load_from_cache(name, file), str) for file in _KEPT):
            HfApi().model_info(name, timeout=10)
    except Exception as error:  # of the network's, the hub's, or the library's own kind
        raise OSError(f"no directory of that name is here, and on the hub: {_reason(error)}") from error


def _read_dataset(name: str, config: str | None, column: str, revision: str | None, split: str) -> Iterator[str]:
    from datasets import load_dataset

    for number, row in enumerate(load_dataset(name, config, split=split, revision=revision, streaming=True)):
        text = row.get(column)
        if not isinstance(text, str):
            raise DataError(f"{name}, {split}, row {number} has no text column {column!r} (it has: {', '.join(row)})")
        yield text


def _is_title(line: str) -> bool:
    return line.startswith(" = ") and line.endswith(" = \n") and not line.startswith(" = = ")


def _list_files(repository: Repository, revision: str | None) -> tuple[list[str], str | None]:
    """Names of a repository's files, and the commit that has them."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise DataError(f"fetching {repository.name} needs huggingface_hub: pip install 'switchhead[data]'") from error
    try:
        info = HfApi().dataset_info(repository.name, revision=revision)
    except Exception as error:  # of the network's, the hub's, or the library's own kind
        raise _unreachable(repository.name, error, _copy_hint(repository)) from error
    return [file.rfilename for file in info.siblings or []], info.sha


def _fetch(repository: Repository, name: str, *, revision: str | None) -> str:
    from huggingface_hub import hf_hub_download

    try:
        return hf_hub_download(repository.name, name, repo_type="dataset", revision=revision)
    except Exception as error:  # of the network's, the hub's, or the library's own kind
        raise _unreachable(f"{repository.name}: {name}", error, _copy_hint(repository)) from error


def _read_fetched(
    read: Callable[[Iterable[str]], Iterator[str]], fetch: Callable[[str], str], names: Sequence[str]
) -> Iterator[str]:
    yield from read(map(fetch, names))


def _path_in(directory: Path, name: str) -> str:
    return str(directory / name)


def _copy_hint(repository: Repository) -> str:
    return (
        f"fetch it on another machine (hf download --repo-type dataset {repository.name} "
        f"{' '.join(f'--include {pattern!r}' for pattern in repository.files.values())} --local-dir DIR) "
        "and give --copy DIR"
    )


def _unreachable(what: str, error: Exception, instead: str) -> DataError:
    return DataError(f"cannot get {what} from the hub ({_reason(error)}). Without a network, {instead}")


def _reason(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

"""The run directory: created, described, and continued; `switchhead.runs` says what is where, and reads it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from switchhead.data import ByteVocabulary, TokenizerVocabulary, Vocabulary, load_vocabulary
from switchhead.data.files import flush_to_disk, lock_directory
from switchhead.data.vocabulary import FILE_NAME
from switchhead.errors import RunError
from switchhead.hf import SwitchHeadConfig
from switchhead.runs import FORMAT, RunDirectory, identity_of, open_run, package_versions
from switchhead.train.checkpoint import TEMPORARY
from switchhead.train.config import TrainingConfig
from switchhead.train.distributed import World

logger = logging.getLogger(__name__)


def describe_run(
    *, recipe: str | None, model: SwitchHeadConfig, training: TrainingConfig, data: Mapping[str, Any]
) -> dict[str, Any]:
    """Contents of `config.json`.

    Args:
        recipe: name of the experiment, if it has one.
        model: with the vocabulary's size.
        training: as it is.
        data: `training` and `validation` (where the text came from), and what the text is: token counts and hash.
    """
    description = {
        "format": FORMAT,
        "recipe": recipe,
        "model": _model_fields(model),
        "training": dataclasses.asdict(training),
        "data": dict(data),
        "versions": package_versions(),
        "commit": _commit(),
    }
    return json.loads(json.dumps(description))  # what reading it back gives: lists, no tuples


def compare_ranks(world: World, config: Mapping[str, Any], **more: Any) -> None:
    """See that all ranks were started to do the same: else they would wait for each other, or train on two texts.

    Args:
        world: the ranks.
        config: see `describe_run`.
        more: what else has to be the same on all, JSON values.

    Raises:
        RunError: it is not so; names the first rank that differs from rank 0, and what differs.
    """
    own = {**identity_of(config), **more}
    first = world.from_first(own)

    def compare() -> None:
        if differences := list(_differences(first, own, of=("on rank 0", f"on rank {world.rank}"))):
            raise RunError(
                f"the ranks do not agree: {'; '.join(differences)}. Start all with the same command and text"
            )

    world.together(compare)


@contextlib.contextmanager
def lock_run(path: Path) -> Iterator[None]:
    """Keep other processes of this host from training in a directory, which is made if need be.

    Raises:
        RunError: another process has it, or it cannot be made.
    """
    try:
        directory = lock_directory(path)
    except BlockingIOError as error:
        raise RunError(f"another process trains in {path}: wait for it, or stop it") from error
    except OSError as error:
        raise RunError(f"cannot create run directory {path}: {error.strerror}") from error
    try:
        yield
    finally:
        os.close(directory)


def create_run(path: Path, config: Mapping[str, Any], vocabulary: Vocabulary) -> RunDirectory:
    """A new run in a new or empty directory.

    Raises:
        RunError: the directory holds something, or cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        if (path / "config.json").exists():
            raise RunError(f"{path} already holds a run: continue it with --resume, or choose another directory")
        if found := [entry.name for entry in path.iterdir() if not entry.name.endswith(TEMPORARY)]:
            raise RunError(f"{path} is not empty (it holds {found[0]!r}): choose another directory")
        run = _write_config(path, config)
        _save_vocabulary(run, vocabulary)
    except OSError as error:
        raise RunError(f"cannot create run directory {path}: {error.strerror}") from error
    return run


def reopen_run(
    path: Path, config: Mapping[str, Any], vocabulary: Vocabulary, *, allow_changes: bool = False
) -> RunDirectory:
    """The run in a directory, to go on with `config`; a new one where there is none yet.

    Args:
        path: the directory.
        config: see `describe_run`.
        vocabulary: of the text.
        allow_changes: go on with another model, training or data than the run's, and note what changed in its
            `config.json`.

    Raises:
        RunError: it is a run with another model, training or data; or, whatever is allowed, with another vocabulary,
            whose ids its weights stand for.
    """
    if not (path / "config.json").exists():
        return create_run(path, config, vocabulary)
    run = open_run(path)
    is_complete = (run.tokenizer / FILE_NAME).exists()  # else it was killed right after its creation
    if is_complete:
        _require_same_tokenizer(run, vocabulary)
    before = _completed(run.config, config)
    differences = list(_differences(identity_of(before), identity_of(config)))
    if differences and not allow_changes:
        raise RunError(
            f"{path} holds a run with another configuration: {'; '.join(differences)}. "
            "Resume it as it was, or with --allow-changes"
        )
    if not is_complete:
        _save_vocabulary(run, vocabulary)
    if run.config["versions"] != config["versions"]:
        changes = _differences(run.config["versions"], config["versions"])
        logger.warning("losses may differ in the last digits from an uninterrupted run: %s", "; ".join(changes))
    if differences:
        logger.warning("going on with another configuration: %s", "; ".join(differences))
        changes = [*run.config.get("changes", []), differences]
        try:
            run = _write_config(path, {**config, "fingerprint": run.fingerprint, "changes": changes})
        except OSError as error:
            raise RunError(f"cannot write {path / 'config.json'}: {error.strerror}") from error
    return run


def _require_same_tokenizer(run: RunDirectory, vocabulary: Vocabulary) -> None:
    own = load_vocabulary(run.tokenizer, size=run.config["model"]["vocab_size"])
    if own.fingerprint != vocabulary.fingerprint:
        tokenizer = "bytes" if isinstance(own, ByteVocabulary) else run.tokenizer
        raise RunError(
            f"{run.path} was trained on text of another tokenizer than this text's: prepare the text with "
            f"--tokenizer {tokenizer}, or start a new run"
        )


def _save_vocabulary(run: RunDirectory, vocabulary: Vocabulary) -> None:
    try:
        if isinstance(vocabulary, TokenizerVocabulary):
            for file in vocabulary.tokenizer.save_pretrained(run.path):  # for AutoTokenizer.from_pretrained(run)
                flush_to_disk(Path(file))
            flush_to_disk(run.path)
        vocabulary.save(run.tokenizer)
    except Exception as error:  # which is all that the tokenizers library calls a full disk
        raise RunError(f"cannot save the tokenizer of {run.path}: {error}") from error


def _write_config(path: Path, config: Mapping[str, Any]) -> RunDirectory:
    temporary = path / f"config.json{TEMPORARY}"
    temporary.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    flush_to_disk(temporary)
    os.replace(temporary, path / "config.json")
    flush_to_disk(path)
    return RunDirectory(path, config)


def _completed(config: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration that an earlier version wrote, with the settings added since at the values that change nothing.

    For model and training these are the defaults; what is newly said of the text is taken to hold.
    """
    fields = {field.name: field.default for field in dataclasses.fields(TrainingConfig)}
    defaults = {name: value for name, value in fields.items() if value is not dataclasses.MISSING}
    training = {**defaults, **config["training"]}
    model = _model_fields(SwitchHeadConfig(**config["model"]))
    return json.loads(
        json.dumps({**config, "model": model, "training": training, "data": {**asked["data"], **config["data"]}})
    )


def _model_fields(model: SwitchHeadConfig) -> dict[str, Any]:
    return {name: getattr(model, name) for name in SwitchHeadConfig.__annotations__}


def _differences(run: Any, asked: Any, name: str = "", *, of: tuple[str, str] = ("there", "here")) -> Iterator[str]:
    if isinstance(run, dict) and isinstance(asked, dict):
        for key in sorted(run.keys() | asked.keys()):
            yield from _differences(run.get(key), asked.get(key), f"{name}.{key}" if name else key, of=of)
    elif run != asked:
        yield f"{name} is {run!r} {of[0]} and {asked!r} {of[1]}"


def _commit() -> str | None:
    """Commit of this package's source, with "-dirty" where it has changed; None when it is not in a repository."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        # An installed copy may lie inside somebody else's repository.
        subprocess.run([*git, "ls-files", "--error-unmatch", __file__], check=True, capture_output=True)
        described = subprocess.run(
            [*git, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"],
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()

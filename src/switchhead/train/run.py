"""The run directory: created, described, and continued; `switchhead.runs` says what is where, and reads it."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from switchhead.data import Vocabulary, load_vocabulary
from switchhead.errors import RunError
from switchhead.hf import SwitchHeadConfig
from switchhead.runs import FORMAT, RunDirectory, identity_of, open_run
from switchhead.train.checkpoint import TEMPORARY
from switchhead.train.config import TrainingConfig

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
        "model": {name: getattr(model, name) for name in SwitchHeadConfig.__annotations__},
        "training": dataclasses.asdict(training),
        "data": dict(data),
        "versions": {
            "switchhead": _version("switchhead"),
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "transformers", "numpy", "safetensors")},
        },
        "commit": _commit(),
    }
    return json.loads(json.dumps(description))  # what reading it back gives: lists, no tuples


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
        temporary = path / f"config.json{TEMPORARY}"
        temporary.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path / "config.json")
        run = RunDirectory(path, config)
        vocabulary.save(run.tokenizer)
    except OSError as error:
        raise RunError(f"cannot create run directory {path}: {error.strerror}") from error
    return run


def reopen_run(path: Path, config: Mapping[str, Any], vocabulary: Vocabulary) -> RunDirectory:
    """The run in a directory, to go on with `config`; a new one where there is none yet.

    Raises:
        RunError: it is a run with another model, training, data or vocabulary.
    """
    if not (path / "config.json").exists():
        return create_run(path, config, vocabulary)
    run = open_run(path)
    if differences := list(_differences(identity_of(run.config), identity_of(config))):
        raise RunError(f"{path} holds a run with another configuration: {'; '.join(differences)}")
    if run.tokenizer.exists():
        load_vocabulary(run.tokenizer, size=vocabulary.size)
    else:  # killed right after its creation
        vocabulary.save(run.tokenizer)
    if run.config["versions"] != config["versions"]:
        changes = _differences(run.config["versions"], config["versions"])
        logger.warning("losses may differ in the last digits from an uninterrupted run: %s", "; ".join(changes))
    return run


def _differences(run: Any, asked: Any, name: str = "") -> Iterator[str]:
    if isinstance(run, dict) and isinstance(asked, dict):
        for key in sorted(run.keys() | asked.keys()):
            yield from _differences(run.get(key), asked.get(key), f"{name}.{key}" if name else key)
    elif run != asked:
        yield f"{name} is {run!r} there and {asked!r} here"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


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

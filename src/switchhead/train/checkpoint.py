"""Checkpoints: written whole or not at all, and never trusted when read.

A checkpoint is a directory `step-N` of safetensors files and `state.json`, which holds size and SHA-256 of each of
them and the fingerprint of the run. It is written under a temporary name, flushed to the disk and renamed, so that a
kill or a full disk at any moment leaves the previous one as it was.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from switchhead.errors import CheckpointError

FORMAT = 1
TEMPORARY = ".tmp"
_NAME = re.compile(r"step-(\d+)")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    state: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps that went into it."""
        return self.state["step"]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of `name.safetensors`, on the CPU; empty where the checkpoint has no such file."""
        file = f"{name}.safetensors"
        return load_file(self.path / file) if file in self.state["files"] else {}


def write_checkpoint(
    directory: Path,
    step: int,
    *,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    fingerprint: str,
    keep: int,
) -> None:
    """Write `directory/step-N`, then remove all but the newest `keep` checkpoints up to this one.

    Args:
        directory: the run's `checkpoints`.
        step: N.
        tensors: contents of each `.safetensors` file by its name; files without tensors are not written.
        state: JSON values to find again in `Checkpoint.state`.
        fingerprint: identity of the run, which only `read_checkpoint`s of the same run accept.
        keep: how many checkpoints to keep.

    Raises:
        CheckpointError: it could not be written; earlier checkpoints are as they were.
    """
    final = directory / f"step-{step}"
    temporary = final.with_name(final.name + TEMPORARY)
    try:
        directory.mkdir(exist_ok=True)
        for leftover in directory.glob(f"*{TEMPORARY}"):
            shutil.rmtree(leftover)
        temporary.mkdir()
        files = {}
        for name, content in tensors.items():
            if content:
                path = temporary / f"{name}.safetensors"
                save_file({key: value.contiguous() for key, value in content.items()}, path)
                _flush(path)
                files[path.name] = _digest(path)
        content = {**state, "format": FORMAT, "step": step, "fingerprint": fingerprint, "files": files}
        (temporary / "state.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
        _flush(temporary / "state.json")
        _flush(temporary)
        if final.exists():  # one that a resume found unusable
            _remove(final)
        os.replace(temporary, final)
        _flush(directory)
        for _, old in _steps(directory, before=step)[max(keep - 1, 0) :]:
            _remove(old)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        survivors = _steps(directory, before=step)
        rest = f"the previous checkpoint {survivors[0][1].name} is intact" if survivors else "there is no earlier one"
        raise CheckpointError(f"cannot save checkpoint {final}: {error}; {rest}") from error


def read_checkpoint(path: Path, fingerprint: str) -> Checkpoint:
    """The checkpoint in a directory, once it is known to be complete and of this run.

    Raises:
        CheckpointError: it is not; names what is wrong.
    """
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        version, files, owner = state["format"], state["files"], state["fingerprint"]
        if version != FORMAT:
            raise CheckpointError(f"checkpoint {path} has format {version}; this version reads {FORMAT}")
        if owner != fingerprint:
            raise CheckpointError(f"checkpoint {path} belongs to another run (another model, training or data)")
        for name, digest in files.items():
            size = (path / name).stat().st_size
            if size != digest["bytes"]:
                raise CheckpointError(f"checkpoint {path} is broken: {name} has {size} of {digest['bytes']} bytes")
            if _digest(path / name) != digest:
                raise CheckpointError(f"checkpoint {path} is broken: the content of {name} has changed")
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} is incomplete: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {path} is broken: state.json is not what was written") from error
    return Checkpoint(path, state)


def newest_checkpoint(directory: Path, fingerprint: str) -> Checkpoint | None:
    """The newest usable checkpoint of a run; None when it has not come to its first.

    Unusable ones are passed over with a warning.

    Raises:
        CheckpointError: there are checkpoints, and none can be used.
    """
    problems = []
    for _, path in _steps(directory):
        try:
            checkpoint = read_checkpoint(path, fingerprint)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            logger.warning("%s; using the previous one, %s", problem, path.name)
        return checkpoint
    if problems:
        raise CheckpointError("no usable checkpoint: " + "; ".join(problems))
    return None


def _steps(directory: Path, before: int | None = None) -> list[tuple[int, Path]]:
    """Checkpoints by their names, newest first."""
    if not directory.is_dir():
        return []
    named = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    steps = ((int(match[1]), path) for match, path in named if match)
    return sorted((s for s in steps if before is None or s[0] < before), reverse=True)


def _remove(path: Path) -> None:
    """Remove a checkpoint so that a kill half-way leaves none that looks whole."""
    doomed = path.with_name(f"{path.name}-old{TEMPORARY}")
    os.replace(path, doomed)
    shutil.rmtree(doomed)


def _flush(path: Path) -> None:
    """Have the operating system put a file, or a directory's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}

"""Checkpoints: written whole or not at all; `switchhead.runs` reads them, and never trusts them.

A checkpoint is a directory `step-N` of safetensors files and `state.json`, which holds size and SHA-256 of each of
them and the fingerprint of the run. It is written under a temporary name, flushed to the disk and renamed, so that a
kill or a full disk at any moment leaves the previous one as it was.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from switchhead.data.files import flush_to_disk
from switchhead.errors import CheckpointError
from switchhead.runs import CHECKPOINT_FORMAT, checkpoint_steps, digest_of

TEMPORARY = ".tmp"


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
        state: JSON values to find again in `switchhead.runs.Checkpoint.state`.
        fingerprint: identity of the run, which only `read_checkpoint`s of the same run accept.
        keep: how many checkpoints to keep.

    Raises:
        CheckpointError: it could not be written; earlier checkpoints are as they were.
    """
    final = directory / f"step-{step}"
    temporary = final.with_name(final.name + TEMPORARY)
    try:
        if not directory.is_dir():
            directory.mkdir()
            flush_to_disk(directory.parent)
        for leftover in directory.glob(f"*{TEMPORARY}"):
            shutil.rmtree(leftover)
        temporary.mkdir()
        files = {}
        for name, content in tensors.items():
            if content:
                path = temporary / f"{name}.safetensors"
                save_file({key: value.contiguous() for key, value in content.items()}, path)
                flush_to_disk(path)
                files[path.name] = digest_of(path)
        content = {**state, "format": CHECKPOINT_FORMAT, "step": step, "fingerprint": fingerprint, "files": files}
        (temporary / "state.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
        flush_to_disk(temporary / "state.json")
        flush_to_disk(temporary)
        if final.exists():  # one that a resume found unusable
            _remove(final)
        os.replace(temporary, final)
        flush_to_disk(directory)
        for _, old in checkpoint_steps(directory, before=step)[max(keep - 1, 0) :]:
            _remove(old)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        survivors = checkpoint_steps(directory, before=step)
        rest = f"the previous checkpoint {survivors[0][1].name} is intact" if survivors else "there is no earlier one"
        raise CheckpointError(f"cannot save checkpoint {final}: {error}; {rest}") from error


def _remove(path: Path) -> None:
    """Remove a checkpoint so that a kill half-way leaves none that looks whole."""
    doomed = path.with_name(f"{path.name}-old{TEMPORARY}")
    os.replace(path, doomed)
    shutil.rmtree(doomed)

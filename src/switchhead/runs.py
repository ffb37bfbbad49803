"""Run directories and checkpoints as they are read; `switchhead.train` writes them.

config.json                      resolved configuration: recipe, model, training, data, versions, commit
metrics.jsonl                    one object a line
tensorboard/
checkpoints/step-N/              model.safetensors, optimizer.safetensors, memory.safetensors (models with
                                 memory), state.json
tokenizer/                       vocabulary

`state.json` holds size and SHA-256 of the other files of its checkpoint, and the fingerprint of the run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from switchhead.data import Vocabulary, load_vocabulary
from switchhead.errors import CheckpointError, RunError
from switchhead.hf import SwitchHeadConfig, SwitchHeadForCausalLM

FORMAT = 1  # of config.json
CHECKPOINT_FORMAT = 1
_NAME = re.compile(r"step-(\d+)")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunDirectory:
    """A directory with a run's configuration, and perhaps more."""

    path: Path
    config: Mapping[str, Any]

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        """Where the vocabulary is."""
        return self.path / "tokenizer"

    @property
    def metrics(self) -> Path:
        """The measurements."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """The measurements again, for TensorBoard."""
        return self.path / "tensorboard"

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that decides the run's numbers, as it began; its checkpoints carry it."""
        if "fingerprint" in self.config:  # a run whose configuration was changed on the way
            return self.config["fingerprint"]
        return hashlib.sha256(json.dumps(identity_of(self.config), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Run:
    """A trained model, ready for scoring and generation, and where it came from."""

    model: SwitchHeadForCausalLM
    vocabulary: Vocabulary
    step: int
    directory: Path


def open_run(path: Path) -> RunDirectory:
    """The run in a directory.

    Raises:
        RunError: there is none, or it is of another format.
    """
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        version = config["format"]
        identity_of(config)
    except FileNotFoundError as error:
        raise RunError(f"{path} is not a run directory: it has no config.json") from error
    except OSError as error:
        raise RunError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{file} is not the configuration of a run") from error
    if version != FORMAT:
        raise RunError(f"{file} has format {version}; this version reads {FORMAT}")
    return RunDirectory(path, config)


def load_run(path: str | Path, *, device: str = "auto") -> Run:
    """The model of a run at its newest checkpoint, or at a given one.

    Args:
        path: a run directory, or `checkpoints/step-N` in one.
        device: see `choose_device`.

    Raises:
        RunError: there is no run, or no checkpoint to load; names it.
    """
    path = Path(path)
    chosen = path if path.parent.name == "checkpoints" else None
    run = open_run(path.parent.parent if chosen else path)
    checkpoint = (
        read_checkpoint(chosen, run.fingerprint) if chosen else newest_checkpoint(run.checkpoints, run.fingerprint)
    )
    if checkpoint is None:
        raise RunError(f"{run.path} has no checkpoint yet")
    vocabulary = load_vocabulary(run.tokenizer, size=run.config["model"]["vocab_size"])
    model = SwitchHeadForCausalLM(SwitchHeadConfig(**run.config["model"]))
    load_model(model, checkpoint)
    model.to(choose_device(device)).eval()  # pyright: ignore[reportArgumentType] (transformers hides the signature)
    return Run(model, vocabulary, checkpoint.step, run.path)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """State of a model by name, a tensor that goes by several names once."""
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    unique = {name for name, _ in model.named_parameters()}
    return {name: value for name, value in model.state_dict().items() if name in unique or name not in every}


def load_model(
    model: nn.Module, checkpoint: Checkpoint, *, place: Callable[[Tensor, Tensor], Tensor] | None = None
) -> None:
    """Put a checkpoint's weights into a model.

    Args:
        model: of the checkpoint's configuration.
        checkpoint: where they are.
        place: of a whole tensor and the model's own, makes what the model's can be set to; for sharded models.

    Raises:
        CheckpointError: names or shapes are not the model's; names them.
    """
    wanted, found = model_tensors(model), checkpoint.tensors("model")
    wrong = [f"{name} is missing" for name in wanted if name not in found]
    wrong += [f"{name} is not in the model" for name in found if name not in wanted]
    wrong += [
        f"{name} has shape {list(found[name].shape)}, the model's {list(value.shape)}"
        for name, value in wanted.items()
        if name in found and found[name].shape != value.shape
    ]
    if wrong:
        raise CheckpointError(f"checkpoint {checkpoint.path} does not fit the model: {'; '.join(wrong)}")
    if place is not None:
        found = {name: place(value, wanted[name]) for name, value in found.items()}
    model.load_state_dict(found, strict=False)


def choose_device(name: str) -> torch.device:
    """The device of a name, "auto" being the first CUDA device or else the CPU.

    Raises:
        RunError: it does not exist here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        if reason.startswith("Expected one of"):  # and then all twenty that PyTorch knows
            reason = "expected auto, cpu, cuda or cuda:N"
        raise RunError(f"device {name!r} cannot be used here: {reason}") from error
    return device


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


def read_checkpoint(path: Path, fingerprint: str, *, verify: bool = True) -> Checkpoint:
    """The checkpoint in a directory, once it is known to be complete and of this run.

    Args:
        path: the directory.
        fingerprint: of the run.
        verify: compare checksums, a second for every gigabyte or two; sizes are always compared.

    Raises:
        CheckpointError: it is not; names what is wrong.
    """
    if not path.is_dir():
        others = ", ".join(other.name for _, other in checkpoint_steps(path.parent)) or "none"
        raise CheckpointError(f"there is no checkpoint {path}; in {path.parent} there are: {others}")
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        version, files, owner = state["format"], state["files"], state["fingerprint"]
        if version != CHECKPOINT_FORMAT:
            raise CheckpointError(f"checkpoint {path} has format {version}; this version reads {CHECKPOINT_FORMAT}")
        if owner != fingerprint:
            raise CheckpointError(f"checkpoint {path} belongs to another run (another model, training or data)")
        for name, digest in files.items():
            size = (path / name).stat().st_size
            if size != digest["bytes"]:
                raise CheckpointError(f"checkpoint {path} is broken: {name} has {size} of {digest['bytes']} bytes")
            if verify and digest_of(path / name) != digest:
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
    for _, path in checkpoint_steps(directory):
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


def checkpoint_steps(directory: Path, before: int | None = None) -> list[tuple[int, Path]]:
    """Checkpoints by their names, newest first."""
    if not directory.is_dir():
        return []
    named = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    steps = ((int(match[1]), path) for match, path in named if match)
    return sorted((s for s in steps if before is None or s[0] < before), reverse=True)


def digest_of(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, as `state.json` holds them."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def identity_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the numbers of a run; where its text was found does not."""
    text = {name: value for name, value in config["data"].items() if name not in ("training", "validation")}
    return {"model": config["model"], "training": config["training"], "data": text}


def package_versions() -> dict[str, str | None]:
    """What computed a run's or an evaluation's numbers; None for packages that are not installed as such."""
    names = ("torch", "transformers", "numpy", "safetensors")
    return {
        "switchhead": _version("switchhead"),
        "python": platform.python_version(),
        **{name: _version(name) for name in names},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

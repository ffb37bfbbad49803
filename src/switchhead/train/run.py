"""The run directory: what is where, what a run is, and how its model is loaded.

config.json                      resolved configuration: recipe, model, training, data, versions, commit
metrics.jsonl                    one object a line
tensorboard/
checkpoints/step-N/              model.safetensors, optimizer.safetensors, memory.safetensors (models with
                                 memory), state.json
tokenizer/                       vocabulary
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from switchhead.data import Vocabulary, load_vocabulary
from switchhead.errors import CheckpointError, RunError
from switchhead.hf import SwitchHeadConfig, SwitchHeadForCausalLM
from switchhead.train.checkpoint import TEMPORARY, Checkpoint, newest_checkpoint, read_checkpoint
from switchhead.train.config import TrainingConfig

FORMAT = 1
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
        """SHA-256 of all that decides the run's numbers; its checkpoints carry it."""
        return hashlib.sha256(json.dumps(_identity(self.config), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Run:
    """A trained model, ready for scoring and generation, and where it came from."""

    model: SwitchHeadForCausalLM
    vocabulary: Vocabulary
    step: int
    directory: Path


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


def open_run(path: Path) -> RunDirectory:
    """The run in a directory.

    Raises:
        RunError: there is none, or it is of another format.
    """
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        version = config["format"]
        _identity(config)
    except FileNotFoundError as error:
        raise RunError(f"{path} is not a run directory: it has no config.json") from error
    except OSError as error:
        raise RunError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{file} is not the configuration of a run") from error
    if version != FORMAT:
        raise RunError(f"{file} has format {version}; this version reads {FORMAT}")
    return RunDirectory(path, config)


def reopen_run(path: Path, config: Mapping[str, Any], vocabulary: Vocabulary) -> RunDirectory:
    """The run in a directory, to go on with `config`; a new one where there is none yet.

    Raises:
        RunError: it is a run with another model, training, data or vocabulary.
    """
    if not (path / "config.json").exists():
        return create_run(path, config, vocabulary)
    run = open_run(path)
    if differences := list(_differences(_identity(run.config), _identity(config))):
        raise RunError(f"{path} holds a run with another configuration: {'; '.join(differences)}")
    if run.tokenizer.exists():
        load_vocabulary(run.tokenizer, size=vocabulary.size)
    else:  # killed right after its creation
        vocabulary.save(run.tokenizer)
    if run.config["versions"] != config["versions"]:
        changes = _differences(run.config["versions"], config["versions"])
        logger.warning("losses may differ in the last digits from an uninterrupted run: %s", "; ".join(changes))
    return run


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


def load_model(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Put a checkpoint's weights into a model.

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
        raise RunError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def _identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the numbers of a run; where its text was found does not."""
    text = {name: value for name, value in config["data"].items() if name not in ("training", "validation")}
    return {"model": config["model"], "training": config["training"], "data": text}


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

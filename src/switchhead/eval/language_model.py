"""A model and its vocabulary, wherever they come from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from switchhead.data import Vocabulary, load_tokenizer, load_vocabulary
from switchhead.data.hub import require_model
from switchhead.errors import RunError
from switchhead.runs import choose_device, load_run


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """A causal language model, ready for scoring and generation.

    Attributes:
        name: what it was asked for by.
        model: in evaluation mode, on its device.
        vocabulary: the model's.
        step: training steps that it has seen; None where it does not come from a run.
        run: its run directory, if it has one.
    """

    name: str
    model: PreTrainedModel
    vocabulary: Vocabulary
    step: int | None = None
    run: Path | None = None

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of names, dtypes, shapes and bytes of all parameters: the same for a run and a saved copy of it."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.named_parameters()):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def load_language_model(name: str | Path, device: str = "auto") -> LanguageModel:
    """A model by its run directory, its directory as Hugging Face saves it, or its name on the hub.

    Weights are read from safetensors only, and scored in float32 unless autocast says otherwise.

    Args:
        name: a run directory; `checkpoints/step-N` in one; what `save_pretrained` wrote, with the files of a Hugging
            Face tokenizer, or those of our vocabulary in it or in its `tokenizer/`; or a hub id
            (`EleutherAI/pythia-70m`).
        device: see `switchhead.runs.choose_device`.

    Raises:
        RunError: there is no such model, it cannot be loaded, its tokenizer is missing, or its vocabulary has more
            tokens than the model.
    """
    path = Path(name)
    if path.parent.name == "checkpoints" or _is_run(path):
        run = load_run(path, device=device)
        return LanguageModel(
            name=str(name), model=run.model, vocabulary=run.vocabulary, step=run.step, run=run.directory
        )
    if path.is_dir() and not (path / "config.json").exists():
        raise RunError(f"{path} is not a run directory or a saved model: it has no config.json")
    if not path.exists() and (path.is_absolute() or str(name).startswith(".") or str(name).count("/") > 1):
        raise RunError(f"{path} does not exist: expected a run directory, a saved model, or a name on the hub")
    try:
        if not path.exists():
            require_model(str(name))
        model = AutoModelForCausalLM.from_pretrained(str(name), dtype=torch.float32, use_safetensors=True)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunError(f"cannot load model {str(name)!r}: {reason}") from error
    vocabulary = _find_vocabulary(path, str(name))
    if vocabulary.size > model.config.vocab_size:  # fewer are usual: embeddings are padded to round numbers
        raise RunError(
            f"the vocabulary of {name} has {vocabulary.size} tokens, the model {model.config.vocab_size}: "
            "it belongs to another model"
        )
    model.to(choose_device(device)).eval()  # pyright: ignore[reportArgumentType] (transformers hides the signature)
    return LanguageModel(name=str(name), model=model, vocabulary=vocabulary)


def _is_run(path: Path) -> bool:
    """Whether a directory has the configuration of a run, which has a format; a saved model's has none."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "format" in config


def _find_vocabulary(path: Path, name: str) -> Vocabulary:
    for directory in (path, path / "tokenizer"):
        if (directory / "vocabulary.json").exists():
            return load_vocabulary(directory)
    patterns = ("tokenizer*.json", "vocab*", "*.model")
    if path.is_dir() and not any(file for pattern in patterns for file in path.glob(pattern)):
        # For some kinds of models, transformers would make up an empty tokenizer.
        raise RunError(
            f"{path} holds a model without a tokenizer: save its own beside it (`tokenizer.save_pretrained`), "
            "or copy the run's tokenizer/ into it"
        )
    return load_tokenizer(name)

"""How a model is trained: everything that decides the numbers of a run, apart from model and data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Optimisation, batches and bookkeeping of one run.

    Defaults are the paper's where it has one rule for all experiments.

    Attributes:
        steps: optimizer steps, each on `batch_size * chunk_length` tokens.
        batch_size: sequences in a step; Transformer-XL models read this many lanes of text side by side.
        chunk_length: tokens of a sequence (the paper's T).
        learning_rate: the highest, reached after the warm-up; from there a half cosine to zero.
        warmup_steps: steps of linear growth from zero; a run of fewer steps ends before the highest rate.
        betas: decay rates of Adam's two averages.
        eps: added to Adam's denominator.
        weight_decay: decoupled (AdamW), on matrices only; 0 is the paper's Adam.
        grad_clip: largest norm of the whole gradient (the paper's kappa); None: no clipping.
        seed: of initial weights, dropout and the order of windows.
        dtype: "float32", or "bfloat16" or "float16" for autocast over float32 parameters; float16 scales the loss.
        compile: run training steps through `torch.compile`.
        cuda_graphs: record forward and backward of a step as a CUDA graph and replay it, in a process without others on
            a CUDA device.
        micro_batch_size: sequences that a rank runs at once, gradients being summed over them; None: all that it has.
        loss_chunk_length: positions whose scores over the vocabulary exist at once; None: all.
        mask_documents: documents that share a window do not see each other (models without memory).
        skip_nonfinite: steps whose loss or gradient is not finite that a run passes over before it gives up.
        eval_every: steps between validations; the last step always validates.
        validation_tokens: of the validation text, from its beginning, that are scored; None: all.
        save_every: steps between checkpoints; the last step always saves.
        usage_every: steps between measurements of how experts are used.
        keep_checkpoints: the newest ones that are kept.
        validation_fraction: tail of the training text that is set aside when no validation text is given.
    """

    steps: int
    batch_size: int
    chunk_length: int
    learning_rate: float = 2.5e-4
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float | None = 0.1
    seed: int = 0
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    compile: bool = False
    cuda_graphs: bool = False
    micro_batch_size: int | None = None
    loss_chunk_length: int | None = None
    mask_documents: bool = False
    skip_nonfinite: int = 0
    eval_every: int = 1000
    validation_tokens: int | None = None
    save_every: int = 1000
    usage_every: int = 100
    keep_checkpoints: int = 2
    validation_fraction: float = 0.05

    def __post_init__(self) -> None:
        """Raise a `ValueError` that names the first field out of its range."""
        for name in ("steps", "batch_size", "chunk_length"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("eval_every", "save_every", "usage_every", "keep_checkpoints"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("micro_batch_size", "loss_chunk_length", "validation_tokens"):
            value = getattr(self, name)
            self._require(name, value is None or value >= 1, "at least 1, or None")
        self._require("skip_nonfinite", self.skip_nonfinite >= 0, "0 or more")
        for name in ("learning_rate", "eps"):
            value = getattr(self, name)
            self._require(name, math.isfinite(value) and value > 0, "a finite number above 0")
        self._require("warmup_steps", self.warmup_steps >= 0, "0 or more")
        self._require("betas", len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "two in [0, 1)")
        self._require("weight_decay", math.isfinite(self.weight_decay) and self.weight_decay >= 0, "0 or more")
        clips = self.grad_clip is None or (math.isfinite(self.grad_clip) and self.grad_clip > 0)
        self._require("grad_clip", clips, "a finite number above 0, or None")
        self._require("seed", self.seed >= 0, "0 or more")
        dtypes = ("float32", "bfloat16", "float16")
        self._require("dtype", self.dtype in dtypes, f"one of {', '.join(dtypes)}")
        self._require("validation_fraction", 0 < self.validation_fraction < 1, "between 0 and 1")

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {wanted}")

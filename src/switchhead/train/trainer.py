"""Model, optimizer and everything else that changes from step to step."""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from switchhead.data import Batches
from switchhead.errors import TrainingError
from switchhead.hf import SwitchHeadConfig, SwitchHeadForCausalLM
from switchhead.runs import Checkpoint, load_model, model_tensors
from switchhead.train.config import TrainingConfig
from switchhead.train.schedule import learning_rate_at


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What one step measured: nats per token, norm before clipping, seconds."""

    loss: float
    learning_rate: float
    gradient_norm: float
    seconds: float


class Trainer:
    """A model in training; `save_state` and `restore` carry all of it, so that a restored one goes on bit for bit."""

    def __init__(
        self, model: SwitchHeadConfig, training: TrainingConfig, batches: Batches, device: torch.device
    ) -> None:
        torch.manual_seed(training.seed)
        self.training, self.batches, self.device = training, batches, device
        self.model = SwitchHeadForCausalLM(model)
        self.model.to(device).train()  # pyright: ignore[reportArgumentType] (transformers hides the signature)
        # Validation runs the plain model: its shapes vary, and each would be compiled anew.
        self.forward = torch.compile(self.model) if training.compile else self.model
        self.optimizer = _make_optimizer(self.model, training)
        self.step = 0
        self.next_batch = 0
        self.memory: tuple[Tensor, ...] | None = None

    def autocast(self) -> AbstractContextManager:
        """The precision the model runs in."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.training.dtype == "bfloat16")

    def train_step(self) -> StepMetrics:
        """One optimizer step on the next batch.

        Raises:
            TrainingError: loss or gradient is not finite; the weights are as they were.
        """
        start = time.perf_counter()
        inputs, targets = (t.to(self.device) for t in self.batches.batch(self.next_batch))
        with self.autocast():
            output = self.forward(input_ids=inputs, memory=self.memory, shift_labels=targets)
        self.optimizer.zero_grad()
        output.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.training.grad_clip or math.inf)
        loss_value, norm_value = torch.stack((output.loss.detach(), norm)).tolist()  # waits for the device once
        self._require_finite(loss_value, norm_value)
        learning_rate = learning_rate_at(self.step + 1, self.training)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.memory = output.memory
        self.step += 1
        self.next_batch += 1
        return StepMetrics(
            loss=loss_value,
            learning_rate=learning_rate,
            gradient_norm=norm_value,
            seconds=time.perf_counter() - start,
        )

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Tensors of a checkpoint, by file."""
        optimizer = {
            f"{name}.{key}": value
            for name, parameter in self.model.named_parameters()
            for key, value in self.optimizer.state[parameter].items()
        }
        memory = {f"layers.{layer}": states for layer, states in enumerate(self.memory or ())}
        return {"model": model_tensors(self.model), "optimizer": optimizer, "memory": memory}

    def state(self) -> dict[str, Any]:
        """The rest of a checkpoint, as JSON values."""
        random = {"cpu": _to_text(torch.get_rng_state())}
        if self.device.type == "cuda":
            random["cuda"] = _to_text(torch.cuda.get_rng_state(self.device))
        return {"data": {"next_batch": self.next_batch}, "random": random}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back to where a checkpoint was written.

        Raises:
            CheckpointError: it does not fit the model.
        """
        load_model(self.model, checkpoint)
        self._restore_optimizer(checkpoint.tensors("optimizer"))
        memory = checkpoint.tensors("memory")
        self.memory = tuple(memory[f"layers.{i}"].to(self.device) for i in range(len(memory))) or None
        self.step = checkpoint.step
        self.next_batch = checkpoint.state["data"]["next_batch"]
        random = checkpoint.state["random"]
        torch.set_rng_state(_from_text(random["cpu"]))
        if self.device.type == "cuda" and "cuda" in random:
            torch.cuda.set_rng_state(_from_text(random["cuda"]), self.device)

    def _restore_optimizer(self, tensors: dict[str, Tensor]) -> None:
        by_name: dict[str, dict[str, Tensor]] = {}
        for full_name, value in tensors.items():
            name, key = full_name.rsplit(".", 1)
            by_name.setdefault(name, {})[key] = value
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        parameters: Sequence[Tensor] = [p for group in self.optimizer.param_groups for p in group["params"]]
        state = {i: by_name[names[p]] for i, p in enumerate(parameters) if names[p] in by_name}
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})

    def _require_finite(self, loss: float, gradient_norm: float) -> None:
        for name, value in (("loss", loss), ("gradient norm", gradient_norm)):
            if not math.isfinite(value):
                raise TrainingError(
                    f"the {name} is {value} at step {self.step + 1}; the weights were left as they are. Resume from "
                    f"the last checkpoint, or start again with a lower learning_rate (now "
                    f"{self.training.learning_rate:g}), a longer warm-up or stronger clipping"
                )


def _make_optimizer(model: SwitchHeadForCausalLM, training: TrainingConfig) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=training.learning_rate, betas=training.betas, eps=training.eps, fused=True)


def _to_text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _from_text(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

"""Model, optimizer and everything else that changes from step to step."""

from __future__ import annotations

import base64
import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from switchhead.data import Batches
from switchhead.errors import RunError, TrainingError
from switchhead.hf import SwitchHeadConfig, SwitchHeadForCausalLM
from switchhead.nn import Router
from switchhead.ops import document_boundaries
from switchhead.runs import Checkpoint, load_model, model_tensors
from switchhead.train.config import TrainingConfig
from switchhead.train.diagnosis import first_nonfinite_gradient, first_nonfinite_module
from switchhead.train.distributed import ALONE, Parallel, Parallelism, World, sharded_like, whole, whole_on_first
from switchhead.train.graphs import ReplayedPasses, graph_obstacle, record_cuda_graph
from switchhead.train.loss_scale import LossScale
from switchhead.train.optimizer import load_optimizer, make_optimizer, optimizer_tensors
from switchhead.train.passes import Memory, Passes
from switchhead.train.schedule import learning_rate_at
from switchhead.train.usage import ExpertUsage, measure_usage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What one step measured, over all ranks.

    Attributes:
        loss: cross-entropy in nats per token, without the auxiliary losses.
        auxiliary_losses: by name, before their weights.
        learning_rate: of the step.
        gradient_norm: before clipping.
        loss_scale: of float16.
        skipped: whether the weights were left as they were.
        seconds: that it took.
    """

    loss: float
    learning_rate: float
    gradient_norm: float
    seconds: float
    auxiliary_losses: Mapping[str, float] = field(default_factory=dict)
    loss_scale: float = 1.0
    skipped: bool = False


class Trainer:
    """A model in training; `tensors` with `state`, and `restore`, carry all of it, so that a restored one goes on bit
    for bit.

    Args:
        model: what to train.
        training: how.
        batches: on what.
        device: of this rank.
        world: the ranks; each runs its share of every batch.
        parallel: how they share the model.

    Raises:
        RunError: `training.cuda_graphs` where there are none.
    """

    def __init__(
        self,
        model: SwitchHeadConfig,
        training: TrainingConfig,
        batches: Batches,
        device: torch.device,
        world: World = ALONE,
        parallel: Parallel = "ddp",
    ) -> None:
        if training.cuda_graphs and (obstacle := graph_obstacle(device)):
            raise RunError(f"cuda_graphs is True, but {obstacle}: set it to False (--cuda-graphs off)")
        torch.manual_seed(training.seed)
        self.training, self.batches, self.device, self.world = training, batches, device, world
        self.model = SwitchHeadForCausalLM(model)
        self.model.to(device).train()  # pyright: ignore[reportArgumentType] (transformers hides the signature)
        self.parallelism = Parallelism(self.model, world, parallel, compile=training.compile)
        self.optimizer = make_optimizer(self.model, training)
        self.loss_scale = LossScale.of(training.dtype)
        half = torch.float16 if training.dtype == "float16" else torch.bfloat16
        self.autocast = functools.partial(torch.autocast, device.type, half, enabled=training.dtype != "float32")
        self.passes: Callable[..., Any] = Passes(self.parallelism, world.size, self.autocast)
        if training.cuda_graphs:
            record = functools.partial(record_cuda_graph, device=device)
            self.passes = ReplayedPasses(self.passes, self.model.parameters(), record)
        self.step = 0
        self.next_batch = 0
        self.n_nonfinite = 0
        self._rows = world.share(batches.batch_size)
        self._parts = _split(batches.batch_size, training.micro_batch_size or batches.batch_size, world)
        self.memory: list[Memory] = [None] * len(self._parts)  # of every micro-batch
        self._loaded: tuple[int, list[_MicroBatch]] | None = None
        self._n_boundaries = 0
        if world.rank:  # rank 0 draws what a process on its own would
            torch.manual_seed(training.seed + 1_000_003 * world.rank)

    def train_step(self) -> StepMetrics:
        """One optimizer step on the next batch.

        Raises:
            TrainingError: loss or gradient is not finite; the weights are as they were.
        """
        start = time.perf_counter()
        random = self._random_state()
        batch = self._take(self.next_batch)
        parts = [(part.arguments, part.share, memory) for part, memory in zip(batch, self.memory, strict=True)]
        scale = torch.full((), self.loss_scale.scale, device=self.device)
        self.optimizer.zero_grad()
        batch_loss, auxiliary, memory = self.passes(parts, scale)
        norm = self._unscaled_norm()
        self._loaded = self.next_batch + 1, self._load(self.next_batch + 1)  # while the device is still at work
        learning_rate = learning_rate_at(self.step + 1, self.training)
        alone = self.world.size == 1
        if alone:  # no other rank is asked, so the device need not be waited for before its next work is launched
            self._update(learning_rate, norm, torch.isfinite(batch_loss) & torch.isfinite(norm))
        measured = torch.stack([batch_loss, norm, *auxiliary.values()])
        loss, norm_value, *others = measured.tolist()  # the only wait for the device
        loss, *others = self.world.sum([loss, *others])
        finite = math.isfinite(loss) and math.isfinite(norm_value)
        overflowed = math.isfinite(loss) and self.loss_scale.overflowed(finite=finite)
        if not finite and not overflowed:
            self._skip_or_raise(loss, norm_value, random)
        if finite and not alone:
            self._update(learning_rate, norm)
        used_scale = self.loss_scale.scale
        self.loss_scale.update(finite=finite)
        self.memory = memory if math.isfinite(loss) else [None] * len(memory)
        self.step += 1
        self.next_batch += 1
        return StepMetrics(
            loss=loss,
            learning_rate=learning_rate,
            gradient_norm=norm_value,
            seconds=time.perf_counter() - start,
            auxiliary_losses=dict(zip(auxiliary, others, strict=True)),
            loss_scale=used_scale,
            skipped=not finite,
        )

    def measure_usage(self) -> dict[str, ExpertUsage]:
        """Expert usage of every router on the coming step's batch, without dropout."""
        if not any(isinstance(module, Router) for module in self.model.modules()):
            return {}
        batch = self._take(self.next_batch)
        passes = [(functools.partial(self._repeat_forward, i), part.share > 0) for i, part in enumerate(batch)]
        self.model.eval()
        try:
            with self.parallelism.eager():
                return measure_usage(self.model, passes, self.world)
        finally:
            self.model.train()

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Tensors of a checkpoint, by file, whole on rank 0; every rank has to ask."""
        parts = [part for part in self.memory if part is not None]
        mine = [torch.cat(layer) for layer in zip(*parts, strict=True)]
        memory = self.world.gather_rows(mine, self.batches.batch_size)
        return {
            "model": {name: whole_on_first(value) for name, value in model_tensors(self.model).items()},
            "optimizer": optimizer_tensors(self.optimizer, self.model),
            "memory": {f"layers.{layer}": states for layer, states in enumerate(memory)},
        }

    def state(self) -> dict[str, Any]:
        """The rest of a checkpoint, as JSON values; every rank has to ask."""
        gathered = [self.world.gather(state) for state in self._random_state()]  # [kind][rank]
        by_rank = [
            dict(zip(("cpu", "cuda"), map(_to_text, states), strict=False)) for states in zip(*gathered, strict=True)
        ]
        return {
            "data": {"next_batch": self.next_batch},
            "random": by_rank[0],
            "random_of_other_ranks": by_rank[1:],
            "loss_scale": self.loss_scale.state(),
            "nonfinite_steps": self.n_nonfinite,
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back to where a checkpoint was written, on whatever number of ranks.

        Raises:
            CheckpointError: it does not fit the model.
        """
        state = checkpoint.state
        load_model(self.model, checkpoint, place=sharded_like)
        load_optimizer(self.optimizer, self.model, checkpoint.tensors("optimizer"))
        self._restore_memory(checkpoint.tensors("memory"))
        self.step = checkpoint.step
        self.next_batch = state["data"]["next_batch"]
        if "loss_scale" in state:
            self.loss_scale.restore(state["loss_scale"])
        self.n_nonfinite = state.get("nonfinite_steps", 0)
        by_rank = [state["random"], *state.get("random_of_other_ranks", ())]
        if self.world.rank < len(by_rank):
            random = by_rank[self.world.rank]
            self._set_random_state([_from_text(random[kind]) for kind in ("cpu", "cuda") if kind in random])
        else:  # a rank that was not there; its stream must not repeat what it drew at the start
            torch.manual_seed(self.training.seed + 1_000_003 * self.world.rank + 7919 * self.step)

    def _take(self, number: int) -> list[_MicroBatch]:
        """This rank's micro-batches of a batch, on its device."""
        if self._loaded is None or self._loaded[0] != number:
            self._loaded = number, self._load(number)
        return self._loaded[1]

    def _load(self, number: int) -> list[_MicroBatch]:
        batch = self.batches.batch(number, self._rows or range(1))
        loaded = []
        for part in self._parts:
            # A rank without rows left runs one that does not count: all have to take part in every exchange.
            rows = batch.rows(part or slice(1))
            arguments: dict[str, Any] = {"input_ids": rows.inputs, "shift_labels": rows.targets}
            if rows.position_ids is not None:
                arguments["position_ids"] = rows.position_ids
                arguments["cu_seqlens"] = self._pad_boundaries(document_boundaries(rows.position_ids))
            arguments = {name: self._to_device(value) for name, value in arguments.items()}
            arguments["loss_chunk_length"] = self.training.loss_chunk_length
            loaded.append(_MicroBatch(arguments, len(rows) / self.batches.batch_size if part else 0.0))
        return loaded

    def _pad_boundaries(self, boundaries: Tensor) -> Tensor:
        """Boundaries with documents of no tokens behind them, up to a power of two: recorded shapes must not vary."""
        if not self.training.cuda_graphs:
            return boundaries
        self._n_boundaries = max(self._n_boundaries, 1 << (len(boundaries) - 1).bit_length())
        return F.pad(boundaries, (0, self._n_boundaries - len(boundaries)), value=boundaries[-1].item())

    def _to_device(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cuda":  # from pinned memory the host need not wait for the copy
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)

    @torch.no_grad()
    def _repeat_forward(self, index: int) -> None:
        """Run a micro-batch of the coming step through the plain model."""
        with self.autocast():
            self.model(**self._take(self.next_batch)[index].arguments, memory=self.memory[index])

    def _unscaled_norm(self) -> Tensor:
        """Undo the loss scale; the norm of the gradient, over all shards."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        if self.loss_scale.scale != 1:
            for gradient in gradients:
                gradient.mul_(1 / self.loss_scale.scale)
        return whole(torch.nn.utils.get_total_norm(gradients)).to(self.device)

    def _update(self, learning_rate: float, norm: Tensor, finite: Tensor | None = None) -> None:
        """Clip and step. Where `finite` is false, which only the device knows, all stays as it is."""
        if finite is not None:
            norm = norm.where(finite, 0.0)
        if self.training.grad_clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.training.grad_clip, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        # How `torch.amp.GradScaler` tells a fused optimizer.
        self.optimizer.found_inf = None if finite is None else (~finite).float()  # pyright: ignore[reportAttributeAccessIssue]
        self.optimizer.step()
        del self.optimizer.found_inf  # pyright: ignore[reportAttributeAccessIssue]

    def _skip_or_raise(self, loss: float, gradient_norm: float, random: Sequence[Tensor]) -> None:
        name, value = ("loss", loss) if not math.isfinite(loss) else ("gradient norm", gradient_norm)
        what = f"the {name} is {value} at step {self.step + 1}; the weights were left as they are"
        if self.n_nonfinite < self.training.skip_nonfinite:
            self.n_nonfinite += 1
            self._warn("%s (%d of %d such steps)", what, self.n_nonfinite, self.training.skip_nonfinite)
            return
        error = TrainingError(
            f"{what}. {self._find_nonfinite(random)}. Resumed as it is, the run would come here again: go on from the "
            f"last checkpoint with --allow-changes and a lower learning_rate (now {self.training.learning_rate:g}), "
            "stronger clipping or skip_nonfinite, or start again"
        )

        def fail() -> None:
            raise error

        self.world.first(fail)

    def _find_nonfinite(self, random: Sequence[Tensor]) -> str:
        """Run the step's forward again, with the same dropout, to see where it stops being finite."""
        gradient = first_nonfinite_gradient(self.model, self.world)
        after = self._random_state()
        self._set_random_state(random)
        try:
            for index in range(len(self._parts)):
                forward = functools.partial(self._repeat_forward, index)
                with self.parallelism.eager():
                    module = first_nonfinite_module(self.model, forward, self.world)
                if module:
                    return f"The first module whose output is not finite is {module}"
        finally:
            self._set_random_state(after)
        if gradient:
            return f"All modules' outputs are finite; going back, the gradient of {gradient} is the first that is not"
        return "All modules' outputs are finite when the step is repeated"

    def _restore_memory(self, memory: dict[str, Tensor]) -> None:
        """Give this rank the lanes of its rows; a batch of another size starts without memory."""
        layers = [memory[f"layers.{i}"] for i in range(len(memory))]
        if layers and len(layers[0]) != self.batches.batch_size:
            self._warn("the checkpoint's memory is of %d lanes: starting without it", len(layers[0]))
            layers = []
        mine = [states[self._rows.start : self._rows.stop] for states in layers]
        self.memory = [
            tuple(states[part].to(self.device) for states in mine) if part and mine else None for part in self._parts
        ]

    def _warn(self, message: str, *values: object) -> None:
        """What holds for all ranks is said once."""
        if self.world.is_first:
            logger.warning(message, *values)

    def _random_state(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        return [*states, torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else states

    def _set_random_state(self, states: Sequence[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self.device.type == "cuda" and len(states) > 1:
            torch.cuda.set_rng_state(states[1], self.device)


@dataclass(frozen=True)
class _MicroBatch:
    """Arguments of the model's forward, and the share of its loss in the batch's."""

    arguments: dict[str, Any]
    share: float


def _split(batch_size: int, size: int, world: World) -> list[slice | None]:
    """Micro-batches of this rank's rows: as many as the rank with most rows has, None where it has none left."""
    most, mine = (len(World(rank, world.size).share(batch_size)) for rank in (0, world.rank))
    return [slice(start, min(start + size, mine)) if start < mine else None for start in range(0, most, size)]


def _to_text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _from_text(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

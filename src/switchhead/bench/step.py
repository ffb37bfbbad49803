"""Whole training steps: data, forward, backward, clipping, optimizer."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from switchhead.accounting import count_parameters
from switchhead.data import Batches, LaneBatches, WindowBatches
from switchhead.hf import SwitchHeadConfig
from switchhead.train import TrainingConfig
from switchhead.train.distributed import ALONE, Parallel, World
from switchhead.train.hardware import peak_memory, peak_tokens_per_second
from switchhead.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """Cost of a step of one model.

    Attributes:
        name: of the recipe.
        parameters: of the model.
        batch_size: sequences in a step, over all ranks.
        chunk_length: tokens of each.
        ms: median milliseconds of a step.
        tokens_per_second: by it.
        utilization: floating-point operations of the model's matrix products over the peak of all devices; None where
            the peak is not known.
        peak_bytes: most memory allocated on this rank's GPU; None on a CPU, where it cannot be told from the process's.
        loader_share: part of a step that making its batch takes.
    """

    name: str
    parameters: int
    batch_size: int
    chunk_length: int
    ms: float
    tokens_per_second: float
    utilization: float | None
    peak_bytes: int | None
    loader_share: float


def bench_steps(
    models: Iterable[tuple[str, SwitchHeadConfig, TrainingConfig]],
    device: torch.device,
    *,
    steps: int = 20,
    warmup: int = 5,
    world: World = ALONE,
    parallel: Parallel = "ddp",
) -> Iterator[StepRow]:
    """Measure steps of models one after the other, on random tokens, as training runs them.

    Args:
        models: names, models and how they are trained.
        device: of this rank.
        steps: that are timed.
        warmup: steps before, with which compilation, the memory of Transformer-XL and the recording of CUDA graphs are
            done.
        world: the ranks that train together.
        parallel: how they share the model.
    """
    for name, model, training in models:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        batches = random_batches(model, training)
        trainer = Trainer(model, training, batches, device, world, parallel)
        for _ in range(warmup):
            trainer.train_step()
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            trainer.train_step()
            seconds.append(time.perf_counter() - start)
        step = statistics.median(seconds)
        tokens = training.batch_size * training.chunk_length
        peak = peak_tokens_per_second(model, chunk_length=training.chunk_length, device=device, dtype=training.dtype)
        yield StepRow(
            name=name,
            parameters=count_parameters(model).total,
            batch_size=training.batch_size,
            chunk_length=training.chunk_length,
            ms=step * 1e3,
            tokens_per_second=tokens / step,
            utilization=peak and tokens / step / (peak * world.size),
            peak_bytes=peak_memory(device) if device.type == "cuda" else None,
            loader_share=_loading_seconds(batches, world) / step,
        )
        del trainer
        gc.collect()
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def steps_as_table(rows: Sequence[StepRow]) -> str:
    """Markdown: a line a model, and its ratios to the last one."""
    lines = [
        "| recipe | parameters | batch x length | ms | tokens/s | utilisation | peak GiB | loader "
        f"| ms / {rows[-1].name} | peak / {rows[-1].name} |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        used = "" if row.utilization is None else f"{row.utilization:.1%}"
        peak = "" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.2f}"
        twin = rows[-1].peak_bytes
        less = "" if row.peak_bytes is None or twin is None else f"{row.peak_bytes / twin:.2f}"
        lines.append(
            f"| {row.name} | {row.parameters:,} | {row.batch_size} x {row.chunk_length} | {row.ms:.1f} "
            f"| {row.tokens_per_second:,.0f} | {used} | {peak} | {row.loader_share:.2%} | {row.ms / rows[-1].ms:.2f} "
            f"| {less} |"
        )
    return "\n".join(lines)


def random_batches(model: SwitchHeadConfig, training: TrainingConfig) -> Batches:
    """Batches of random tokens, as training would read them."""
    n_tokens = max(2**20, 4 * training.chunk_length)
    tokens = np.random.default_rng(0).integers(model.vocab_size, size=n_tokens, dtype=np.uint32)
    if model.memory_length:
        return LaneBatches(tokens, training.batch_size, training.chunk_length)
    beginning = 0 if training.mask_documents else None
    return WindowBatches(tokens, training.batch_size, training.chunk_length, training.seed, beginning=beginning)


def _loading_seconds(batches: Batches, world: World) -> float:
    times = []
    for number in range(20):
        start = time.perf_counter()
        batches.batch(number, world.share(batches.batch_size))
        times.append(time.perf_counter() - start)
    return statistics.median(times)

"""Generation: reading prompts and decoding behind them, a model beside its twin."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from switchhead.bench.timing import WARM_UPS, alternating_ms, captured
from switchhead.hf import SwitchHeadConfig, SwitchHeadForCausalLM
from switchhead.hf.caches import fixed_cache, growing_cache

TOKENS = 16  # decoded in one repetition, as a loop does it: the host does not wait between them

Phase = Literal["prefill", "decode"]
Launch = Literal["host", "graph"]
Choose = Callable[[nn.Module, Tensor, Any], Tensor]
Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class GenerationCost:
    """What one model needs for a batch.

    Attributes:
        ms: median milliseconds: of all prompts, or of the next token of every sequence.
        cache_bytes: keys and values of all layers, slots not yet filled included.
        peak_bytes: most memory held on a GPU at once: parameters, cache, and what is computed; None on a CPU, and of
            replays, which hold memory of their own.
    """

    ms: float
    cache_bytes: int
    peak_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class GenerationRow:
    """A model and its twin in one situation.

    Attributes:
        phase: "prefill" reads prompts into an empty cache; "decode" adds a token to every sequence.
        launch: "host", or "graph" for replays of a CUDA graph.
        batch_size: sequences.
        length: tokens of a prompt, or that the cache holds before.
        ours: cost of the model; None where one of both failed.
        twin: cost of the twin, likewise.
        failure: what was raised instead.
    """

    phase: Phase
    launch: Launch
    batch_size: int
    length: int
    ours: GenerationCost | None = None
    twin: GenerationCost | None = None
    failure: str | None = None

    @property
    def ratio(self) -> float | None:
        """Time of the model over time of the twin."""
        return None if self.ours is None or self.twin is None else self.ours.ms / self.twin.ms


def bench_generation(
    ours: SwitchHeadConfig,
    twin: SwitchHeadConfig,
    device: torch.device,
    *,
    dtype: Dtype | None = None,
    lengths: Sequence[int] = (512, 2048, 8192),
    prompts: Sequence[int] = (1, 8),
    batch_sizes: Sequence[int] = (1, 8, 64),
    compile: bool = False,
    repeats: int = 10,
) -> Iterator[GenerationRow]:
    """Measure untrained models on random tokens, both by turns, a row at a time.

    A row that fails, for want of memory for instance, says so, and the others follow.

    Args:
        ours: the model.
        twin: what it is compared with.
        device: where.
        dtype: of parameters, computation and cache; None: bfloat16 on a GPU, float32 on a CPU.
        lengths: of prompts, and of what a cache holds before decoding.
        prompts: numbers of prompts that are read at once.
        batch_sizes: numbers of sequences that are decoded at once.
        compile: run both through `torch.compile`, for each row anew, which takes most of the time then.
        repeats: that are timed, in decoding of `TOKENS` tokens each.

    Raises:
        ValueError: a model with relative positions, for which there are no static caches.
    """
    for config in (ours, twin):
        if config.positions == "relative":
            raise ValueError("a static cache does not go with relative positions; use recipes with rotary ones or none")
    phases: list[tuple[Phase, Sequence[int]]] = [("prefill", prompts), ("decode", batch_sizes)]
    situations: list[tuple[Phase, int, int]] = [
        (phase, size, length) for phase, sizes in phases for length in lengths for size in sizes
    ]
    of_device = torch.bfloat16 if device.type == "cuda" else torch.float32
    chosen = of_device if dtype is None else getattr(torch, dtype)
    return _rows((ours, twin), situations, device, dtype=chosen, compile=compile, repeats=repeats)


def _rows(
    configs: Sequence[SwitchHeadConfig],
    situations: Sequence[tuple[Phase, int, int]],
    device: torch.device,
    *,
    dtype: torch.dtype,
    compile: bool,
    repeats: int,
) -> Iterator[GenerationRow]:
    torch.manual_seed(0)
    with device:
        models = [_model(config, dtype) for config in configs]
    for phase, batch_size, length in situations:
        row = partial(GenerationRow, phase=phase, batch_size=batch_size, length=length)
        launch: Launch = "host"
        try:
            for ours, twin in _measure(models, phase, batch_size, length, device, compile=compile, repeats=repeats):
                yield row(launch=launch, ours=ours, twin=twin)
                launch = "graph"
        except Exception as error:
            yield row(launch=launch, failure=_told(error))


@torch.no_grad()
def _measure(
    models: Sequence[SwitchHeadForCausalLM],
    phase: Phase,
    batch_size: int,
    length: int,
    device: torch.device,
    *,
    compile: bool,
    repeats: int,
) -> Iterator[list[GenerationCost]]:
    """Costs of each model: launched by the host, then, in decoding on a GPU, replayed."""
    if compile:
        torch.compiler.reset()
    gc.collect()
    on_gpu = device.type == "cuda"
    with torch.cuda.device(device) if on_gpu else contextlib.nullcontext():
        if on_gpu:
            torch.cuda.empty_cache()
        # One function for both phases and models; shapes are compiled as they are, as for a server that knows them.
        choose: Choose = torch.compile(_choose, fullgraph=True, dynamic=False) if compile else _choose
        if phase == "prefill":
            runs = [_Prefill(model, batch_size, length, choose) for model in models]
            tokens = 1
        else:
            runs = [_Decoding(model, batch_size, length, choose) for model in models]
            tokens = TOKENS
        for which, run in zip(("ours", "twin"), runs, strict=True):
            try:
                for _ in range(WARM_UPS):
                    run.prepare()
                    run.step()
            except Exception as error:
                error.add_note(f"in {which}")
                raise
        caches = [_cache_bytes(run.cache) for run in runs]
        peaks = [_peak_bytes(run, device) if on_gpu else None for run in runs]

        def costs(steps: Sequence[Callable[[], object]], peaks: Sequence[int | None]) -> list[GenerationCost]:
            prepares = [run.prepare for run in runs]
            times = alternating_ms([_repeated(step, tokens) for step in steps], prepares, device, repeats=repeats)
            return [
                GenerationCost(ms=ms / tokens, cache_bytes=cache, peak_bytes=peak)
                for ms, cache, peak in zip(times, caches, peaks, strict=True)
            ]

        launched = costs([run.step for run in runs], peaks)
    yield launched
    if phase == "decode" and on_gpu:
        with torch.cuda.device(device):
            replayed = costs([captured(run.step, clear=run.prepare) for run in runs], [None] * len(runs))
        yield replayed


def _model(config: SwitchHeadConfig, dtype: torch.dtype) -> SwitchHeadForCausalLM:
    return SwitchHeadForCausalLM(config).to(dtype).eval()  # pyright: ignore[reportArgumentType] (as in runs.py)


class _Prefill:
    """Prompts read into an empty cache that grows; the first token behind each is chosen."""

    def __init__(self, model: SwitchHeadForCausalLM, batch_size: int, length: int, choose: Choose) -> None:
        self.model, self.choose = model, choose
        self.prompts = torch.randint(model.config.vocab_size, (batch_size, length), device=model.device)
        self.cache: Any = growing_cache(model.config)

    def prepare(self) -> None:
        self.cache = growing_cache(self.model.config)

    def step(self) -> None:
        self.choose(self.model, self.prompts, self.cache)


class _Decoding:
    """A token more for every sequence, behind a static cache that is filled at random; the device knows how far.

    Each step reads the same random tokens and not the ones chosen: an untrained model would soon repeat one of them,
    and all its sequences choose the same experts.
    """

    def __init__(self, model: SwitchHeadForCausalLM, batch_size: int, length: int, choose: Choose) -> None:
        self.model, self.length, self.choose = model, length, choose
        self.tokens = torch.randint(model.config.vocab_size, (batch_size, 1), device=model.device)
        slots = -(-(length + TOKENS) // 64) * 64  # masks of odd lengths would be copied for kernels that want them even
        self.cache: Any = fixed_cache(model.config, slots)
        model(self.tokens, cache=self.cache)  # allocates it, in the sizes of the model's kind
        for layer in self.cache.layers:
            layer.keys.normal_()
            layer.values.normal_()

    def prepare(self) -> None:
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.length)

    def step(self) -> None:
        self.choose(self.model, self.tokens, self.cache)


def _choose(model: nn.Module, tokens: Tensor, cache: Any) -> Tensor:
    """The likeliest token behind each sequence, `[B, 1]`."""
    return model(tokens, cache=cache, logits_to_keep=1).logits.argmax(-1)


def _repeated(step: Callable[[], object], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            step()

    return run


def _cache_bytes(cache: Any) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def _peak_bytes(run: _Prefill | _Decoding, device: torch.device) -> int:
    """Most bytes during a step: what else there is on the device, the other model for instance, does not count."""
    held = sum(parameter.nbytes for parameter in run.model.parameters())
    if isinstance(run, _Decoding):  # in prefill the step itself makes the cache
        held += _cache_bytes(run.cache)
    run.prepare()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run.step()
    torch.cuda.synchronize(device)
    return held + torch.cuda.max_memory_allocated(device) - before


def _told(error: BaseException) -> str:
    """An error with its notes, and the one that it hides, on one line: leaving a capture that failed raises another."""
    chain = [error] if error.__context__ is None else [error, error.__context__]
    notes = ", ".join(getattr(error, "__notes__", []))
    told = "; after ".join(f"{type(e).__name__}: {next(iter(str(e).splitlines()), '')}" for e in chain)
    return f"{notes}: {told}" if notes else told


def _mib(n_bytes: int) -> str:
    mib = n_bytes / 2**20
    return f"{mib:.0f}" if mib >= 100 else f"{mib:.3g}"


def generation_as_table(rows: Sequence[GenerationRow]) -> str:
    """Markdown: a line a row; memory in MiB."""
    lines = [
        "| phase | launched by | batch x length | twin ms | ours ms | / twin "
        "| cache MiB: twin | ours | / twin | peak MiB: twin | ours | / twin |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        start = f"| {row.phase} | {row.launch} | {row.batch_size} x {row.length} "
        if row.ours is None or row.twin is None:
            failure = (row.failure or "").replace("|", "/")
            lines.append(f"{start}| {failure} |" + " |" * 8)
            continue
        cells = [f"{row.twin.ms:.3f}", f"{row.ours.ms:.3f}", f"{row.ratio:.2f}"]
        for theirs, own in ((row.twin.cache_bytes, row.ours.cache_bytes), (row.twin.peak_bytes, row.ours.peak_bytes)):
            if theirs is None or own is None:
                cells += [""] * 3
            else:
                cells += [_mib(theirs), _mib(own), f"{own / theirs:.2f}"]
        lines.append(f"{start}| {' | '.join(cells)} |")
    return "\n".join(lines)

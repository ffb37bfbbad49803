"""`train`: from a configuration and text to a run directory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
import signal
import statistics
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from switchhead.data import Batches, Corpus, LaneBatches, TokenArray, Vocabulary, WindowBatches, open_corpus
from switchhead.errors import CheckpointError, DataError, RunError, TrainingError
from switchhead.eval.perplexity import Evaluation, score_tokens
from switchhead.hf import SwitchHeadConfig
from switchhead.runs import Checkpoint, RunDirectory, choose_device, newest_checkpoint, open_run, read_checkpoint
from switchhead.train.checkpoint import write_checkpoint
from switchhead.train.config import TrainingConfig
from switchhead.train.distributed import Parallel, World, fact_of, join_world
from switchhead.train.hardware import peak_memory, peak_tokens_per_second
from switchhead.train.metrics import MetricsLog, NoMetrics
from switchhead.train.progress import ProgressDisplay, make_progress, say
from switchhead.train.run import compare_ranks, create_run, describe_run, lock_run, reopen_run
from switchhead.train.trackers import Service, Tracker, load_service
from switchhead.train.trainer import StepMetrics, Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a call of `train` came to.

    Attributes:
        run: the run directory.
        step: steps done, over all calls.
        finished: False when a signal ended it early; resume it.
        validation: the last one of this call, if there was any.
        validation_step: of which step that is; before `step` where a signal ended the call between two validations.
        tokens_per_second: training speed, by the median step of this call; None without a step.
        rank: number of this process among those that trained together.
    """

    run: Path
    step: int
    finished: bool
    validation: Evaluation | None
    tokens_per_second: float | None
    validation_step: int | None = None
    rank: int = 0


def train(
    *,
    model: SwitchHeadConfig,
    training: TrainingConfig,
    data: str,
    out: str | Path,
    valid: str | None = None,
    recipe: str | None = None,
    resume: bool = False,
    allow_changes: bool = False,
    device: str = "auto",
    parallel: Parallel = "ddp",
    tracker: Service | None = None,
    progress: bool = True,
) -> TrainingResult:
    """Train a language model on text; everything it makes is in one run directory.

    Started by `torchrun`, all its processes train one model: each runs its rows of every batch, and the first one
    writes the run directory, which all must see. A run goes on with any number of processes.

    Resuming a killed run gives, on the CPU with the same number of threads, bit for bit the losses of one that was
    never interrupted. SIGTERM and SIGHUP, however often, or Ctrl-C once, finish the step and save a checkpoint before
    returning.

    Args:
        model: its vocabulary size, token ids and context length are replaced by those of the text and `training`.
        training: see there.
        data: training text, as `switchhead.data.open_corpus` takes it.
        out: the run directory; new or empty unless `resume`.
        valid: validation text; default: the tail of the training text, which is then not trained on.
        recipe: name to record.
        resume: go on from the newest checkpoint in `out`; where there is none, begin, and log a warning that says so.
        allow_changes: resume although model, training or data are not the run's; the differences are recorded.
        device: "auto" (CUDA if there is any), or a torch device.
        parallel: how several processes share the model: "ddp" keeps it whole in each, "fsdp" shards it.
        tracker: a service that shows the run too.
        progress: show it on standard error.

    Raises:
        DataError: the text cannot be read or is too short.
        RunError: `out` holds something else or another process trains there, `device` does not exist or has no CUDA
            graphs, ranks do not agree, or the caller has set up a process group of `torch.distributed`.
        CheckpointError: no checkpoint in `out` can be used, or one cannot be saved; earlier ones survive.
        TrainingError: the loss is not finite, the GPU's memory does not suffice, or another process was lost.
    """
    place = choose_device(device)
    with join_world(place) as world, contextlib.ExitStack() as lock:
        place = world.place(place)

        def read() -> tuple[Corpus, SwitchHeadConfig, Batches]:
            if tracker is not None and world.is_first:
                load_service(tracker)
            # One rank compares checksums, for all.
            corpus = open_corpus(data, valid, validation_fraction=training.validation_fraction, verify=world.is_first)
            fitted = _fit(model, corpus.vocabulary, training)
            try:
                return corpus, fitted, _make_batches(fitted, training, corpus)
            except DataError as error:
                raise DataError(f"{data}: {error}") from error

        corpus, fitted, batches = world.together(read, patient=True)
        vocabulary = corpus.vocabulary
        described = describe_run(
            recipe=recipe,
            model=fitted,
            training=training,
            data={"training": data, "validation": valid, **corpus.description},
        )
        compare_ranks(world, described, parallel=parallel, device=place.type)
        title, show = recipe or Path(out).name, progress and world.is_first
        if show:
            say(title, "building the model")
        trainer = Trainer(fitted, training, batches, place, world, parallel)  # what cannot be built leaves no directory
        opened = functools.partial(reopen_run, allow_changes=allow_changes) if resume else create_run

        def open_locked() -> RunDirectory:
            lock.enter_context(lock_run(Path(out)))
            return opened(Path(out), described, vocabulary)

        created = world.first(open_locked)
        run = world.together(lambda: created or _open_as_other(Path(out), world))
        checkpoint = _newest_checkpoint(run, world)
        if checkpoint is not None:
            world.together(lambda: trainer.restore(checkpoint), patient=True)
        elif resume and world.is_first:
            logger.warning("there is no checkpoint in %s to resume from: a new run begins there", run.path)
        session = _Session(trainer, run, title=title, show=show, tracker=tracker)
        try:
            return session.run_to_end(corpus.validation, vocabulary)
        except RuntimeError as error:
            if "out of memory" not in str(error):  # PyTorch's own error, or one of NCCL or CUDA
                raise
            raise TrainingError(
                f"the GPU's memory does not suffice at step {trainer.step + 1} ({fact_of(error)}): set a "
                f"smaller micro_batch_size (now {training.micro_batch_size or training.batch_size}), a "
                f"loss_chunk_length, {'cuda_graphs False, ' * training.cuda_graphs}or dtype bfloat16"
            ) from error


def _open_as_other(path: Path, world: World) -> RunDirectory:
    try:
        return open_run(path)
    except RunError as error:
        raise RunError(f"rank {world.rank} does not see the run directory that rank 0 writes: {error}") from error


def _newest_checkpoint(run: RunDirectory, world: World) -> Checkpoint | None:
    """The one that the first rank finds; it compares checksums, for all."""
    found = world.first(lambda: newest_checkpoint(run.checkpoints, run.fingerprint), patient=True)
    name, files = world.from_first((found.path.name, found.state["files"]) if found else (None, None))
    if name is None:
        return None

    def read() -> Checkpoint:
        if found:
            return found
        own = read_checkpoint(run.checkpoints / name, run.fingerprint, verify=False)
        if own.state["files"] != files:
            raise CheckpointError(
                f"on rank {world.rank} {own.path} is another checkpoint than on rank 0: all ranks must see one run "
                "directory"
            )
        return own

    return world.together(read)


class _Session:
    """One call's work on a run: step, measure, validate, save, until the end or a signal."""

    def __init__(self, trainer: Trainer, run: RunDirectory, *, title: str, show: bool, tracker: Service | None) -> None:
        self.trainer, self.run, self.training, self.world = trainer, run, trainer.training, trainer.world
        self.title, self.show = title, show
        self.tracker: Service | None = tracker
        self.tokens_per_step = self.training.batch_size * self.training.chunk_length
        self.seconds: list[float] = []
        peak = peak_tokens_per_second(
            trainer.model.config,
            chunk_length=self.training.chunk_length,
            device=trainer.device,
            dtype=self.training.dtype,
        )
        self.peak_tokens = peak and peak * self.world.size

    def run_to_end(self, validation_text: TokenArray, vocabulary: Vocabulary) -> TrainingResult:
        trainer, training = self.trainer, self.training
        if self.show and training.compile and trainer.step < training.steps:
            say(self.title, "compiling: the first step may take a minute or more")
        validation: Evaluation | None = None
        validation_step: int | None = None
        with (
            _StopSignal(show=self.show) as stop,
            self.world.together(self._open_log) as log,
            make_progress(training.steps, trainer.step, self.title, show=self.show) as display,
        ):
            while trainer.step < training.steps:
                measured = trainer.train_step()
                step = trainer.step
                self.seconds.append(measured.seconds)
                self._note(log, self._step_values(measured))
                if step % training.usage_every == 0 and (usage := trainer.measure_usage()):
                    self._note(log, {"experts": {name: dataclasses.asdict(value) for name, value in usage.items()}})
                last = step == training.steps
                if last or step % training.eval_every == 0:
                    validation, validation_step = self._validate(validation_text, vocabulary, display), step
                    self._note(log, _validation_values(validation))
                    display.validated(step, validation.perplexity)
                display.step(step, measured.loss, self.tokens_per_step / statistics.median(self.seconds[-50:]))
                stopping = self.world.any(stop.received)
                if last or stopping or step % training.save_every == 0:
                    self._save(log)
                if stopping:
                    break
        return TrainingResult(
            run=self.run.path,
            step=trainer.step,
            finished=trainer.step >= training.steps,
            validation=validation,
            validation_step=validation_step,
            tokens_per_second=self.tokens_per_step / statistics.median(self.seconds) if self.seconds else None,
            rank=self.world.rank,
        )

    def _open_log(self) -> MetricsLog:
        if not self.world.is_first:
            return NoMetrics()
        trackers = [Tracker(self.tracker, self.run)] if self.tracker else []
        return MetricsLog(self.run.metrics, self.run.tensorboard, step=self.trainer.step, trackers=trackers)

    def _note(self, log: MetricsLog, values: Mapping[str, Any]) -> None:
        """Measurements of the step just done; where they cannot be written, all ranks stop."""
        self.world.together(lambda: log.append(self.trainer.step, values))

    def _validate(self, text: TokenArray, vocabulary: Vocabulary, display: ProgressDisplay) -> Evaluation:
        if self.training.validation_tokens is not None:
            text = text[: self.training.validation_tokens + 1]  # the first one follows nothing, and is not scored
        with self.trainer.autocast(), self.trainer.parallelism.eager():
            return score_tokens(
                self.trainer.model,
                vocabulary,
                text,
                chunk_length=self.training.chunk_length,
                batch_size=self.training.batch_size,
                ranks=self.world,
                report=functools.partial(display.validating, self.trainer.step),
            )

    def _save(self, log: MetricsLog) -> None:
        tensors, state = self.trainer.tensors(), self.trainer.state()

        def write() -> None:
            log.flush()
            write_checkpoint(
                self.run.checkpoints,
                self.trainer.step,
                tensors=tensors,
                state=state,
                fingerprint=self.run.fingerprint,
                keep=self.training.keep_checkpoints,
            )

        self.world.first(write, patient=True)

    def _step_values(self, measured: StepMetrics) -> dict[str, Any]:
        tokens_per_second = self.tokens_per_step / measured.seconds
        values: dict[str, Any] = {
            "loss": measured.loss,
            "perplexity": math.exp(measured.loss) if measured.loss < 700 else math.inf,  # where a float ends
            "learning_rate": measured.learning_rate,
            "gradient_norm": measured.gradient_norm,
            "tokens_per_second": tokens_per_second,
            "model_flops_utilization": self.peak_tokens and tokens_per_second / self.peak_tokens,
            "peak_memory_bytes": peak_memory(self.trainer.device),
        }
        if measured.auxiliary_losses:
            values["auxiliary"] = measured.auxiliary_losses
        if self.training.dtype == "float16":
            values["loss_scale"] = measured.loss_scale
        if measured.skipped:
            values["skipped"] = True
        return values


def _fit(model: SwitchHeadConfig, vocabulary: Vocabulary, training: TrainingConfig) -> SwitchHeadConfig:
    """The model for a vocabulary: a document ends where the next begins, so one token says both."""
    return dataclasses.replace(
        model,
        vocab_size=vocabulary.size,
        bos_token_id=vocabulary.beginning,
        eos_token_id=vocabulary.beginning,
        pad_token_id=None,
        max_position_embeddings=training.chunk_length,
    )


def _make_batches(model: SwitchHeadConfig, training: TrainingConfig, corpus: Corpus) -> Batches:
    sizes = (corpus.training, training.batch_size, training.chunk_length)
    if not training.mask_documents:
        return LaneBatches(*sizes) if model.memory_length else WindowBatches(*sizes, seed=training.seed)
    if model.memory_length or model.positions == "relative":
        raise ValueError("mask_documents is True; it must be False for models with memory or relative positions")
    if corpus.vocabulary.beginning is None:
        raise ValueError("mask_documents is True; it must be False for a vocabulary without a beginning token")
    return WindowBatches(*sizes, seed=training.seed, beginning=corpus.vocabulary.beginning)


def _validation_values(validation: Evaluation) -> dict[str, float]:
    return {
        "validation_loss": validation.loss,
        "validation_perplexity": validation.perplexity,
        "validation_bits_per_byte": validation.bits_per_byte,
    }


class _StopSignal:
    """Notes SIGTERM, Ctrl-C and the end of the terminal instead of dying of them; a second Ctrl-C stops as usual.

    The others come twice without anybody's wish: from the shell and the terminal, or from torchrun and from whoever
    signals all of a job's processes. Signals that the process was started to ignore (`nohup`) stay ignored.

    Args:
        show: say so on standard error.
    """

    def __init__(self, *, show: bool) -> None:
        self.received, self._show = False, show
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> _StopSignal:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        first, self.received = not self.received, True
        if number == signal.SIGINT:
            signal.signal(number, self._previous[number])
            self._say("finishing this step, then saving; once more to stop at once")
        elif number == signal.SIGTERM and first:  # of a terminal that is gone nobody reads
            self._say("finishing this step, then saving")

    def _say(self, line: str) -> None:
        if self._show:  # past Python's buffer, which the signal may have interrupted
            with contextlib.suppress(OSError):
                os.write(2, f"\n{line}\n".encode())

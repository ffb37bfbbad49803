"""`train`: from a configuration and text to a run directory."""

from __future__ import annotations

import dataclasses
import hashlib
import signal
import statistics
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from switchhead.data import ByteVocabulary, LaneBatches, Tokens, Vocabulary, WindowBatches, load_tokens, split_tail
from switchhead.data.batches import Batches, require_one_chunk
from switchhead.errors import DataError
from switchhead.eval.perplexity import Evaluation, score_tokens
from switchhead.hf import SwitchHeadConfig
from switchhead.runs import RunDirectory, choose_device, newest_checkpoint
from switchhead.train.checkpoint import write_checkpoint
from switchhead.train.config import TrainingConfig
from switchhead.train.metrics import MetricsLog
from switchhead.train.progress import make_progress
from switchhead.train.run import create_run, describe_run, reopen_run
from switchhead.train.trainer import StepMetrics, Trainer


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a call of `train` came to.

    Attributes:
        run: the run directory.
        step: steps done, over all calls.
        finished: False when a signal ended it early; resume it.
        validation: the last one of this call, if there was any.
        tokens_per_second: training speed, by the median step of this call; None without a step.
    """

    run: Path
    step: int
    finished: bool
    validation: Evaluation | None
    tokens_per_second: float | None


def train(
    *,
    model: SwitchHeadConfig,
    training: TrainingConfig,
    data: str,
    out: str | Path,
    valid: str | None = None,
    recipe: str | None = None,
    resume: bool = False,
    device: str = "auto",
    progress: bool = True,
) -> TrainingResult:
    """Train a language model on text; everything it makes is in one run directory.

    Resuming a killed run gives, on the CPU with the same number of threads, bit for bit the losses of one that was
    never interrupted. SIGTERM, or Ctrl-C once, finishes the step and saves a checkpoint before returning.

    Args:
        model: its vocabulary size, token ids and context length are replaced by those of the text and `training`.
        training: see there.
        data: training text, as `switchhead.data.read_documents` takes it.
        out: the run directory; new or empty unless `resume`.
        valid: validation text; default: the tail of the training text, which is then not trained on.
        recipe: name to record.
        resume: go on from the newest checkpoint in `out`; from the beginning if it has none.
        device: "auto" (CUDA if there is any), or a torch device.
        progress: show it on standard error.

    Raises:
        DataError: the text cannot be read or is too short.
        RunError: `out` holds something else, or `device` does not exist.
        CheckpointError: no checkpoint in `out` can be used, or one cannot be saved; earlier ones survive.
        TrainingError: the loss is not finite.
    """
    vocabulary = ByteVocabulary()
    texts = _read_texts(data, valid, training, vocabulary)
    model = _fit(model, vocabulary, training)
    place = choose_device(device)
    described = describe_run(
        recipe=recipe,
        model=model,
        training=training,
        data={"training": data, "validation": valid, **texts.describe()},
    )
    run = (reopen_run if resume else create_run)(Path(out), described, vocabulary)
    trainer = Trainer(model, training, _make_batches(model, training, texts.training), place)
    if checkpoint := newest_checkpoint(run.checkpoints, run.fingerprint):
        trainer.restore(checkpoint)
    return _run(trainer, run, texts.validation, vocabulary, title=recipe or run.path.name, show=progress)


def _run(
    trainer: Trainer, run: RunDirectory, validation_text: Tokens, vocabulary: Vocabulary, *, title: str, show: bool
) -> TrainingResult:
    training = trainer.training
    tokens_per_step = training.batch_size * training.chunk_length
    validation: Evaluation | None = None
    seconds: list[float] = []
    with (
        _StopSignal() as stop,
        MetricsLog(run.metrics, run.tensorboard, step=trainer.step) as log,
        make_progress(training.steps, trainer.step, title, show=show) as display,
    ):
        while trainer.step < training.steps:
            measured = trainer.train_step()
            step = trainer.step
            seconds.append(measured.seconds)
            log.append(step, _step_values(measured, tokens_per_step))
            last = step == training.steps
            if last or step % training.eval_every == 0:
                with trainer.autocast():
                    validation = score_tokens(
                        trainer.model,
                        vocabulary,
                        validation_text,
                        chunk_length=training.chunk_length,
                        batch_size=training.batch_size,
                    )
                log.append(step, _validation_values(validation))
                display.validated(step, validation.perplexity)
            display.step(step, measured.loss, tokens_per_step / statistics.median(seconds[-50:]))
            stopping = stop.received
            if last or stopping or step % training.save_every == 0:
                log.flush()
                write_checkpoint(
                    run.checkpoints,
                    step,
                    tensors=trainer.tensors(),
                    state=trainer.state(),
                    fingerprint=run.fingerprint,
                    keep=training.keep_checkpoints,
                )
            if stopping:
                break
    return TrainingResult(
        run=run.path,
        step=trainer.step,
        finished=trainer.step == training.steps,
        validation=validation,
        tokens_per_second=tokens_per_step / statistics.median(seconds) if seconds else None,
    )


@dataclass(frozen=True)
class _Texts:
    training: Tokens
    validation: Tokens

    def describe(self) -> dict[str, int | str]:
        digest = hashlib.sha256(self.training.tobytes())
        digest.update(self.validation.tobytes())
        return {
            "training_tokens": len(self.training),
            "validation_tokens": len(self.validation),
            "sha256": digest.hexdigest(),
        }


def _read_texts(data: str, valid: str | None, training: TrainingConfig, vocabulary: Vocabulary) -> _Texts:
    tokens = load_tokens(data, vocabulary)
    if valid is None:
        texts = _Texts(*split_tail(tokens, training.validation_fraction, vocabulary))
    else:
        texts = _Texts(tokens, load_tokens(valid, vocabulary))
    try:
        require_one_chunk(texts.training, training.chunk_length)
    except DataError as error:
        raise DataError(f"{data}: {error}") from error
    return texts


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


def _make_batches(model: SwitchHeadConfig, training: TrainingConfig, tokens: Tokens) -> Batches:
    if model.memory_length:
        return LaneBatches(tokens, training.batch_size, training.chunk_length)
    return WindowBatches(tokens, training.batch_size, training.chunk_length, training.seed)


def _step_values(measured: StepMetrics, tokens_per_step: int) -> dict[str, float]:
    return {
        "loss": measured.loss,
        "perplexity": Evaluation(loss=measured.loss, tokens=1, bytes=1).perplexity,
        "learning_rate": measured.learning_rate,
        "gradient_norm": measured.gradient_norm,
        "tokens_per_second": tokens_per_step / measured.seconds,
    }


def _validation_values(validation: Evaluation) -> dict[str, float]:
    return {
        "validation_loss": validation.loss,
        "validation_perplexity": validation.perplexity,
        "validation_bits_per_byte": validation.bits_per_byte,
    }


class _StopSignal:
    """Notes SIGTERM and Ctrl-C instead of dying of them; the second one kills as usual."""

    def __init__(self) -> None:
        self.received = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> _StopSignal:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

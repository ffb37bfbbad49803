"""The tasks by name: what `switchhead eval --tasks` runs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from switchhead.data import load_tokens
from switchhead.eval import blimp, cbt, reading
from switchhead.eval.blimp import evaluate_blimp
from switchhead.eval.cbt import evaluate_cbt
from switchhead.eval.examples import available
from switchhead.eval.lambada import OPENAI, STANDARD, evaluate_lambada, forms
from switchhead.eval.language_model import LanguageModel
from switchhead.eval.perplexity import Evaluation, count_lanes, default_batch_size, score_text
from switchhead.eval.results import Score, TaskResult, exponential, scaled

PERPLEXITY_VERSION = 1
_READ = {"perplexity": ("data", "stride")}  # settings that not every task reads; the others read task_data and limit
_FILES = {"lambada": [OPENAI.file, STANDARD.file], "blimp": [blimp.FILE], "cbt": list(cbt.KINDS)}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What tasks are run on, and how.

    Attributes:
        data: text for perplexity; see `switchhead.eval.evaluate`.
        task_data: directory of the other tasks' data; None: the hub.
        limit: the first examples only: passages, pairs of each paradigm, questions of each kind.
        chunk_length: tokens read at once; default: as in training.
        stride: of perplexity's windows; see `switchhead.eval.score_tokens`.
        batch_size: texts read side by side (lanes, for the perplexity of models with memory).
        dtype: of the computation, "float32" or "bfloat16" (autocast over float32 weights).
    """

    data: str | None = None
    task_data: Path | None = None
    limit: int | None = None
    chunk_length: int | None = None
    stride: int | None = None
    batch_size: int | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        for name in ("limit", "chunk_length", "stride", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")


def evaluate_tasks(language_model: LanguageModel, tasks: Sequence[str], settings: Settings) -> Iterator[TaskResult]:
    """Results one by one, in the order of the tasks; LAMBADA has one for each form that there is data for.

    Args:
        language_model: scored in evaluation mode.
        tasks: names from `TASKS`.
        settings: data and ways.

    Raises:
        ValueError: a task that is unknown, perplexity without `data`, or a setting that none of the tasks reads; before
            anything is computed.
        DataError: `task_data` lacks a task's files; before anything is computed. Or data cannot be read, or is faulty;
            names the place.
    """
    if unknown := [task for task in tasks if task not in TASKS]:
        raise ValueError(f"task {unknown[0]!r} is unknown; there are {', '.join(TASKS)}")
    if "perplexity" in tasks and settings.data is None:
        raise ValueError(
            "perplexity needs a text: --data text:FILE|GLOB, jsonl:GLOB#field, parquet:GLOB#column, "
            "or a prepared directory"
        )
    read = {name for task in tasks for name in _READ.get(task, ("task_data", "limit"))}
    for name in ("data", "stride", "task_data", "limit"):
        if getattr(settings, name) is not None and name not in read:
            raise ValueError(f"{name} is given, and no task that is chosen reads it ({', '.join(tasks)}): leave it out")
    for task in tasks:
        if task in _FILES:
            available(_FILES[task], settings.task_data)
    return _results(language_model, tasks, settings)


def _results(language_model: LanguageModel, tasks: Sequence[str], settings: Settings) -> Iterator[TaskResult]:
    for task in tasks:
        with torch.autocast(language_model.model.device.type, torch.bfloat16, enabled=settings.dtype == "bfloat16"):
            found = list(TASKS[task](language_model, settings))
        yield from found


def _perplexity(language_model: LanguageModel, settings: Settings) -> Iterator[TaskResult]:
    model, vocabulary = language_model.model, language_model.vocabulary
    assert settings.data is not None
    text = load_tokens(settings.data, vocabulary)
    chunk_length = settings.chunk_length or reading.chunk_length(model)
    batch_size = settings.batch_size or default_batch_size(model, chunk_length)
    score = score_text(
        model, vocabulary, text, chunk_length=chunk_length, stride=settings.stride, batch_size=batch_size
    )
    if reading.memory_length(model):
        ways = {"lanes": count_lanes(score.tokens, chunk_length, batch_size)}
    else:
        ways = {"stride": settings.stride or chunk_length}
    yield TaskResult(
        task="perplexity",
        version=PERPLEXITY_VERSION,
        data=settings.data,
        data_sha256=hashlib.sha256(text[:].tobytes()).hexdigest(),
        examples=score.tokens,
        scores=_scores(score),
        settings={**reading.settings(model, chunk_length), **ways, "bytes": score.bytes, "words": score.words},
        ends=score.ends,
    )


def _scores(score: Evaluation) -> dict[str, Score]:
    assert score.deviations is not None
    loss = Score(score.loss, score.standard_error, (score.deviations,))

    def per(count: int, unit: float = 1.0) -> Score:
        """The whole text's loss over another count than that of tokens, in another unit than nats."""
        return scaled(loss, score.tokens / count / unit)

    scores = {"loss": loss, "perplexity": exponential(loss)}
    if score.words:
        scores["word_perplexity"] = exponential(per(score.words))
    if score.bytes:
        scores["bits_per_byte"] = per(score.bytes, math.log(2))
    if score.characters:
        scores["bits_per_character"] = per(score.characters, math.log(2))
    return scores


def _lambada(language_model: LanguageModel, settings: Settings) -> Iterator[TaskResult]:
    for form in forms(settings.task_data):
        yield evaluate_lambada(language_model, form, **_options(settings))


def _blimp(language_model: LanguageModel, settings: Settings) -> Iterator[TaskResult]:
    yield evaluate_blimp(language_model, **_options(settings))


def _cbt(language_model: LanguageModel, settings: Settings) -> Iterator[TaskResult]:
    yield evaluate_cbt(language_model, **_options(settings))


def _options(settings: Settings) -> dict:
    names = ("task_data", "limit", "batch_size", "chunk_length")
    return {name: getattr(settings, name) for name in names}


TASKS: dict[str, Callable[[LanguageModel, Settings], Iterator[TaskResult]]] = {
    "perplexity": _perplexity,
    "lambada": _lambada,
    "blimp": _blimp,
    "cbt": _cbt,
}

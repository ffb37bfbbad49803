"""`switchhead eval`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from switchhead.cli.common import Chosen, Device, Json, ModelName, UsageError, arguments_of_the_user, print_json, table

if TYPE_CHECKING:
    from switchhead.eval import LanguageModel, TaskResult


def evaluate(
    model: tyro.conf.Positional[ModelName],
    /,
    *,
    tasks: str = "perplexity",
    data: Chosen[str | None] = None,
    task_data: Chosen[Path | None] = None,
    limit: Chosen[int | None] = None,
    chunk_length: Chosen[int | None] = None,
    stride: Chosen[int | None] = None,
    batch_size: Chosen[int | None] = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    device: Device = "auto",
    out: Chosen[Path | None] = None,
    as_json: Json = False,
) -> None:
    """Score a model: perplexity and bits per byte of a text, and zero-shot tasks.

    Args:
        tasks: separated by commas: perplexity, lambada, blimp, cbt.
        data: the text for perplexity: text:FILE|GLOB, jsonl:GLOB#field, parquet:GLOB#column, or a prepared directory
            (its validation split; DIR#test for another).
        task_data: directory with the other tasks' files; otherwise they come from the Hugging Face hub.
        limit: the first examples only: passages of lambada, pairs of each blimp paradigm, questions of each cbt kind;
            otherwise all.
        chunk_length: tokens read at once; otherwise as in training.
        stride: tokens from one window of the text to the next, below the chunk length for windows that overlap;
            otherwise none do.
        batch_size: texts read side by side; otherwise what suits model and device (with memory, perplexity: 1).
        dtype: of the computation; bfloat16 is autocast over float32 weights.
        out: file for the results; otherwise a new one in the run directory's eval/, if the model is a run's.
    """
    from switchhead.eval import Settings, evaluate_tasks, load_language_model
    from switchhead.eval.progress import shown_progress
    from switchhead.eval.results import check_out

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise UsageError("--tasks names no task")
    with arguments_of_the_user():
        settings = Settings(
            data=data,
            task_data=task_data,
            limit=limit,
            chunk_length=chunk_length,
            stride=stride,
            batch_size=batch_size,
            dtype=dtype,
        )
    check_out(out)
    language_model = load_language_model(model, device)
    results: list[TaskResult] = []
    try:
        with arguments_of_the_user(), shown_progress():
            for result in evaluate_tasks(language_model, names, settings):
                results.append(result)
    finally:  # what hours have gone into is not lost to a faulty line of a later task, or to impatience
        if results:
            _keep(language_model, results, dtype=dtype, out=out, as_json=as_json)


def _keep(
    language_model: LanguageModel, results: list[TaskResult], *, dtype: str, out: Path | None, as_json: bool
) -> None:
    """Print results, and write them where they belong."""
    from switchhead.eval.results import write_results

    report = _report(language_model, results, dtype)
    if not as_json:
        print(_text(language_model, results))
    file = write_results(report, out=out, run=language_model.run)
    if as_json:
        print_json({**report, "file": file and str(file)})
    elif file is not None:
        print(f"written to {file}")


def _report(language_model: LanguageModel, results: list[TaskResult], dtype: str) -> dict[str, Any]:
    from switchhead.runs import package_versions

    return {
        "model": language_model.name,
        "model_sha256": language_model.sha256,
        "vocabulary_sha256": language_model.vocabulary.fingerprint,
        "step": language_model.step,
        "dtype": dtype,
        "versions": package_versions(),
        "results": [result.as_json() for result in results],
    }


def _text(language_model: LanguageModel, results: list[TaskResult]) -> str:
    step = "" if language_model.step is None else f" at step {language_model.step}"
    lines = [
        f"{language_model.name}{step}, weights {language_model.sha256[:12]}",
        table(["task", "score", "value", "std. error", "examples"], _rows(results), right_aligned=(2, 3, 4)),
    ]
    lines += [
        f"{result.task}: {result.cut:,} of {result.examples:,} examples were cut on the left to fit the model"
        for result in results
        if result.cut
    ]
    return "\n".join(lines)


def _rows(results: list[TaskResult]) -> Iterator[list[str]]:
    for result in results:
        figures = dict(result.scores)
        for group, scores in result.details.items():
            if len(scores) <= 20:  # the 67 paradigms of BLiMP are in the JSON
                figures |= {f"accuracy, {group} {name}": score for name, score in scores.items()}
        for name, score in figures.items():
            error = "" if score.standard_error is None else _figure(score.standard_error)
            yield [result.task, name.replace("_", " "), _figure(score.value), error, f"{result.examples:,}"]


def _figure(value: float) -> str:
    return f"{value:.4f}" if value < 10000 else f"{value:.4g}"


def scores(result: Any) -> dict[str, float | int]:
    """Scores of a text for JSON."""
    return {
        "loss": result.loss,
        "perplexity": result.perplexity,
        "bits_per_byte": result.bits_per_byte,
        "tokens": result.tokens,
        "bytes": result.bytes,
    }


def score_lines(result: Any) -> str:
    """Scores of a text for people."""
    return (
        f"perplexity {result.perplexity:.4f}, {result.bits_per_byte:.4f} bits per byte "
        f"({result.tokens:,} tokens, {result.bytes:,} bytes)"
    )

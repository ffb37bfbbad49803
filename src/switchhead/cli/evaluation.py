"""`switchhead eval`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from switchhead.cli.common import Chosen, Device, Json, UsageError, arguments_of_the_user, print_json, table

if TYPE_CHECKING:
    from switchhead.eval import Comparison, LanguageModel, Score, TaskResult

Models = Annotated[
    tyro.conf.Positional[tuple[str, ...]],
    tyro.conf.arg(
        metavar="MODEL [MODEL ...]",
        help="run directories, checkpoints/step-N inside one, saved Hugging Face models, or their names on the hub",
        help_behavior_hint="",
    ),
]

OF_THE_ITEMS = (
    "std. errors are those of the text (its items), not of training: another seed may move a score by more than that"
)


def evaluate(
    models: Models,
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

    Of several models, all but the first also get their differences to the first, with errors paired over the items.

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
        out: file for the results, of all models; otherwise a new one in the run directory's eval/, where the model is a
            run's.
    """
    from switchhead.eval import Settings, evaluate_tasks, load_language_model
    from switchhead.eval.progress import shown_progress
    from switchhead.eval.results import check_out

    if not models:
        raise UsageError("no MODEL is named")
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
    scored = [_Scored(load_language_model(name, device)) for name in models]
    try:
        with arguments_of_the_user(), shown_progress():
            coming = [evaluate_tasks(one.model, names, settings) for one in scored]
            for one, results in cycle(zip(scored, coming, strict=True)):  # task by task
                if (result := next(results, None)) is None:
                    break
                one.add(result, scored[0])
    finally:  # what hours have gone into is not lost to a faulty line of a later task, or to impatience
        if scored[0].results:
            _keep(scored, dtype=dtype, out=out, as_json=as_json)


@dataclass
class _Scored:
    """A model, its results, and by how much they differ from the first model's."""

    model: LanguageModel
    results: list[TaskResult] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)

    def add(self, result: TaskResult, first: _Scored) -> None:
        from switchhead.eval import compare

        self.results.append(result)
        if first is not self:
            self.comparisons.append(compare(result, first.results[len(self.comparisons)]))


def _keep(scored: Sequence[_Scored], *, dtype: str, out: Path | None, as_json: bool) -> None:
    """Print results, and write them where they belong: of several models, all to `out`, or each to its run."""
    from switchhead.eval.results import write_results

    if not as_json:
        print(_text(scored))
    contents = [(_report(one, scored[0].model, dtype), one.model.run) for one in scored if one.results]
    together = len(scored) > 1 and out is not None
    if together:
        contents = [({"models": [report for report, _ in contents]}, None)]
    files = [write_results(content, out=out, run=run) for content, run in contents]
    if as_json:
        shown = [{**content, "file": file and str(file)} for (content, _), file in zip(contents, files, strict=True)]
        print_json(shown[0] if len(scored) == 1 or together else {"models": shown})
        return
    for file in files:
        if file is not None:
            print(f"written to {file}")


def _report(one: _Scored, first: LanguageModel, dtype: str) -> dict[str, Any]:
    from switchhead.runs import package_versions

    report = {
        "model": one.model.name,
        "model_sha256": one.model.sha256,
        "vocabulary_sha256": one.model.vocabulary.fingerprint,
        "step": one.model.step,
        "dtype": dtype,
        "versions": package_versions(),
        "results": [result.as_json() for result in one.results],
    }
    if one.comparisons:
        report["compared_with"] = {"model": first.name, "model_sha256": first.sha256, "step": first.step}
        report["differences"] = [comparison.as_json() for comparison in one.comparisons]
    return report


def _text(scored: Sequence[_Scored]) -> str:
    header = ["task", "score", "model", "value", "std. error", "difference", "std. error", "examples"]
    rows = [header, *_rows(scored)]
    if len(scored) == 1:
        rows = [[*row[:2], *row[3:5], row[7]] for row in rows]
    lines = [_name(one.model) for one in scored]
    numbers = range(2 if len(scored) == 1 else 3, len(rows[0]))
    lines.append(table(rows[0], rows[1:], right_aligned=numbers))
    if any(one.comparisons for one in scored):
        lines.append(OF_THE_ITEMS)
    for one in scored:
        of = f"{one.model.name}, " if len(scored) > 1 else ""
        lines += [
            f"{of}{result.task}: {result.cut:,} of {result.examples:,} examples were cut on the left to fit the model"
            for result in one.results
            if result.cut
        ]
        lines += [f"{of}{comparison.task}: {comparison.note}" for comparison in one.comparisons if comparison.note]
    return "\n".join(lines)


def _name(model: LanguageModel) -> str:
    step = "" if model.step is None else f" at step {model.step}"
    return f"{model.name}{step}, weights {model.sha256[:12]}"


def _rows(scored: Sequence[_Scored]) -> Iterator[list[str]]:
    """A row for each model under every figure of the first."""
    for number, first in enumerate(scored[0].results):
        for name in _figures(first):
            for one in scored:
                if number >= len(one.results):  # of a model that was not come to
                    continue
                result = one.results[number]
                difference = _figures(one.comparisons[number]).get(name) if one.comparisons else None
                cells = [*_cells(_figures(result)[name]), *_cells(difference)]
                yield [result.task, name, one.model.name, *cells, f"{_examples(result, name):,}"]


def _figures(result: TaskResult | Comparison) -> Mapping[str, Score]:
    """Those that are shown, by what they are called."""
    return {name.replace("_", " "): score for name, score in result.scores.items()} | _details(result)


def _details(result: TaskResult | Comparison) -> dict[str, Score]:
    """Those of them that are of a part of the examples."""
    return {
        f"accuracy, {group} {name}".replace("_", " "): score
        for group, scores in result.details.items()
        if len(scores) <= 20  # the 67 paradigms of BLiMP are in the JSON
        for name, score in scores.items()
    }


def _examples(result: TaskResult, name: str) -> int:
    """How many a figure is of, by what it is called."""
    part = _details(result).get(name)
    return result.examples if part is None else sum(map(len, part.deviations))


def _cells(score: Score | None) -> list[str]:
    if score is None:
        return ["", ""]
    return [_figure(score.value), "" if score.standard_error is None else _figure(score.standard_error)]


def _figure(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 10000 else f"{value:.4g}"


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

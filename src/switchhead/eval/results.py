"""Scores with their standard errors, and the files they are kept in."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from switchhead.errors import RunError


@dataclass(frozen=True)
class Score:
    """A figure and its standard error.

    Attributes:
        value: the figure.
        standard_error: None where it cannot be estimated.
        deviations: by how much each item moves the figure, in the order of the items; an array for each group of items
            that has a mean of its own (a paradigm, a kind). See `standard_error`; () where nothing is known.
    """

    value: float
    standard_error: float | None = None
    deviations: tuple[np.ndarray, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """What a model scored at a task.

    Attributes:
        task: its name.
        version: of the way of scoring; results of different versions do not compare.
        data: where the examples came from.
        data_sha256: of what was scored: of the examples, or of the tokens.
        examples: how many there are (tokens, for perplexity).
        cut: examples whose context was cut on the left to fit the model.
        scores: figures by name.
        details: further figures, by group and name.
        settings: what else decides the figures.
        ends: for perplexity, whose items are chunks of the text: how many tokens are scored up to the end of each.
    """

    task: str
    version: int
    data: str
    data_sha256: str
    examples: int
    cut: int = 0
    scores: Mapping[str, Score]
    details: Mapping[str, Mapping[str, Score]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    ends: np.ndarray | None = field(default=None, compare=False, repr=False)

    def as_json(self) -> dict[str, Any]:
        """For programs, without what is known of single items; infinite figures, which JSON does not know, are null."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self) if f.name != "ends"}


def standard_error(deviations: Sequence[np.ndarray]) -> float | None:
    """Of a figure that independent items move, those of a group from their own mean; None for a group of one.

    For the mean of n values they are (value - mean) / n, for a ratio of sums (sum - count * ratio) / total count
    (Cochran, Sampling Techniques, eq. 6.11, without the finite correction), for the difference of two figures over the
    same items the differences.
    """
    if not deviations or min(map(len, deviations)) < 2:
        return None
    return math.sqrt(math.fsum(len(group) / (len(group) - 1) * math.fsum(group**2) for group in deviations))


def mean(values: Iterable[float]) -> Score:
    """The mean of independent values, at least one."""
    values = list(values)
    n, average = len(values), math.fsum(values) / len(values)
    deviations = (np.array([(value - average) / n for value in values]),)
    return Score(average, standard_error(deviations), deviations)


def macro_average(scores: Sequence[Score]) -> Score:
    """The mean of groups of different sizes, each counting the same; its error is that of a sum."""
    errors = [score.standard_error for score in scores]
    known = [error for error in errors if error is not None]
    error = math.sqrt(math.fsum(e * e for e in known)) / len(scores) if len(known) == len(errors) else None
    groups = [group / len(scores) for score in scores for group in score.deviations]
    deviations = tuple(groups) if all(score.deviations for score in scores) else ()
    return Score(math.fsum(score.value for score in scores) / len(scores), error, deviations)


def scaled(score: Score, factor: float) -> Score:
    """A figure in another unit."""
    return _moved(score, score.value * factor, factor)


def exponential(score: Score) -> Score:
    """The exponential of a figure; its error to first order."""
    if score.value > 700:  # where a float ends
        return Score(math.inf)
    value = math.exp(score.value)
    return _moved(score, value, value)


def _moved(score: Score, value: float, slope: float) -> Score:
    error = None if score.standard_error is None else slope * score.standard_error
    return Score(value, error, tuple(slope * group for group in score.deviations))


def check_out(out: Path | None) -> None:
    """Whether results can be kept in `out`: known before they are computed.

    Raises:
        RunError: it exists, or its directory does not.
    """
    if out is not None and out.exists():
        raise RunError(f"{out} exists, and results are not overwritten: choose another --out")
    if out is not None and not out.parent.is_dir():
        raise RunError(f"cannot write results to {out}: there is no directory {out.parent}")


def write_results(content: Mapping[str, Any], *, out: Path | None, run: Path | None) -> Path | None:
    """Keep results: in `out`, or under a new name in the `eval` of a run directory; None where there is neither.

    Raises:
        RunError: `out` exists, or the file cannot be written.
    """
    if out is None and run is None:
        return None
    check_out(out)
    try:
        for path in [out] if out is not None else _names(Path(run or "") / "eval", content):
            if not path.exists():
                with path.open("x", encoding="utf-8") as file:
                    file.write(json.dumps(content, indent=2) + "\n")
                return path
    except OSError as error:
        raise RunError(f"cannot write results to {error.filename}: {error.strerror}") from error
    raise RunError(f"{out} exists, and results are not overwritten: choose another --out")


def _names(directory: Path, content: Mapping[str, Any]) -> Iterator[Path]:
    """Names for a run's results, in a directory that is made if it is missing."""
    directory.mkdir(exist_ok=True)
    tasks = "+".join(dict.fromkeys(result["task"] for result in content["results"]))
    yield directory / f"step-{content['step']}-{tasks}.json"
    yield from (directory / f"step-{content['step']}-{tasks}-{number}.json" for number in count(2))


def plain(value: Any) -> Any:
    """What JSON can say of scores, by name or alone, and of settings."""
    if isinstance(value, Score):
        return {"value": plain(value.value), "standard_error": plain(value.standard_error)}
    if isinstance(value, Mapping):
        return {key: plain(content) for key, content in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""Scores with their standard errors, and the files they are kept in."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from switchhead.errors import RunError


@dataclass(frozen=True)
class Score:
    """A figure and its standard error; None where it cannot be estimated."""

    value: float
    standard_error: float | None = None


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

    def as_json(self) -> dict[str, Any]:
        """For programs; infinite figures, which JSON does not know, become null."""
        return _finite(asdict(self))


def mean(values: Iterable[float]) -> Score:
    """The mean of independent values, at least one."""
    values = list(values)
    n, average = len(values), math.fsum(values) / len(values)
    if n < 2:
        return Score(average)
    return Score(average, math.sqrt(math.fsum((v - average) ** 2 for v in values) / (n - 1) / n))


def macro_average(scores: Sequence[Score]) -> Score:
    """The mean of groups of different sizes, each counting the same; its error is that of a sum."""
    errors = [score.standard_error for score in scores]
    known = [error for error in errors if error is not None]
    error = math.sqrt(math.fsum(e * e for e in known)) / len(scores) if len(known) == len(errors) else None
    return Score(math.fsum(score.value for score in scores) / len(scores), error)


def exponential(score: Score) -> Score:
    """The exponential of a figure; its error to first order."""
    if score.value > 700:  # where a float ends
        return Score(math.inf)
    value = math.exp(score.value)
    return Score(value, None if score.standard_error is None else value * score.standard_error)


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


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(content) for key, content in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value

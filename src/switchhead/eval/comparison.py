"""By how much a model's results differ from another's on the same items."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from switchhead.eval.results import Score, TaskResult, plain, standard_error

OF_THE_TEXT = ("word_perplexity", "bits_per_byte", "bits_per_character")  # whatever the tokens are


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Figures of one model less those of another.

    Attributes:
        task: of both.
        scores: differences by name.
        details: those of further figures, by group and name.
        note: what was not compared or not paired, and why; empty where all was.
    """

    task: str
    scores: dict[str, Score]
    details: dict[str, dict[str, Score]]
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {name: plain(getattr(self, name)) for name in ("task", "scores", "details", "note")}


def compare(result: TaskResult, reference: TaskResult) -> Comparison:
    """What `result` has more than `reference` in every figure, with standard errors paired over the items.

    Items (passages, pairs of sentences, questions, chunks of the text) are hard or easy for both models, so that their
    differences vary less than two scores do. Where two models read a text in different chunks, those between the places
    where chunks of both end are taken together. Differences of perplexities have an error to first order.

    Of models with different tokens only what counts words, bytes or characters of the text is compared, without an
    error: no chunks of one are chunks of the other.

    Raises:
        ValueError: the results are of different tasks, versions or data.
    """
    for name in ("task", "version", "data"):
        if (value := getattr(result, name)) != (other := getattr(reference, name)):
            raise ValueError(f"results with {name} {value!r} and {other!r} do not compare")
    if result.data_sha256 != reference.data_sha256:
        return _of_the_text(result, reference)
    note = ""
    if result.ends is not None and reference.ends is not None and not np.array_equal(result.ends, reference.ends):
        ends = np.intersect1d(result.ends, reference.ends)
        result, reference = _taken_together(result, ends), _taken_together(reference, ends)
        note = f"the models read different chunks: paired over {len(ends):,} parts of the text, which end for both"
    return _differences(result, reference, _paired, note)


def _of_the_text(result: TaskResult, reference: TaskResult) -> Comparison:
    sizes = [[one.settings.get(name) for name in ("bytes", "words")] for one in (result, reference)]
    if result.ends is None or sizes[0] != sizes[1]:
        note = "not compared: the models did not read the same examples or text"
        return Comparison(task=result.task, scores={}, details={}, note=note)
    result, reference = (
        replace(one, scores={name: score for name, score in one.scores.items() if name in OF_THE_TEXT}, details={})
        for one in (result, reference)
    )
    note = "the vocabularies differ: what counts tokens is not compared, and no errors are paired"
    return _differences(result, reference, lambda a, b: Score(a.value - b.value), note)


def _taken_together(result: TaskResult, ends: np.ndarray) -> TaskResult:
    """A text's result with chunks added up until the next of `ends`, at each of which one of them ends."""
    assert result.ends is not None
    first = np.concatenate([[0], np.searchsorted(result.ends, ends[:-1]) + 1])
    scores = {
        name: replace(score, deviations=tuple(np.add.reduceat(group, first) for group in score.deviations))
        for name, score in result.scores.items()
    }
    return replace(result, scores=scores, ends=ends)


def _paired(score: Score, reference: Score) -> Score:
    deviations = ()
    if score.deviations and reference.deviations:
        deviations = tuple(a - b for a, b in zip(score.deviations, reference.deviations, strict=True))
    return Score(score.value - reference.value, standard_error(deviations), deviations)


def _differences(
    result: TaskResult, reference: TaskResult, difference: Callable[[Score, Score], Score], note: str
) -> Comparison:
    return Comparison(
        task=result.task,
        scores={name: difference(score, reference.scores[name]) for name, score in result.scores.items()},
        details={
            group: {name: difference(score, reference.details[group][name]) for name, score in scores.items()}
            for group, scores in result.details.items()
        },
        note=note,
    )

"""BLiMP (Warstadt et al. 2020): which of two sentences that differ minimally is grammatical."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from switchhead.errors import DataError
from switchhead.eval import reading, results
from switchhead.eval.examples import HubData, Record, encode, load_examples, sha256_of
from switchhead.eval.language_model import LanguageModel
from switchhead.eval.likelihood import score_continuations
from switchhead.eval.results import Score, TaskResult

VERSION = 1
FILE = "blimp"
HUB = HubData("nyu-mll/blimp", "train")  # a configuration for each of the 67 paradigms


@dataclass(frozen=True)
class MinimalPair:
    """A grammatical sentence, its ungrammatical twin, and what they test."""

    good: str
    bad: str
    paradigm: str
    term: str
    field: str
    place: str


def parse(record: Record) -> MinimalPair:
    """A pair, as the authors' files and the hub name its fields (`UID` or `paradigm`).

    Raises:
        DataError: a field is missing.
    """
    return MinimalPair(
        good=record.text("sentence_good"),
        bad=record.text("sentence_bad"),
        paradigm=record.text("paradigm", "UID"),
        term=record.text("linguistics_term"),
        field=record.text("field").replace("/", "_"),  # the authors write syntax_semantics both ways
        place=record.place,
    )


def evaluate_blimp(
    language_model: LanguageModel,
    *,
    task_data: Path | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    chunk_length: int | None = None,
) -> TaskResult:
    """Accuracy: the share of pairs whose grammatical sentence is the likelier one; a tie is none.

    Likelihoods are of the whole sentence behind the beginning token, not normalised by length (the authors' "simple LM
    method"). The accuracy is the mean over paradigms, and so are those of the linguistic terms and fields.

    Args:
        language_model: the model.
        task_data: directory of local data; default: the hub.
        limit: pairs of each paradigm, the first ones.
        batch_size: see `score_continuations`.
        chunk_length: see `score_continuations`.

    Raises:
        DataError: see `load_examples` and `encode`; or a paradigm has two fields or terms.
    """
    source, pairs = load_examples(FILE, HUB, parse, task_data=task_data)
    fields, terms = _group_of(pairs, "field"), _group_of(pairs, "term")
    pairs = _first_of_each(pairs, limit)
    model, vocabulary = language_model.model, language_model.vocabulary
    requests = [encode(vocabulary, pair.place, "", text) for pair in pairs for text in (pair.good, pair.bad)]
    likelihoods = score_continuations(model, requests, batch_size=batch_size, chunk_length=chunk_length)
    good, bad = likelihoods[::2], likelihoods[1::2]
    correct = [g.log_likelihood > b.log_likelihood for g, b in zip(good, bad, strict=True)]
    paradigms = _accuracies(pairs, correct)
    return TaskResult(
        task="blimp",
        version=VERSION,
        data=source,
        data_sha256=sha256_of(pairs),
        examples=len(pairs),
        cut=sum(g.cut > 0 or b.cut > 0 for g, b in zip(good, bad, strict=True)),
        scores={"accuracy": results.macro_average(list(paradigms.values()))},
        details={
            "field": _averages(paradigms, fields),
            "term": _averages(paradigms, terms),
            "paradigm": paradigms,
        },
        settings={**reading.settings(model, chunk_length), "limit": limit, "paradigms": len(paradigms)},
    )


def _first_of_each(pairs: Iterable[MinimalPair], limit: int | None) -> list[MinimalPair]:
    seen: dict[str, int] = defaultdict(int)
    kept = []
    for pair in pairs:
        seen[pair.paradigm] += 1
        if limit is None or seen[pair.paradigm] <= limit:
            kept.append(pair)
    return kept


def _accuracies(pairs: Sequence[MinimalPair], correct: Sequence[bool]) -> dict[str, Score]:
    groups: dict[str, list[float]] = defaultdict(list)
    for pair, is_correct in zip(pairs, correct, strict=True):
        groups[pair.paradigm].append(float(is_correct))
    return {paradigm: results.mean(groups[paradigm]) for paradigm in sorted(groups)}


def _group_of(pairs: Sequence[MinimalPair], name: str) -> dict[str, str]:
    """The field or term of every paradigm, which has one."""
    groups: dict[str, str] = {}
    for pair in pairs:
        group = getattr(pair, name)
        if groups.setdefault(pair.paradigm, group) != group:
            raise DataError(
                f"{pair.place}: the {name} of paradigm {pair.paradigm!r} is {group!r} here, "
                f"and {groups[pair.paradigm]!r} before"
            )
    return groups


def _averages(paradigms: Mapping[str, Score], group_of: Mapping[str, str]) -> dict[str, Score]:
    groups: dict[str, list[Score]] = defaultdict(list)
    for paradigm, score in paradigms.items():
        groups[group_of[paradigm]].append(score)
    return {group: results.macro_average(groups[group]) for group in sorted(groups)}

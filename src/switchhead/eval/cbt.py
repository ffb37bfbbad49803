"""Children's Book Test (Hill et al. 2016): which word is missing from the sentence after twenty others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from switchhead.errors import DataError
from switchhead.eval import reading, results
from switchhead.eval.examples import HubData, Record, available, encode, load_examples, sha256_of
from switchhead.eval.language_model import LanguageModel
from switchhead.eval.likelihood import Request, score_continuations
from switchhead.eval.results import TaskResult

VERSION = 1
BLANK = "XXXXX"
KINDS = {"cbt_cn": "common nouns", "cbt_ne": "named entities"}
HUB = {name: HubData("cam-cst/cbt", "test", (name[-2:].upper(),)) for name in KINDS}


@dataclass(frozen=True)
class Question:
    """What comes before, the candidates in place in the sentence that asks, and which of them is right."""

    context: str
    completed: tuple[str, ...]
    answer: int
    place: str


def parse(record: Record) -> Question:
    """A question, its sentences joined by spaces.

    Raises:
        DataError: a field is missing or empty, the blank is missing, there is no choice, or the answer is not among the
            options.
    """
    sentences, options = record.texts("sentences"), record.texts("options")
    question, answer = record.text("question"), record.text("answer")
    if question.count(BLANK) != 1:
        raise DataError(f"{record.place}: the question has {question.count(BLANK)} blanks {BLANK}, not one")
    if answer not in options:
        raise DataError(f"{record.place}: the answer {answer!r} is not among the options ({', '.join(options)})")
    if len(set(options)) < 2:
        raise DataError(f"{record.place}: {answer!r} is the only option, and nothing can be chosen")
    completed = tuple(question.replace(BLANK, option) for option in options)
    return Question(" ".join(sentences), completed, options.index(answer), record.place)


def evaluate_cbt(
    language_model: LanguageModel,
    *,
    task_data: Path | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    chunk_length: int | None = None,
) -> TaskResult:
    """Accuracy: the share of questions whose answer makes the likeliest sentence; a tie with another option is none.

    Likelihoods are of the whole completed sentence after the twenty before it, not normalised by length, for each
    option in its place (Radford et al. 2019). The accuracy is the mean over common nouns and named entities.
    All options of a question see the same context, which is cut on its left to fit the longest of them.

    Args:
        language_model: the model.
        task_data: directory of local data, `cbt_cn.jsonl` and `cbt_ne.jsonl`, at least one; default: the hub.
        limit: questions of each kind, the first ones.
        batch_size: see `score_continuations`.
        chunk_length: see `score_continuations`.

    Raises:
        DataError: see `load_examples` and `encode`.
    """
    names = available(list(KINDS), task_data)
    loaded = {name: load_examples(name, HUB[name], parse, task_data=task_data) for name in names}
    questions = {name: examples[:limit] for name, (_, examples) in loaded.items()}
    kinds, cut = {}, 0
    for name in names:
        correct, n_cut = _answer(language_model, questions[name], batch_size, chunk_length)
        kinds[KINDS[name]] = results.mean(map(float, correct))
        cut += n_cut
    every = list(chain.from_iterable(questions.values()))
    return TaskResult(
        task="cbt",
        version=VERSION,
        data=", ".join(dict.fromkeys(source for source, _ in loaded.values())),
        data_sha256=sha256_of(every),
        examples=len(every),
        cut=cut,
        scores={"accuracy": results.macro_average(list(kinds.values()))},
        details={"kind": kinds},
        settings={**reading.settings(language_model.model, chunk_length), "limit": limit},
    )


def _answer(
    language_model: LanguageModel, questions: Sequence[Question], batch_size: int | None, chunk_length: int | None
) -> tuple[list[bool], int]:
    """Whether each question is answered right, and the contexts of how many had to be cut."""
    model = language_model.model
    requests, cut = [], 0
    for question in questions:
        options, is_cut = _requests(language_model, question, reading.context_length(model, chunk_length))
        requests += options
        cut += is_cut
    likelihoods = iter(score_continuations(model, requests, batch_size=batch_size, chunk_length=chunk_length))
    values = ([next(likelihoods).log_likelihood for _ in question.completed] for question in questions)
    return [_is_correct(question, found) for question, found in zip(questions, values, strict=True)], cut


def _requests(language_model: LanguageModel, question: Question, longest: int | None) -> tuple[list[Request], bool]:
    """A request for every option, and whether their context had to be cut."""
    options = [
        encode(language_model.vocabulary, question.place, question.context, f" {completed}")
        for completed in question.completed
    ]
    if longest is None:
        return options, False
    excess = max(len(option.context) + len(option.continuation) for option in options) - 1 - longest
    if excess <= 0:
        return options, False
    excess = min(excess, *(len(option.context) - 1 for option in options))  # of a model that reads less than a sentence
    return [Request(option.context[excess:], option.continuation) for option in options], True


def _is_correct(question: Question, values: list[float]) -> bool:
    others = [
        value
        for text, value in zip(question.completed, values, strict=True)
        if text != question.completed[question.answer]
    ]
    return all(values[question.answer] > value for value in others)

"""LAMBADA (Paperno et al. 2016): the last word of a passage that only the whole passage tells."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from switchhead.errors import DataError
from switchhead.eval import reading, results
from switchhead.eval.examples import HubData, Record, available, encode, load_examples, sha256_of
from switchhead.eval.language_model import LanguageModel
from switchhead.eval.likelihood import score_continuations
from switchhead.eval.results import TaskResult

VERSION = 1


@dataclass(frozen=True)
class Form:
    """One of the two forms of the data, by the names that the evaluation harness gives them."""

    task: str
    file: str
    hub: HubData


# The passages as OpenAI has restored them, cased and detokenised; and as they were published, lower case and tokenised.
OPENAI = Form("lambada_openai", "lambada_test", HubData("EleutherAI/lambada_openai", "test", ("default",)))
STANDARD = Form("lambada_standard", "lambada_test_plain", HubData("cimec/lambada", "test"))


@dataclass(frozen=True)
class Passage:
    """Everything but the last word, and ` word`, cut at the last space."""

    context: str
    target: str
    place: str


def parse(record: Record) -> Passage:
    """A passage, its end without white space.

    Raises:
        DataError: there is no text, or only one word.
    """
    context, space, word = record.text("text").rstrip().rpartition(" ")
    if not context.strip():
        raise DataError(f"{record.place}: the passage has one word only, and nothing to tell it from")
    return Passage(context, space + word, record.place)


def forms(task_data: Path | None) -> list[Form]:
    """The forms that there is data for; both on the hub.

    Raises:
        DataError: a directory has neither.
    """
    stems = available([OPENAI.file, STANDARD.file], task_data)
    return [form for form in (OPENAI, STANDARD) if form.file in stems]


def evaluate_lambada(
    language_model: LanguageModel,
    form: Form = OPENAI,
    *,
    task_data: Path | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    chunk_length: int | None = None,
) -> TaskResult:
    """Accuracy of greedy decoding, which must produce every token of the last word, and the word's perplexity.

    The perplexity is per word: exp of the mean negative log-likelihood of all its tokens.

    Raises:
        DataError: see `load_examples` and `encode`.
    """
    source, passages = load_examples(form.file, form.hub, parse, task_data=task_data)
    passages = passages[:limit]
    model, vocabulary = language_model.model, language_model.vocabulary
    requests = [encode(vocabulary, p.place, p.context, p.target) for p in passages]
    likelihoods = score_continuations(model, requests, batch_size=batch_size, chunk_length=chunk_length)
    loss = results.mean(-likelihood.log_likelihood for likelihood in likelihoods)
    return TaskResult(
        task=form.task,
        version=VERSION,
        data=source,
        data_sha256=sha256_of(passages),
        examples=len(passages),
        cut=sum(likelihood.cut > 0 for likelihood in likelihoods),
        scores={
            "accuracy": results.mean(float(likelihood.greedy) for likelihood in likelihoods),
            "perplexity": results.exponential(loss),
        },
        settings={**reading.settings(model, chunk_length), "limit": limit},
    )

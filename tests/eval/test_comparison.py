"""Differences of two models, with errors paired over the items; expected ones worked out by hand."""

import dataclasses
import math

import numpy as np
import pytest

from switchhead.data import ByteSubsetVocabulary
from switchhead.eval import (
    LanguageModel,
    Score,
    Settings,
    TaskResult,
    compare,
    evaluate_tasks,
)
from switchhead.eval.results import exponential, macro_average, mean
from tests.eval.conftest import DATA, NextToken

TEXT = "a bb aba ab bbb a aabb aba"  # 26 bytes
COSTS = {"first": {"a": 1.0, "b": 3.0, " ": 2.0}, "second": {"a": 2.0, "b": 2.5, " ": 0.5}}  # logits, negated


def result(score, data_sha256="0"):
    return TaskResult(task="t", version=1, data="d", data_sha256=data_sha256, examples=1, scores={"s": score})


def difference(score, reference):
    return compare(result(score), result(reference)).scores["s"]


def test_the_error_of_a_difference_is_that_of_the_items_differences():
    # 1 0 3 from one to the other: mean 4/3, variance (1/9 + 16/9 + 25/9) / 2 = 7/3
    assert difference(mean([1, 2, 4]), mean([0, 2, 1])) == Score(pytest.approx(4 / 3), pytest.approx(math.sqrt(7 / 9)))
    score = mean([1, 0, 0, 1])
    assert difference(score, score) == Score(0, 0)
    assert difference(mean([1]), mean([0])) == Score(1, None)


def test_a_difference_of_macro_averages_pairs_the_items_of_every_group():
    # Group by group 1 0 (mean 1/2, error 1/2) and 0 0 3 (mean 1, error 1).
    score, reference = (macro_average([mean(a), mean(b)]) for a, b in [([1, 1], [0, 1, 3]), ([0, 1], [0, 1, 0])])
    assert difference(score, reference) == Score(pytest.approx(3 / 4), pytest.approx(math.sqrt(1 / 4 + 1) / 2))
    alone = macro_average([mean([1, 1]), mean([3])])
    assert difference(alone, macro_average([mean([0, 1]), mean([0])])).standard_error is None


def test_a_difference_of_perplexities_has_the_error_to_first_order():
    # Means 2 and 1, of which each of the two items moves them by 1/2: the perplexities by e^2 / 2 and e / 2.
    score, reference = exponential(mean([1, 3])), exponential(mean([0, 2]))
    expected = math.e**2 - math.e
    assert difference(score, reference) == Score(pytest.approx(expected), pytest.approx(expected))
    infinite = exponential(mean([1000, 2000]))
    assert difference(infinite, reference) == Score(math.inf, None)


def test_results_of_something_else_do_not_compare():
    one = result(mean([1, 2]))
    for name, value in (("task", "u"), ("version", 2), ("data", "e")):
        with pytest.raises(ValueError, match=f"results with {name} {value!r} and .* do not compare"):
            compare(dataclasses.replace(one, **{name: value}), one)
    other = compare(result(mean([1, 2]), data_sha256="1"), one)
    assert (other.scores, other.details) == ({}, {})
    assert "did not read the same examples" in other.note


def known(costs, **options):
    """A model to which a letter costs always the same, and the nats of each byte of the text."""
    log_probabilities = [-costs.get(chr(token), 9.0) for token in range(257)]
    total = math.log(sum(map(math.exp, log_probabilities)))
    return NextToken(257, lambda tokens: log_probabilities, **options), [costs[letter] + total for letter in TEXT]


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").write_text(TEXT)
    return f"text:{tmp_path / 'text'}"


@pytest.mark.parametrize(
    ("chunk_lengths", "ends"),
    [((4, 4), [4, 8, 12, 16, 20, 24, 26]), ((4, 6), [12, 24, 26]), ((5, 26), [26])],
)
def test_losses_are_paired_over_the_parts_of_the_text_that_end_for_both_models(
    text, language_model, chunk_lengths, ends
):
    (model, nats), (other, others_nats) = (known(costs) for costs in COSTS.values())
    found = [
        next(evaluate_tasks(language_model(one), ["perplexity"], Settings(data=text, chunk_length=length)))
        for one, length in zip((model, other), chunk_lengths, strict=True)
    ]
    comparison = compare(*found)
    more = np.subtract(nats, others_nats)
    loss = comparison.scores["loss"]
    assert loss.value == pytest.approx(more.mean())
    parts = [(more[start:end].sum(), end - start) for start, end in zip([0, *ends], ends, strict=False)]
    n, squares = len(parts), sum((total - size * more.mean()) ** 2 for total, size in parts)
    error = math.sqrt(n / (n - 1) * squares) / 26 if n > 1 else None
    assert loss.standard_error == (error and pytest.approx(error))
    bits = comparison.scores["bits_per_byte"]
    assert bits == Score(pytest.approx(loss.value / math.log(2)), error and pytest.approx(error / math.log(2)))
    assert comparison.note == (
        ""
        if len(set(chunk_lengths)) == 1
        else f"the models read different chunks: paired over {n} parts of the text, which end for both"
    )


def test_chunks_of_lanes_are_paired_in_the_order_of_the_text(make_model, language_model, tmp_path):
    (tmp_path / "text").write_text(TEXT * 48)  # 156 chunks, 52 to a lane
    model = language_model(make_model(num_hidden_layers=1, positions="relative", memory_length=8))
    settings = [Settings(data=f"text:{tmp_path / 'text'}", batch_size=size) for size in (3, 1)]
    lanes, whole = (next(evaluate_tasks(model, ["perplexity"], one)) for one in settings)
    assert lanes.settings["lanes"] == 3
    loss = compare(lanes, whole).scores["loss"]
    more = loss.deviations[0] + loss.value / 156
    assert np.flatnonzero(abs(more) > 1e-12).tolist() == [52, 104]  # what one layer reads without its memory


def test_different_vocabularies_compare_by_what_the_text_has(text, language_model):
    subset = ByteSubsetVocabulary(b" ab")
    uniform = NextToken(subset.size, lambda tokens: [0.0] * subset.size)
    models = LanguageModel(name="subset", model=uniform, vocabulary=subset), language_model(known(COSTS["first"])[0])
    found = [next(evaluate_tasks(model, ["perplexity"], Settings(data=text, chunk_length=4))) for model in models]
    comparison = compare(*found)
    assert set(comparison.scores) == {"word_perplexity", "bits_per_byte", "bits_per_character"}
    for name, score in comparison.scores.items():
        assert score == Score(found[0].scores[name].value - found[1].scores[name].value)
    assert "the vocabularies differ" in comparison.note


def test_tasks_are_paired_by_their_examples(make_model, language_model):
    models = [language_model(make_model(max_position_embeddings=512, hidden_size=size)) for size in (16, 24)]
    settings = Settings(task_data=DATA)
    first, second = (list(evaluate_tasks(model, ["lambada", "blimp", "cbt"], settings)) for model in models)
    for result, reference in zip(second, first, strict=True):
        comparison = compare(result, reference)
        assert comparison.note == ""
        for name, score in comparison.scores.items():
            assert score.value == result.scores[name].value - reference.scores[name].value
            assert score.standard_error is not None
        assert {group: set(scores) for group, scores in comparison.details.items()} == {
            group: set(scores) for group, scores in result.details.items()
        }
        assert compare(reference, reference).scores == {name: Score(0, 0) for name in reference.scores}

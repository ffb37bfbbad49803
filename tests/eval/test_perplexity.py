import math

import pytest
import torch
import torch.nn.functional as F

from switchhead.data import load_tokens
from switchhead.errors import DataError
from switchhead.eval import Evaluation, evaluate, score_tokens

TEXT = "It is a truth universally acknowledged, that a 2-head model — in want of a table."  # odd length, not ASCII
MEMORY = {"positions": "relative", "memory_length": 8}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return f"text:{path}"


def losses_one_by_one(model, tokens, first_seen):
    """Nats of every token but the first, each by a forward of its own over what `first_seen(i)` says it may see."""
    ids = torch.from_numpy(tokens.astype("int64"))
    result = []
    with torch.no_grad():
        for i in range(1, len(ids)):
            logits = model(ids[None, first_seen(i) : i]).logits[0, -1]
            result.append(F.cross_entropy(logits, ids[i]).item())
    return result


@pytest.mark.parametrize("batch_size", [1, 3, None])
@pytest.mark.parametrize("chunk_length", [5, 8, 1000])
def test_windows_score_every_token_once(make_model, vocabulary, text, batch_size, chunk_length):
    model = make_model()
    tokens = load_tokens(text, vocabulary)
    expected = losses_one_by_one(model, tokens, lambda i: (i - 1) // chunk_length * chunk_length)
    score = evaluate(model, vocabulary, text, chunk_length=chunk_length, batch_size=batch_size)
    assert score.tokens == score.bytes == len(TEXT.encode())
    assert score.loss == pytest.approx(sum(expected) / len(expected), rel=1e-6)
    assert score.perplexity == pytest.approx(math.exp(score.loss))


def test_the_trained_chunk_length_is_the_default(make_model, vocabulary, text):
    model = make_model()
    assert evaluate(model, vocabulary, text) == evaluate(model, vocabulary, text, chunk_length=8)


def test_memory_is_carried_from_chunk_to_chunk(make_model, vocabulary, text):
    model = make_model(num_hidden_layers=1, **MEMORY)
    tokens = load_tokens(text, vocabulary)
    # One layer sees the chunk so far and the 8 tokens before the chunk.
    expected = losses_one_by_one(model, tokens, lambda i: max(0, (i - 1) // 8 * 8 - 8))
    score = evaluate(model, vocabulary, text)
    assert score.tokens == len(TEXT.encode())
    assert score.loss == pytest.approx(sum(expected) / len(expected), rel=1e-6)


def test_lanes_score_every_token_once_and_start_without_memory(make_model, vocabulary):
    model = make_model(num_hidden_layers=1, **MEMORY)
    tokens = vocabulary.encode(TEXT * 5)
    n_scored = len(tokens) - 1
    lane = math.ceil(n_scored / 3)  # three lanes of at least 16 chunks

    def first_seen(i):
        start = (i - 1) // lane * lane
        return max(start, start + (i - 1 - start) // 8 * 8 - 8)

    expected = losses_one_by_one(model, tokens, first_seen)
    score = score_tokens(model, vocabulary, tokens, chunk_length=8, batch_size=64)
    assert score.loss == pytest.approx(sum(expected) / n_scored, rel=1e-6)
    assert score.tokens == n_scored


def test_separators_between_documents_are_scored_but_are_no_bytes(make_model, vocabulary, tmp_path):
    path = tmp_path / "three.jsonl"
    path.write_text('{"t": "ab"}\n{"t": "é"}\n{"t": "c"}\n')
    score = evaluate(make_model(), vocabulary, f"jsonl:{path}#t")
    assert (score.tokens, score.bytes) == (7, 5)
    assert score.bits_per_byte == pytest.approx(score.loss * 7 / 5 / math.log(2))


def test_evaluation_leaves_dropout_and_random_numbers_alone(make_model, vocabulary, text):
    model = make_model(dropout=0.5)
    state = torch.get_rng_state()
    quiet = evaluate(model, vocabulary, text)
    model.train()
    assert evaluate(model, vocabulary, text) == quiet
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


def test_a_hopeless_loss_has_infinite_perplexity():
    assert Evaluation(loss=1e4, tokens=1, bytes=1).perplexity == math.inf


def test_unreadable_text_is_an_error(make_model, vocabulary):
    with pytest.raises(DataError, match="no file matches"):
        evaluate(make_model(), vocabulary, "text:/nowhere/at/all")


@pytest.mark.parametrize("setting", ["chunk_length", "batch_size"])
def test_a_size_below_one_is_named(make_model, vocabulary, text, setting):
    with pytest.raises(ValueError, match=f"{setting} is 0"):
        evaluate(make_model(), vocabulary, text, **{setting: 0})

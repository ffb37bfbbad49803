import math

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from switchhead.data import load_tokens
from switchhead.errors import DataError
from switchhead.eval import Evaluation, encode_request, evaluate, score_continuations, score_tokens
from tests.eval.conftest import NextToken

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


@pytest.mark.parametrize("batch_size", [1, 3, None])
@pytest.mark.parametrize(("chunk_length", "stride"), [(8, 1), (8, 3), (8, 8), (30, 7), (1000, 1)])
def test_overlapping_windows_score_every_token_once(make_model, vocabulary, text, batch_size, chunk_length, stride):
    model = make_model()
    tokens = load_tokens(text, vocabulary)

    def first_seen(i):  # of the first window that scores token i
        return max(0, math.ceil((i - chunk_length) / stride)) * stride

    expected = losses_one_by_one(model, tokens, first_seen)
    score = evaluate(model, vocabulary, text, chunk_length=chunk_length, stride=stride, batch_size=batch_size)
    assert score.tokens == len(TEXT.encode())
    assert score.loss == pytest.approx(sum(expected) / len(expected), rel=1e-9)


def test_the_batch_size_changes_nothing_in_float32(make_model, vocabulary, text):
    model = make_model().float()
    losses = [evaluate(model, vocabulary, text, batch_size=n).loss for n in (1, 2, 5, 64)]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)


def test_words_count_line_ends_and_characters_are_not_bytes(make_model, vocabulary, tmp_path):
    (tmp_path / "text").write_text(" = Été = \n\n Two words \n")
    score = evaluate(make_model(), vocabulary, f"text:{tmp_path / 'text'}")
    assert (score.words, score.characters, score.bytes) == (5 + 3, 23, 25)
    assert score.word_perplexity == pytest.approx(math.exp(score.loss * 25 / 8))
    assert score.bits_per_character == pytest.approx(score.loss * 25 / 23 / math.log(2))


def test_the_standard_error_is_that_of_independent_chunks(uniform, vocabulary, text):
    assert evaluate(uniform, vocabulary, text, chunk_length=5).standard_error == pytest.approx(0, abs=1e-12)
    assert evaluate(uniform, vocabulary, text, chunk_length=1000).standard_error is None

    def log_probabilities(tokens):  # a space costs 2 nats, anything else none
        return [-2.0 if token == ord(" ") else 0.0 for token in range(257)]

    losses = torch.tensor([2.0 if byte == ord(" ") else 0.0 for byte in TEXT.encode()], dtype=torch.float64)
    losses += math.log(256 + math.exp(-2))
    score = evaluate(NextToken(257, log_probabilities), vocabulary, text, chunk_length=1)
    assert score.standard_error == pytest.approx((losses.std() / math.sqrt(len(losses))).item())


def test_models_of_others_are_scored_by_the_same_windows(vocabulary, text):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=16, n_embd=8, n_layer=1, n_head=2)).double().eval()
    tokens = load_tokens(text, vocabulary)
    expected = losses_one_by_one(model, tokens, lambda i: (i - 1) // 16 * 16)
    assert evaluate(model, vocabulary, text).loss == pytest.approx(sum(expected) / len(expected), rel=1e-6)


def test_more_tokens_than_a_model_has_learned_positions_for_are_refused(vocabulary, text):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=16, n_embd=8, n_layer=1, n_head=2)).eval()
    with pytest.raises(ValueError, match="chunk_length is 17; GPT2LMHeadModel has learned 16 positions"):
        evaluate(model, vocabulary, text, chunk_length=17)
    with pytest.raises(ValueError, match="chunk_length is 17"):
        score_continuations(model, [encode_request(vocabulary, "", "a")], chunk_length=17)


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


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ({}, {"stride": 9}, "stride is 9; it must be at most chunk_length=8"),
        ({}, {"stride": 0}, "stride is 0"),
        (MEMORY, {"stride": 4}, "stride is 4, but a model with memory"),
    ],
)
def test_a_stride_that_cannot_be_is_named(make_model, vocabulary, text, kind, settings, message):
    with pytest.raises(ValueError, match=message):
        evaluate(make_model(**kind), vocabulary, text, **settings)


def test_a_hopeless_loss_has_infinite_perplexity():
    assert Evaluation(loss=1e4, tokens=1, bytes=1).perplexity == math.inf


def test_unreadable_text_is_an_error(make_model, vocabulary):
    with pytest.raises(DataError, match="no file matches"):
        evaluate(make_model(), vocabulary, "text:/nowhere/at/all")


@pytest.mark.parametrize("setting", ["chunk_length", "batch_size"])
def test_a_size_below_one_is_named(make_model, vocabulary, text, setting):
    with pytest.raises(ValueError, match=f"{setting} is 0"):
        evaluate(make_model(), vocabulary, text, **{setting: 0})

"""Ranks that score a text together; test_distributed.py has the processes."""

import copy
import functools
from dataclasses import dataclass

import numpy as np
import pytest

from switchhead.data import ByteVocabulary
from switchhead.eval import score_tokens
from switchhead.hf import SwitchHeadConfig, SwitchHeadForCausalLM
from switchhead.train.distributed import World

CHUNK = 6
LANE = 16 * CHUNK  # a lane has at least so many tokens
MEMORY = {"positions": "relative", "memory_length": 12}


@pytest.fixture
def make_model():
    def make(**changes):
        sizes = {"vocab_size": 257, "hidden_size": 16, "num_hidden_layers": 1, "head_dim": 6, "num_experts": 3}
        config = SwitchHeadConfig(**{**sizes, "intermediate_size": 24, "dropout": 0.0, **changes})
        return SwitchHeadForCausalLM(config).double()

    return make


def text_of(n_scored):
    random = np.random.default_rng(0)
    return np.concatenate([[256], random.integers(97, 123, n_scored)]).astype(np.uint16)


@dataclass(frozen=True)
class Ranks(World):
    """One of several ranks, which knows what the others add to its sum."""

    add: object = None

    def sum(self, values):
        return self.add(values)


def score_on_ranks(model, text, *, size, batch_size=4):
    """Every rank's result, and the shapes of its forward passes."""
    score = functools.partial(score_tokens, vocabulary=ByteVocabulary(), tokens=text, chunk_length=CHUNK)
    summands, results, shapes = [], [], []
    for rank in range(size):
        ranks = Ranks(rank, size, add=lambda values: summands.append(values) or values)
        score(copy.deepcopy(model), batch_size=batch_size, ranks=ranks)
    for rank in range(size):
        ranks, own = Ranks(rank, size, add=lambda values: np.sum(summands, axis=0).tolist()), copy.deepcopy(model)
        read = []
        own.register_forward_pre_hook(
            lambda module, args, arguments, read=read: read.append(tuple(arguments["input_ids"].shape)),
            with_kwargs=True,
        )
        results.append(score(own, batch_size=batch_size, ranks=ranks))
        shapes.append(read)
    return results, shapes


WINDOWS = [({}, n_scored) for n_scored in (1, 5, CHUNK, 4 * CHUNK, 100)]
LANES = [(MEMORY, n_scored) for n_scored in (5, 3 * LANE, 3 * LANE + 7)]


@pytest.mark.parametrize(("changes", "n_scored"), WINDOWS + LANES)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_score_what_one_does_whatever_their_number(make_model, changes, n_scored, size):
    model, text = make_model(**changes), text_of(n_scored)
    expected = score_tokens(model, ByteVocabulary(), text, chunk_length=CHUNK, batch_size=4)
    results, _ = score_on_ranks(model, text, size=size)
    for result in results:
        assert result == results[0]
        assert (result.tokens, result.bytes) == (n_scored, n_scored)
        assert result.loss == pytest.approx(expected.loss, rel=1e-12)
        assert (result.standard_error is None) == (n_scored <= CHUNK)
        assert result.ends.tolist() == expected.ends.tolist()
        np.testing.assert_allclose(result.deviations, expected.deviations, rtol=0, atol=1e-12)
    assert score_on_ranks(model, text, size=size)[0] == results


def test_every_rank_reads_its_share_of_each_batch_of_windows_or_one_that_does_not_count(make_model):
    one, two, end = (1, CHUNK), (2, CHUNK), (1, CHUNK - 2)
    _, shapes = score_on_ranks(make_model(), text_of(9 * CHUNK - 2), size=3)
    assert shapes == [[two, two, end], [one, one, end], [one, one, end]]
    _, shapes = score_on_ranks(make_model(), text_of(CHUNK - 2), size=2)
    assert shapes == [[end]] * 2


def test_every_rank_reads_its_share_of_the_lanes_or_one_that_does_not_count(make_model):
    model, text = make_model(**MEMORY), text_of(3 * LANE)
    one, two = (1, CHUNK), (2, CHUNK)
    assert score_on_ranks(model, text, size=2)[1] == [[two] * 16, [one] * 16]
    assert score_on_ranks(model, text, size=4)[1] == [[one] * 16] * 4


@pytest.mark.parametrize("changes", [{}, MEMORY])
@pytest.mark.parametrize("size", [1, 3])
def test_a_validation_tells_how_far_it_is_up_to_its_end(make_model, changes, size):
    shares = []
    ranks = Ranks(0, size, add=lambda values: values)
    options = {"chunk_length": CHUNK, "batch_size": 3, "ranks": ranks, "report": shares.append}
    score_tokens(make_model(**changes), ByteVocabulary(), text_of(100), **options)
    assert len(shares) > 3
    assert shares == sorted(set(shares))
    assert shares[-1] == 1

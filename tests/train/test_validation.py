"""Ranks that score a text together; test_distributed.py has the processes."""

import copy
import functools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from switchhead.data import ByteVocabulary
from switchhead.eval import score_tokens
from switchhead.hf import SwitchHeadConfig, SwitchHeadForCausalLM
from switchhead.train.distributed import World
from switchhead.train.validation import validate

CHUNK = 6
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


def validate_on_ranks(model, text, *, size, batch_size=4):
    """Every rank's result, and the shapes of its forward passes."""
    score = functools.partial(validate, vocabulary=ByteVocabulary(), text=text, chunk_length=CHUNK)
    summands, results, shapes = [], [], []
    for rank in range(size):
        world = Ranks(rank, size, add=lambda values: summands.append(values) or values)
        score(copy.deepcopy(model), batch_size=batch_size, world=world, report=lambda share: None)
    for rank in range(size):
        world, own = Ranks(rank, size, add=lambda values: np.sum(summands, axis=0).tolist()), copy.deepcopy(model)
        read = []
        own.register_forward_pre_hook(
            lambda module, args, arguments, read=read: read.append(tuple(arguments["input_ids"].shape)),
            with_kwargs=True,
        )
        results.append(score(own, batch_size=batch_size, world=world, report=lambda share: None))
        shapes.append(read)
    return results, shapes


@pytest.mark.parametrize("n_scored", [1, 5, CHUNK, 4 * CHUNK, 100])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_score_what_one_does_whatever_their_number(make_model, n_scored, size):
    model, text = make_model(), text_of(n_scored)
    expected = score_tokens(model, ByteVocabulary(), text, chunk_length=CHUNK, batch_size=4)
    results, _ = validate_on_ranks(model, text, size=size)
    for result in results:
        assert result == results[0]
        assert (result.tokens, result.bytes) == (n_scored, n_scored)
        assert result.loss == pytest.approx(expected.loss, rel=1e-12)
        assert (result.standard_error is None) == (n_scored <= CHUNK)
        assert result.ends.tolist() == expected.ends.tolist()
        np.testing.assert_allclose(result.deviations, expected.deviations, rtol=0, atol=1e-12)
    assert validate_on_ranks(model, text, size=size)[0] == results


def test_every_rank_scores_its_share_of_the_windows_and_runs_as_many_forward_passes(make_model):
    # 9 windows, of which 4 ranks read 4 at once: 3, 2, 2 and 2 of them, one by one, and one that does not count.
    _, shapes = validate_on_ranks(make_model(), text_of(9 * CHUNK - 2), size=4)
    window, end = (1, CHUNK), (1, CHUNK - 2)
    assert shapes == [[window] * 3, [window] * 3, [window] * 3, [window, end, window]]
    _, shapes = validate_on_ranks(make_model(), text_of(9 * CHUNK), size=2)
    assert shapes == [[(2, CHUNK), (2, CHUNK), (1, CHUNK)], [(2, CHUNK), (2, CHUNK), (1, CHUNK)]]
    _, shapes = validate_on_ranks(make_model(), text_of(CHUNK - 1), size=3)
    assert shapes == [[(1, CHUNK - 1)]] * 3  # one window: two ranks have none


def test_a_text_of_lanes_is_scored_whole_by_every_rank(make_model):
    model, text = make_model(**MEMORY), text_of(200)
    expected = score_tokens(model, ByteVocabulary(), text, chunk_length=CHUNK, batch_size=2)
    results, shapes = validate_on_ranks(model, text, size=3, batch_size=2)
    assert results == [expected] * 3
    assert shapes[0] == shapes[1] == shapes[2]
    assert sum(rows * length for rows, length in shapes[0]) == 200


@pytest.mark.parametrize("changes", [{}, MEMORY])
@pytest.mark.parametrize("size", [1, 3])
def test_a_validation_tells_how_far_it_is_up_to_its_end(make_model, changes, size):
    shares = []
    world = Ranks(0, size, add=lambda values: values)
    with torch.no_grad():
        validate(
            make_model(**changes),
            ByteVocabulary(),
            text_of(100),
            chunk_length=CHUNK,
            batch_size=3,
            world=world,
            report=shares.append,
        )
    assert len(shares) > 3
    assert shares == sorted(set(shares))
    assert shares[-1] == 1

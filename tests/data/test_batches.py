import numpy as np
import pytest
import torch

from switchhead.data import LaneBatches, WindowBatches
from switchhead.errors import DataError

TOKENS = np.arange(103, dtype=np.uint16)


def make(kind, tokens=TOKENS, batch_size=4, chunk_length=5):
    if kind is LaneBatches:
        return LaneBatches(tokens, batch_size, chunk_length)
    return WindowBatches(tokens, batch_size, chunk_length, seed=3)


@pytest.mark.parametrize("kind", [LaneBatches, WindowBatches])
def test_targets_are_the_tokens_after_the_inputs(kind):
    for number in (0, 1, 40):
        inputs, targets = make(kind).batch(number)
        assert inputs.shape == targets.shape == (4, 5)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(targets, (inputs + 1) % len(TOKENS))


def test_each_lane_goes_on_where_it_stopped_for_ever():
    batches = make(LaneBatches)
    lanes = torch.cat([batches.batch(n)[0] for n in range(60)], dim=1)
    assert lanes[:, 0].tolist() == [0, 25, 51, 77]
    assert torch.equal(lanes[:, 1:], (lanes[:, :-1] + 1) % len(TOKENS))


def test_windows_of_a_pass_do_not_overlap_and_passes_differ():
    batches = make(WindowBatches, batch_size=20)  # 20 windows of 5 are one pass over 103 tokens
    passes = [batches.batch(n)[0] for n in range(3)]
    for windows in passes:
        assert windows.unique().numel() == 100
    starts = [windows[:, 0].tolist() for windows in passes]
    assert starts[0] != starts[1]
    assert starts[0] != sorted(starts[0])


def test_windows_depend_on_the_seed_and_on_nothing_else():
    first, again = make(WindowBatches).batch(7), make(WindowBatches).batch(7)
    other = WindowBatches(TOKENS, 4, 5, seed=4).batch(7)
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("kind", [LaneBatches, WindowBatches])
def test_one_chunk_and_its_next_token_is_the_shortest_text(kind):
    inputs, _ = make(kind, tokens=TOKENS[:6]).batch(11)
    assert inputs.shape == (4, 5)
    with pytest.raises(DataError, match=r"5 tokens, fewer than one chunk .* \(chunk_length \+ 1 = 6\)"):
        make(kind, tokens=TOKENS[:5])

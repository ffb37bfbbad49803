import itertools

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
        batch = make(kind).batch(number)
        assert batch.inputs.shape == batch.targets.shape == (4, 5)
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert torch.equal(batch.targets, (batch.inputs + 1) % len(TOKENS))
        assert batch.position_ids is None


@pytest.mark.parametrize("kind", [LaneBatches, WindowBatches])
@pytest.mark.parametrize("cuts", [(0, 2, 4), (0, 1, 2, 3, 4), (0, 3, 3, 4)])
def test_rows_of_all_ranks_are_the_whole_batch(kind, cuts):
    batches = make(kind)
    for number in (0, 19, 20):  # within a pass over the windows, and across its end
        whole = batches.batch(number)
        parts = [batches.batch(number, range(a, b)) for a, b in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
        assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)
        assert torch.equal(whole.rows(slice(1, 3)).targets, whole.targets[1:3])


def test_each_lane_goes_on_where_it_stopped_for_ever():
    batches = make(LaneBatches)
    lanes = torch.cat([batches.batch(n).inputs for n in range(60)], dim=1)
    assert lanes[:, 0].tolist() == [0, 25, 51, 77]
    assert torch.equal(lanes[:, 1:], (lanes[:, :-1] + 1) % len(TOKENS))


def test_windows_of_a_pass_do_not_overlap_and_passes_differ():
    batches = make(WindowBatches, batch_size=20)  # 20 windows of 5 are one pass over 103 tokens
    passes = [batches.batch(n).inputs for n in range(3)]
    for windows in passes:
        assert windows.unique().numel() == 100
    starts = [windows[:, 0].tolist() for windows in passes]
    assert starts[0] != starts[1]
    assert starts[0] != sorted(starts[0])


def test_windows_depend_on_the_seed_and_on_nothing_else():
    first, again = make(WindowBatches).batch(7), make(WindowBatches).batch(7)
    other = WindowBatches(TOKENS, 4, 5, seed=4).batch(7)
    assert torch.equal(first.inputs, again.inputs)
    assert not torch.equal(first.inputs, other.inputs)


def test_positions_restart_at_every_beginning_token_and_at_every_row():
    tokens = np.array([9, 1, 2, 9, 9, 3, 4, 5, 9, 6, 7, 8, 1], dtype=np.uint16)
    batches = WindowBatches(tokens, batch_size=2, chunk_length=6, seed=0, beginning=9)
    for number in range(6):
        batch = batches.batch(number)
        for inputs, positions in zip(batch.inputs.tolist(), batch.position_ids.tolist(), strict=True):
            expected, place = [], -1
            for token in inputs:
                place = 0 if token == 9 else place + 1
                expected.append(place)
            assert positions == expected
        assert torch.equal(batches.batch(number, range(1, 2)).position_ids, batch.position_ids[1:])


@pytest.mark.parametrize("kind", [LaneBatches, WindowBatches])
def test_one_chunk_and_its_next_token_is_the_shortest_text(kind):
    assert make(kind, tokens=TOKENS[:6]).batch(11).inputs.shape == (4, 5)
    with pytest.raises(DataError, match=r"5 tokens, fewer than one chunk .* \(chunk_length \+ 1 = 6\)"):
        make(kind, tokens=TOKENS[:5])

from itertools import pairwise

import pytest
import torch

from switchhead.ops.triton.grouping import Rows, group_rows


def random_indices(tokens: int, heads: int, experts: int, k: int, device: str):
    return torch.rand(tokens, heads, experts).argsort(-1)[..., :k].to(device)


def experts_of(row: int, rows: Rows, indices) -> list[int]:
    """Matrices that a row needs, ascending within each head."""
    heads, k = indices.shape[1:]
    ascending = indices.sort(-1).values.flatten().tolist()

    def matrix(slot: int) -> int:
        head = 0 if rows.pooled else slot // k % heads
        return head * rows.n_experts + ascending[slot]

    return [matrix(slot) for slot in range(row * rows.slots, (row + 1) * rows.slots)]


def check(indices, rows: Rows, *, block: int = 16, **options) -> None:
    groups = group_rows(indices, rows, block, **options)
    order = groups.order.tolist()
    assert sorted(order) == list(range(indices.numel() // rows.slots))
    offsets = groups.offsets.tolist()
    for first, end in pairwise(offsets):
        assert order[first:end] == sorted(order[first:end])

    covered = []
    for tiles in groups.tiles.tolist():
        *records, (n_tiles, *_) = tiles
        assert n_tiles == sum(1 for record in records if record[:2] != [0, 0])
        for start, end, *rest in records:
            covered += range(start, end)
            for row in order[start:end]:
                assert rest[: rows.slots] == experts_of(row, rows, indices)
    assert sorted(covered) == list(range(len(order)))


def test_rows_of_heads_are_grouped_by_their_sets_of_experts(device):
    check(random_indices(70, 2, 4, 2, device), Rows(2, 1, 1, 2, 4))


def test_rows_of_several_heads_are_grouped_by_joint_sets(device):
    check(random_indices(40, 4, 3, 2, device), Rows(2, 1, 2, 2, 3), by_segment=True)


def test_rows_of_a_shared_pool_are_grouped_together(device):
    check(random_indices(30, 3, 5, 3, device), Rows(1, 3, 1, 3, 5, pooled=True))


def test_slots_are_grouped_by_expert_and_numbered_by_rank(device):
    check(random_indices(50, 2, 4, 2, device), Rows(2, 2, 1, 2, 4, single=True))


def test_even_tiles_cover_unequal_groups(device):
    indices = random_indices(200, 2, 4, 2, device)
    indices[:150] = indices[0]  # most tokens agree, so some groups are long
    check(indices, Rows(2, 2, 1, 2, 4, single=True), block=32, even=16)


def test_records_past_the_last_tile_are_empty_however_many_rounding_leaves(device, poisoned_allocations):
    indices = torch.arange(4, dtype=torch.int32, device=device).repeat(23)  # 1.4 tiles a group, rounded to 1
    tiles = group_rows(indices[:, None, None], Rows(1, 1, 1, 1, 4, single=True), 16, even=4).tiles[0].tolist()
    assert [record[:2] for record in tiles[:-1]] == [[0, 23], [23, 46], [46, 69], [69, 92]] + [[0, 0]] * 6


@pytest.mark.parametrize("by_segment", [False, True])
@pytest.mark.parametrize("tokens", [1, 1100])
def test_one_row_and_several_blocks_of_rows_are_grouped_alike(tokens, by_segment, device, poisoned_allocations):
    indices = random_indices(tokens, 2, 3, 2, device)
    check(indices, Rows(2, 1, 1, 2, 3), block=128, by_segment=by_segment)
    all_the_same = torch.arange(2, device=device).expand(tokens, 2, 2)
    check(all_the_same, Rows(2, 1, 1, 2, 3), block=128, by_segment=by_segment)


def test_groups_nobody_chose_are_empty(device):
    indices = torch.zeros(20, 1, 1, dtype=torch.int32, device=device)
    groups = group_rows(indices, Rows(1, 1, 1, 1, 4), 16)
    assert groups.offsets.tolist() == [0, 20, 20, 20, 20]


def test_slots_sorted_one_by_one_need_no_number_of_sets():
    """512 choose 4 does not fit into the kernels' 32 bits."""
    assert Rows(1, 4, 1, 4, 512, pooled=True, single=True).sets == 1
    assert Rows(1, 1, 2, 2, 4).sets == 6

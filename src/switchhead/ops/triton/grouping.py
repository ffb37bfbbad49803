"""Rows ordered by the experts they chose: a counting sort on the device, without synchronisation.

A *row* is what one tile line of a matmul stands for: a token and head with its k experts, a token with the experts of
several heads, or a single slot (one choice of one token). Rows that chose the same *set* of experts form a *group*:
a tile of such rows needs exactly the arithmetic of its experts. There are `binomial(E, k)` sets for each head.

Rows are numbered `(token * segments + segment) * inner + i`. Each segment (a head, or several) is sorted on its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import torch
import triton
import triton.language as tl
from torch import Tensor

from switchhead.ops.triton.operator import visible

# Elements of the one-hot matrix [rows, groups] of one program. Counts of all earlier programs are summed by each later
# one, which is quadratic in the number of rows, and still below 1 % of the matmuls' time at a million tokens.
_ONE_HOT = 8192
RECORD = 16  # integers of a tile record: first row, end, the matrix of each slot, the tile's number group by group


@dataclass(frozen=True)
class Rows:
    """Which slots make a row, and how rows are numbered.

    Attributes:
        segments: independent sorts; all rows of a segment draw from the same expert matrices.
        inner: rows of one token in one segment.
        parts: heads (with k experts each) that make up a row.
        k: experts of each part; their order in a row is ascending.
        n_experts: experts a part chooses from.
        pooled: all segments share one pool of matrices.
        single: rows are slots of heads with k experts; they are sorted by their one expert, and numbered by its rank
            among the head's experts.
    """

    segments: int
    inner: int
    parts: int
    k: int
    n_experts: int
    pooled: bool = False
    single: bool = False

    @property
    def sets(self) -> int:
        """Sets of experts that a part can choose; single slots have none."""
        return 1 if self.single else comb(self.n_experts, self.k)

    @property
    def groups(self) -> int:
        """Groups of one segment."""
        return self.n_experts if self.single else self.sets**self.parts

    @property
    def slots(self) -> int:
        """Experts of a row."""
        return 1 if self.single else self.parts * self.k


@dataclass(frozen=True)
class Groups:
    """`order[offsets[g]:offsets[g + 1]]` are the rows of group g (segment-major), ascending; `tiles` cover them.

    The bound on the number of tiles follows from shapes alone; records past the last tile are empty (first row and end
    are 0), and the very last one holds the number of tiles. Tiles are listed by their relative place in their group:
    programs that run together then read the same tokens, which stay in the L2 cache.
    """

    rows: Rows
    order: Tensor  # int32 [rows]
    offsets: Tensor  # int32 [segments * groups + 1]
    tiles: Tensor  # int32 [maps, bound + 1, RECORD]


def group_rows(expert_indices: Tensor, rows: Rows, block: int, *, by_segment: bool = False, even: int = 0) -> Groups:
    """Sort the rows of `expert_indices [N, H, K]`, N > 0, by the experts they chose; cover them with tiles.

    Args:
        block: rows of a tile at most.
        by_segment: one map of tiles for each segment.
        even: cut each group into `max(1, round(rows / block))` tiles of equal size instead, a multiple of `even`.
    """
    indices = expert_indices.contiguous()
    device = indices.device
    n_slots = indices.numel()
    n_rows = n_slots if rows.single else n_slots // rows.slots
    per_segment = n_rows // rows.segments
    padded = triton.next_power_of_2(rows.groups)
    counted = 512 if padded <= 32 else 256 if padded <= 128 else 1024
    blocks = triton.cdiv(per_segment, counted)
    keys = torch.empty(n_rows, dtype=torch.int32, device=device)
    # [segments, blocks, groups], but flat: of a dimension of blocks compiled code would ask whether it is one.
    counts = torch.empty(rows.segments * blocks * rows.groups, dtype=torch.int32, device=device)
    order = torch.empty(n_rows, dtype=torch.int32, device=device)
    offsets = torch.empty(rows.segments * rows.groups + 1, dtype=torch.int32, device=device)
    maps = rows.segments if by_segment else 1
    groups = rows.groups * rows.segments // maps
    bound = triton.cdiv(n_rows // maps, block) + groups
    tiles = torch.empty(maps, bound + 1, RECORD, dtype=torch.int32, device=device)
    visible(_count_kernel)[(blocks, rows.segments)](
        indices, keys, counts, per_segment, rows.segments, rows.inner, rows.parts, rows.k,
        rows.sets, rows.single, rows.groups, padded, counted,
    )  # fmt: skip
    padded_map = triton.next_power_of_2(groups)
    visible(_place_kernel)[(rows.groups + blocks, rows.segments)](
        keys, counts, order, offsets, tiles, per_segment, blocks, bound,
        rows.segments, rows.inner, rows.parts, rows.k, rows.n_experts, rows.sets, rows.slots, rows.single, rows.pooled,
        rows.groups, padded, counted, min(counted, _ONE_HOT // padded), maps, block, even,
        triton.next_power_of_2(rows.n_experts), padded_map, max(1, min(64, _ONE_HOT // padded_map)),
    )  # fmt: skip
    return Groups(rows, order, offsets, tiles)


@triton.jit
def _key(indices_ptr, row, mask, PARTS: tl.constexpr, K: tl.constexpr, N_SETS: tl.constexpr, SINGLE: tl.constexpr):
    """Group of each row: the rank of its set of experts, a mixed-radix number over parts.

    For single slots `expert * K + number of smaller experts beside it`.
    """
    if SINGLE:
        key = tl.load(indices_ptr + row, mask=mask, other=0).to(tl.int32)
        rank = tl.zeros_like(row)
        for j in tl.static_range(K):
            rank += (tl.load(indices_ptr + row // K * K + j, mask=mask, other=0).to(tl.int32) < key).to(tl.int32)
        return key * K + rank
    key = tl.zeros_like(row)
    for part in tl.static_range(PARTS):
        at = indices_ptr + (row * PARTS + part) * K
        set_rank = tl.zeros_like(row)
        for j in tl.static_range(K):
            expert = tl.load(at + j, mask=mask, other=0).to(tl.int32)
            smaller = tl.zeros_like(row)
            for i in tl.static_range(K):
                smaller += (tl.load(at + i, mask=mask, other=0).to(tl.int32) < expert).to(tl.int32)
            # Combinatorial number system: the expert with `smaller` below it adds binomial(expert, smaller + 1).
            binomial = expert
            term = expert
            for r in tl.static_range(1, K):
                binomial = binomial * (expert - r) // (r + 1)
                term = tl.where(smaller >= r, binomial, term)
            set_rank += term
        key = key * N_SETS + set_rank
    return key


@triton.jit
def _row(i, segment, SEGMENTS: tl.constexpr, INNER: tl.constexpr):
    return (i // INNER * SEGMENTS + segment) * INNER + i % INNER


@triton.jit(do_not_specialize=["per_segment"])
def _count_kernel(
    indices_ptr,  # int [slots]
    keys_ptr,  # int32 [rows]
    counts_ptr,  # int32 [segments, blocks, groups]
    per_segment,
    SEGMENTS: tl.constexpr, INNER: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr, N_SETS: tl.constexpr,
    SINGLE: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block, segment = tl.program_id(0), tl.program_id(1)
    i = block * BLOCK + tl.arange(0, BLOCK)
    mask = i < per_segment
    row = _row(i, segment, SEGMENTS, INNER)
    key = _key(indices_ptr, row, mask, PARTS, K, N_SETS, SINGLE)
    tl.store(keys_ptr + row, key, mask=mask)
    count = tl.histogram(key // K if SINGLE else key, GROUPS_PADDED, mask=mask)
    g = tl.arange(0, GROUPS_PADDED)
    tl.store(counts_ptr + (segment * tl.num_programs(0) + block) * GROUPS + g, count, mask=g < GROUPS)


@triton.jit(do_not_specialize=["per_segment", "blocks", "bound"])
def _place_kernel(
    keys_ptr,  # int32 [rows]
    counts_ptr,  # int32 [segments, blocks, groups]
    order_ptr,  # int32 [rows]
    offsets_ptr,  # int32 [segments * groups + 1]
    tiles_ptr,  # int32 [maps, bound + 1, 16]
    per_segment, blocks, bound,
    SEGMENTS: tl.constexpr, INNER: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr, N_EXPERTS: tl.constexpr,
    N_SETS: tl.constexpr, SLOTS: tl.constexpr, SINGLE: tl.constexpr, POOLED: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    MAPS: tl.constexpr, TILE: tl.constexpr, EVEN: tl.constexpr, EXPERTS_PADDED: tl.constexpr,
    MAP_PADDED: tl.constexpr, TILE_STEP: tl.constexpr,
):  # fmt: skip
    """The first programs of a segment list the tiles of a group each, the others place a block of rows each.

    All add up the counts for themselves, which is cheaper than a launch while groups are few.
    """
    segment = tl.program_id(1)
    if tl.program_id(0) < GROUPS:
        _list_tiles(
            counts_ptr, tiles_ptr, per_segment, blocks, bound, segment, tl.program_id(0),
            SEGMENTS, PARTS, K, N_EXPERTS, N_SETS, SLOTS, SINGLE, POOLED, GROUPS,
            MAPS, TILE, EVEN, EXPERTS_PADDED, MAP_PADDED, TILE_STEP,
        )  # fmt: skip
        return
    block = tl.program_id(0) - GROUPS
    RANKS: tl.constexpr = K if SINGLE else 1
    g = tl.arange(0, GROUPS_PADDED)
    b = tl.arange(0, STEP)
    total = tl.zeros((GROUPS_PADDED,), tl.int32)
    before = tl.zeros((GROUPS_PADDED,), tl.int32)
    for first in range(0, blocks, STEP):
        at = (segment * blocks + first + b)[:, None] * GROUPS + g[None, :]
        count = tl.load(counts_ptr + at, mask=(first + b < blocks)[:, None] & (g < GROUPS)[None, :], other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where((first + b < block)[:, None], count, 0), 0)
    offset = segment * per_segment + tl.cumsum(total, 0) - total
    if block == 0:
        tl.store(offsets_ptr + segment * GROUPS + g, offset, mask=g < GROUPS)
        tl.store(offsets_ptr + (segment + 1) * GROUPS, (segment + 1) * per_segment, mask=segment == SEGMENTS - 1)
    base = offset + before
    for start in range(0, BLOCK, STEP):
        i = block * BLOCK + start + b
        mask = i < per_segment
        row = _row(i, segment, SEGMENTS, INNER)
        key = tl.load(keys_ptr + row, mask=mask, other=0)
        one_hot = ((key // RANKS)[:, None] == g[None, :]) & mask[:, None]
        one_hot = one_hot.to(tl.int32)
        rank = tl.cumsum(one_hot, 0) - 1 + base[None, :]
        tl.store(order_ptr + tl.sum(one_hot * rank, 1), row // RANKS * RANKS + key % RANKS, mask=mask)
        base += tl.sum(one_hot, 0)


@triton.jit
def _list_tiles(
    counts_ptr, tiles_ptr, per_segment, blocks, bound, segment, digits,
    SEGMENTS: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr, N_EXPERTS: tl.constexpr, N_SETS: tl.constexpr,
    SLOTS: tl.constexpr, SINGLE: tl.constexpr, POOLED: tl.constexpr, GROUPS: tl.constexpr, MAPS: tl.constexpr,
    TILE: tl.constexpr, EVEN: tl.constexpr, EXPERTS_PADDED: tl.constexpr, MAP_PADDED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Records of one group's tiles; `digits` is its number in its segment, which says what its experts are."""
    IN_MAP: tl.constexpr = SEGMENTS // MAPS  # segments of a map
    MAP_GROUPS: tl.constexpr = IN_MAP * GROUPS
    map_ = segment // IN_MAP
    group = segment % IN_MAP * GROUPS + digits
    g = tl.arange(0, MAP_PADDED)
    b = tl.arange(0, STEP)
    n_rows = tl.zeros((MAP_PADDED,), tl.int32)
    for first in range(0, blocks, STEP):
        at = ((map_ * IN_MAP + g // GROUPS) * blocks)[None, :] + (first + b)[:, None]
        inside = (first + b < blocks)[:, None] & (g < MAP_GROUPS)[None, :]
        n_rows += tl.sum(tl.load(counts_ptr + at * GROUPS + (g % GROUPS)[None, :], mask=inside, other=0), 0)
    n_tiles = n_tiles_of(n_rows, TILE, EVEN)
    mine = tl.sum(tl.where(g == group, n_tiles, 0), 0)
    start = map_ * IN_MAP * per_segment + tl.sum(tl.where(g < group, n_rows, 0), 0)
    stop = start + tl.sum(tl.where(g == group, n_rows, 0), 0)
    records = tiles_ptr + map_.to(tl.int64) * (bound + 1) * 16

    first_matrix = segment * PARTS * N_EXPERTS
    if POOLED:
        first_matrix = segment * 0
    matrices = ()
    if SINGLE:
        matrices = (first_matrix + digits,)
    else:
        c = tl.arange(0, EXPERTS_PADDED)
        for p in tl.static_range(PARTS):  # the first part is the highest digit
            digit = digits
            for _ in tl.static_range(PARTS - 1 - p):
                digit = digit // N_SETS
            digit = digit % N_SETS
            chosen = ()
            for j in tl.static_range(K):
                # The largest expert c whose binomial(c, K - j) still fits.
                binomial = c
                for r in tl.static_range(1, K - j):
                    binomial = binomial * (c - r) // (r + 1)
                fits = (binomial <= digit) & (c < N_EXPERTS)
                expert = tl.max(tl.where(fits, c, 0), 0)
                digit -= tl.max(tl.where(fits, binomial, 0), 0)
                if not POOLED:
                    expert += p * N_EXPERTS
                chosen = (first_matrix + expert,) + chosen
            matrices = matrices + chosen

    size = tile_size(stop - start, mine, TILE, EVEN)
    t = tl.arange(0, STEP)
    for t0 in range(0, mine, STEP):
        tile = t0 + t
        # Tiles of group g whose place (2 t' + 1) / n' is before this one's (2 t + 1) / n, ties by group.
        ahead = (2 * tile + 1).to(tl.int64)[:, None] * n_tiles[None, :] - mine + tl.where(g < group, 1, 0)[None, :]
        earlier = tl.minimum(tl.maximum((ahead + 2 * mine - 1) // (2 * mine), 0), n_tiles[None, :])
        record = records + tl.sum(earlier, 1) * 16
        begin = tl.minimum(start + tile * size, stop)
        tl.store(record, begin, mask=tile < mine)
        tl.store(record + 1, tl.minimum(begin + size, stop), mask=tile < mine)
        for s in tl.static_range(SLOTS):
            tl.store(record + 2 + s, matrices[s], mask=tile < mine)
        number = tl.sum(tl.where(g < group, n_tiles, 0), 0) + tile
        tl.store(record + 2 + SLOTS, number, mask=tile < mine)
    if group == 0:  # the rest of the list is empty
        used = tl.sum(n_tiles, 0)
        for unused in range(used, bound, MAP_PADDED):  # more than there are groups, where tiles are even
            at = records + (unused + g).to(tl.int64) * 16
            tl.store(at, 0, mask=unused + g < bound)
            tl.store(at + 1, 0, mask=unused + g < bound)
        tl.store(records + bound * 16, used)


@triton.jit
def n_tiles_of(rows, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Tiles of a group of `rows` rows (see `group_rows`)."""
    if EVEN:
        return tl.where(rows > 0, tl.maximum((rows + BLOCK // 2) // BLOCK, 1), 0)
    return (rows + BLOCK - 1) // BLOCK


@triton.jit
def tile_size(rows, n_tiles, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Rows of each tile but the last of a group; where sizes are even, the last may be empty."""
    if EVEN:
        return tl.cdiv(tl.cdiv(rows, tl.maximum(n_tiles, 1)), EVEN) * EVEN
    return rows * 0 + BLOCK

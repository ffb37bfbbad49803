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

# Elements of the one-hot matrix [rows, groups] of one program. Counts of all earlier programs are summed by each later
# one, which is quadratic in the number of rows, and still below 1 % of the matmuls' time at a million tokens.
_ONE_HOT = 8192
RECORD = 16  # integers a tile record holds: first row, end, then one expert for each slot


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
    def groups(self) -> int:
        """Groups of one segment."""
        return self.n_experts if self.single else comb(self.n_experts, self.k) ** self.parts

    @property
    def slots(self) -> int:
        """Experts of a row."""
        return 1 if self.single else self.parts * self.k


@dataclass(frozen=True)
class Groups:
    """`order[offsets[g]:offsets[g + 1]]` are the rows of group g (segment-major), ascending."""

    rows: Rows
    order: Tensor  # int32 [rows]
    offsets: Tensor  # int32 [segments * groups + 1]

    def tiles(self, block: int, *, by_segment: bool = False) -> Tensor:
        """Records of the tiles of `block` rows that cover all groups, int32 `[maps, bound, RECORD]`.

        The bound follows from shapes alone; records past the last tile are empty. Tiles are listed first tiles of all
        groups first: programs that run together then read the same tokens, which stay in the L2 cache.
        """
        n_maps = self.rows.segments if by_segment else 1
        groups = self.rows.groups * self.rows.segments // n_maps
        bound = triton.cdiv(self.order.numel() // n_maps, block) + groups
        tiles = torch.empty(n_maps, bound, RECORD, dtype=torch.int32, device=self.order.device)
        rows = self.rows
        padded = triton.next_power_of_2(groups)
        _tiles_kernel[(groups, n_maps)](
            self.offsets, tiles, bound, groups, rows.groups, rows.n_experts, rows.parts, rows.k,
            comb(rows.n_experts, rows.k), rows.slots, rows.single, rows.pooled, block,
            triton.next_power_of_2(rows.n_experts), padded, max(16, min(64, _ONE_HOT // padded)),
        )  # fmt: skip
        return tiles


def group_rows(expert_indices: Tensor, rows: Rows) -> Groups:
    """Sort the rows of `expert_indices [N, H, K]` by the experts they chose."""
    indices = expert_indices.contiguous()
    device = indices.device
    groups_padded = triton.next_power_of_2(rows.groups)
    block = max(16, min(512, _ONE_HOT // groups_padded))
    n_slots = indices.numel()
    n_rows = n_slots if rows.single else n_slots // rows.slots
    per_segment = n_rows // rows.segments
    blocks = triton.cdiv(per_segment, block)
    counts = torch.empty(rows.segments, blocks, rows.groups, dtype=torch.int32, device=device)
    order = torch.empty(n_rows, dtype=torch.int32, device=device)
    offsets = torch.empty(rows.segments * rows.groups + 1, dtype=torch.int32, device=device)
    shape = (rows.segments, rows.inner, rows.parts, rows.k, comb(rows.n_experts, rows.k), rows.single)
    sizes = (rows.groups, groups_padded, block)
    grid = (blocks, rows.segments)
    _count_kernel[grid](indices, counts, per_segment, *shape, *sizes)
    _place_kernel[grid](indices, counts, order, offsets, per_segment, blocks, *shape, *sizes)
    return Groups(rows, order, offsets)


@triton.jit
def _key(indices_ptr, row, mask, PARTS: tl.constexpr, K: tl.constexpr, N_SETS: tl.constexpr, SINGLE: tl.constexpr):
    """Group of each row: the rank of its set of experts, a mixed-radix number over parts. Also the row's final number."""
    if SINGLE:
        key = tl.load(indices_ptr + row, mask=mask, other=0).to(tl.int32)
        first = row // K * K
        rank = tl.zeros_like(row)
        for j in tl.static_range(K):
            rank += (tl.load(indices_ptr + first + j, mask=mask, other=0).to(tl.int32) < key).to(tl.int32)
        return key, first + rank
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
    return key, row


@triton.jit
def _row(i, segment, SEGMENTS: tl.constexpr, INNER: tl.constexpr):
    return (i // INNER * SEGMENTS + segment) * INNER + i % INNER


@triton.jit(do_not_specialize=["per_segment"])
def _count_kernel(
    indices_ptr,  # int [slots]
    counts_ptr,  # int32 [segments, blocks, groups]
    per_segment,
    SEGMENTS: tl.constexpr, INNER: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr, N_SETS: tl.constexpr,
    SINGLE: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block, segment = tl.program_id(0), tl.program_id(1)
    g = tl.arange(0, GROUPS_PADDED)
    i = block * BLOCK + tl.arange(0, BLOCK)
    mask = i < per_segment
    key, _ = _key(indices_ptr, _row(i, segment, SEGMENTS, INNER), mask, PARTS, K, N_SETS, SINGLE)
    count = tl.sum(((key[:, None] == g[None, :]) & mask[:, None]).to(tl.int32), 0)
    tl.store(counts_ptr + (segment * tl.num_programs(0) + block) * GROUPS + g, count, mask=g < GROUPS)


@triton.jit(do_not_specialize=["per_segment", "blocks"])
def _place_kernel(
    indices_ptr,  # int [slots]
    counts_ptr,  # int32 [segments, blocks, groups]
    order_ptr,  # int32 [rows]
    offsets_ptr,  # int32 [segments * groups + 1]
    per_segment, blocks,
    SEGMENTS: tl.constexpr, INNER: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr, N_SETS: tl.constexpr,
    SINGLE: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block, segment = tl.program_id(0), tl.program_id(1)
    g = tl.arange(0, GROUPS_PADDED)
    i = block * BLOCK + tl.arange(0, BLOCK)
    mask = i < per_segment
    key, row = _key(indices_ptr, _row(i, segment, SEGMENTS, INNER), mask, PARTS, K, N_SETS, SINGLE)
    b = tl.arange(0, BLOCK)
    total = tl.zeros((GROUPS_PADDED,), tl.int32)
    before = tl.zeros((GROUPS_PADDED,), tl.int32)
    for first in range(0, blocks, BLOCK):
        at = (segment * blocks + first + b)[:, None] * GROUPS + g[None, :]
        count = tl.load(counts_ptr + at, mask=(first + b < blocks)[:, None] & (g < GROUPS)[None, :], other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where((first + b < block)[:, None], count, 0), 0)
    offset = segment * per_segment + tl.cumsum(total, 0) - total
    if block == 0:
        tl.store(offsets_ptr + segment * GROUPS + g, offset, mask=g < GROUPS)
        tl.store(offsets_ptr + (segment + 1) * GROUPS, (segment + 1) * per_segment, mask=segment == SEGMENTS - 1)
    one_hot = ((key[:, None] == g[None, :]) & mask[:, None]).to(tl.int32)
    rank = tl.cumsum(one_hot, 0) - 1 + (offset + before)[None, :]
    tl.store(order_ptr + tl.sum(one_hot * rank, 1), row, mask=mask)


@triton.jit(do_not_specialize=["bound"])
def _tiles_kernel(
    offsets_ptr,  # int32 [maps * groups + 1]
    tiles_ptr,  # int32 [maps, bound, 16]
    bound,
    GROUPS: tl.constexpr, SEGMENT_GROUPS: tl.constexpr, N_EXPERTS: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr,
    N_SETS: tl.constexpr, SLOTS: tl.constexpr, SINGLE: tl.constexpr, POOLED: tl.constexpr, BLOCK: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr, GROUPS_PADDED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    group, map_ = tl.program_id(0), tl.program_id(1)
    g = tl.arange(0, GROUPS_PADDED)
    first = tl.load(offsets_ptr + map_ * GROUPS + g, mask=g < GROUPS, other=0)
    end = tl.load(offsets_ptr + map_ * GROUPS + g + 1, mask=g < GROUPS, other=0)
    n_tiles = (end - first + BLOCK - 1) // BLOCK
    start = tl.load(offsets_ptr + map_ * GROUPS + group)
    stop = tl.load(offsets_ptr + map_ * GROUPS + group + 1)
    records = tiles_ptr + map_.to(tl.int64) * bound * 16

    number = map_ * GROUPS + group
    segment = number // SEGMENT_GROUPS
    rest = number % SEGMENT_GROUPS
    first_matrix = segment * PARTS * N_EXPERTS
    if POOLED:
        first_matrix = segment * 0

    matrices = ()
    if SINGLE:
        matrices = (first_matrix + rest,)
    else:
        c = tl.arange(0, EXPERTS_PADDED)
        for p in tl.static_range(PARTS):  # the first part is the highest digit
            digit = rest
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

    mine = (stop - start + BLOCK - 1) // BLOCK
    t = tl.arange(0, STEP)
    for t0 in range(0, mine, STEP):
        tile = t0 + t
        earlier = tl.minimum(n_tiles[None, :], tile[:, None]) + (
            (g < group)[None, :] & (n_tiles[None, :] > tile[:, None])
        ).to(tl.int32)
        record = records + tl.sum(earlier, 1).to(tl.int64) * 16
        begin = start + tile * BLOCK
        tl.store(record, begin, mask=tile < mine)
        tl.store(record + 1, tl.minimum(begin + BLOCK, stop), mask=tile < mine)
        for s in tl.static_range(SLOTS):
            tl.store(record + 2 + s, matrices[s], mask=tile < mine)
    if group == 0:  # the rest of the list is empty
        used = tl.sum(n_tiles, 0)
        at = records + (used + g).to(tl.int64) * 16
        tl.store(at, 0, mask=used + g < bound)
        tl.store(at + 1, 0, mask=used + g < bound)


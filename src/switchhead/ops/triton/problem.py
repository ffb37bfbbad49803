"""Which kernels serve an expert matmul, by its shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

from torch import Tensor

from switchhead.ops.triton.grouping import Rows

_MAX_SETS = 72  # groups of a head; more leave too few rows in each to fill tiles
_MAX_SLOTS = 4  # sums that one tile of `project` can hold in registers
_MAX_JOINT_SETS = 128
MAX_DENSE_RATIO = 2.0  # E / k up to which all experts in cuBLAS beat the chosen ones in kernels of ours
_MAX_SPARSE_SLOTS = 2  # of those, `project` still wins where a tile holds no more sums than this


@dataclass(frozen=True)
class Problem:
    """What shapes decide, before any number is looked at."""

    tokens: int
    heads: int
    k: int
    n_experts: int
    pooled: bool  # one set of matrices for all heads
    per_head: bool  # x has a row for each head

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, expert_indices: Tensor) -> Problem:
        """The problem of these operands of `moe_linear`."""
        tokens, heads, k = expert_indices.shape
        return cls(tokens, heads, k, weight.shape[1], weight.shape[0] == 1, x.ndim == 3)

    @property
    def by_sets(self) -> bool:
        """Group a head's rows by the set of its k experts; otherwise each slot is a row of its own."""
        return self.k <= _MAX_SLOTS and comb(self.n_experts, self.k) <= _MAX_SETS

    @property
    def segments(self) -> int:
        """Heads that have matrices of their own."""
        return 1 if self.pooled else self.heads

    @property
    def dense(self) -> bool:
        """Multiply with all experts of a head, the unchosen ones times zero (see `dense.py`)."""
        return (not self.pooled or self.heads == 1) and self.n_experts <= MAX_DENSE_RATIO * self.k

    @property
    def dense_project(self) -> bool:
        """The same for `project`, whose kernel has the easier shape."""
        return self.dense and self.k > _MAX_SPARSE_SLOTS

    def project_rows(self) -> Rows:
        """Rows of `project`: a token and head, or a slot."""
        inner = self.heads // self.segments
        if self.by_sets:
            return Rows(self.segments, inner, 1, self.k, self.n_experts, self.pooled)
        return Rows(self.segments, inner * self.k, 1, 1, self.n_experts, self.pooled)

    def accumulate_rows(self, *, per_head: bool) -> tuple[Rows, bool]:
        """Rows of `accumulate`, and whether its passes add up the heads: then a row covers as many heads as it can."""
        if not self.by_sets:
            return self.slot_rows(), False
        if per_head or self.pooled:
            return self.project_rows(), False
        parts = 2 if self.heads % 2 == 0 and comb(self.n_experts, self.k) ** 2 <= _MAX_JOINT_SETS else 1
        return Rows(self.heads // parts, 1, parts, self.k, self.n_experts), True

    def slot_rows(self) -> Rows:
        """Slots by expert."""
        inner = self.heads // self.segments * self.k
        return Rows(self.segments, inner, 1, self.k, self.n_experts, self.pooled, single=True)

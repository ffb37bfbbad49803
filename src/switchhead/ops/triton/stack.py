"""All weights that a layer's tokens meet as the rows of one matrix: stacked by one launch, and taken apart by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from switchhead.ops.triton.operator import visible

_BLOCK, _BLOCK_WIDE = 32, 64


class Weights(NamedTuple):
    """What is stacked, in this order; any float dtypes and strides.

    Attributes:
        plain: one or two projections `[H * d, D]`; each head has `width` rows in the matrix, at least d.
        values: experts `[H, E, D, d]`; each has `expert_width` rows, at least d.
        routers: `[R, E, D]`; each expert has one row. None: they have none.
    """

    plain: Sequence[Tensor]
    values: Tensor
    routers: Tensor | None


def stack_weights(
    weights: Weights, *, width: int, expert_width: int, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """The matrix, of this shape and dtype; what no weight fills is zero."""
    stacked = torch.empty(shape, dtype=dtype, device=weights.values.device)
    _move(stacked, weights, width, expert_width, back=False)
    return stacked


def unstack_weights(stacked: Tensor, like: Weights, *, width: int, expert_width: int) -> Weights:
    """The parts of a matrix `[rows, >= D]` of any strides, contiguous, in the shapes and dtypes of these weights."""

    def empty(weight: Tensor) -> Tensor:
        return torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)

    routers = None if like.routers is None else empty(like.routers)
    weights = Weights([empty(weight) for weight in like.plain], empty(like.values), routers)
    _move(stacked, weights, width, expert_width, back=True)
    return weights


def _move(stacked: Tensor, weights: Weights, width: int, expert_width: int, *, back: bool) -> None:
    plain, values, routers = weights
    heads, n_experts, d_model, d = values.shape
    second = plain[1] if len(plain) > 1 else None
    scores = values.new_empty(0, d_model) if routers is None else routers.flatten(0, 1)
    behind = stacked.shape[0] - len(plain) * heads * width - heads * n_experts * expert_width
    parts, expert_parts = triton.cdiv(width, _BLOCK), triton.cdiv(expert_width, _BLOCK)
    blocks = len(plain) * heads * parts + heads * n_experts * expert_parts + triton.cdiv(behind, _BLOCK)
    visible(_move_kernel)[(blocks, triton.cdiv(stacked.shape[1], _BLOCK_WIDE))](
        stacked, plain[0], second, values, scores,
        *stacked.stride(), *plain[0].stride(), *plain[-1].stride(), *values.stride(), *scores.stride(),
        heads, n_experts, d, d_model, width, expert_width, scores.shape[0], *stacked.shape,
        parts, expert_parts, back, _BLOCK, _BLOCK_WIDE,
    )  # fmt: skip


@triton.jit
def _move_kernel(
    stacked_ptr,  # [ROWS, COLUMNS]: heads of WIDTH rows, experts of EXPERT_WIDTH, scores, zeros
    first_ptr,  # [H * D, D_MODEL]
    second_ptr,  # [H * D, D_MODEL] or None
    values_ptr,  # [H, E, D_MODEL, D]
    scores_ptr,  # [SCORES, D_MODEL]
    stride_row, stride_column, stride_first, stride_first_in, stride_second, stride_second_in,
    stride_head, stride_expert, stride_in, stride_out, stride_score, stride_score_in,
    H: tl.constexpr, E: tl.constexpr, D: tl.constexpr, D_MODEL: tl.constexpr, WIDTH: tl.constexpr,
    EXPERT_WIDTH: tl.constexpr, SCORES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, EXPERT_PARTS: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WIDE: tl.constexpr,
):  # fmt: skip
    """Into the matrix, or out of it (BACK); a program moves rows of one head or expert, or of routers and zeros."""
    HEADS: tl.constexpr = H if second_ptr is None else 2 * H
    OF_HEADS: tl.constexpr = HEADS * PARTS  # programs
    OF_EXPERTS: tl.constexpr = H * E * EXPERT_PARTS
    FIRST_EXPERT: tl.constexpr = HEADS * WIDTH  # rows
    FIRST_SCORE: tl.constexpr = FIRST_EXPERT + H * E * EXPERT_WIDTH
    program = tl.program_id(0)
    i = tl.arange(0, BLOCK)[:, None]
    column = (tl.program_id(1) * BLOCK_WIDE + tl.arange(0, BLOCK_WIDE)[None, :]).to(tl.int64)
    exists, filled = column < COLUMNS, column < D_MODEL
    stacked = stacked_ptr + column * stride_column
    # Names of their own for what each branch reads: of one dtype or another, one name could not stand for all.
    if program < OF_HEADS:
        head = program // PARTS
        row = program % PARTS * BLOCK + i
        at = stacked + (head * WIDTH + row).to(tl.int64) * stride_row
        first = first_ptr + (head * D + row).to(tl.int64) * stride_first + column * stride_first_in
        mine = exists & (row < WIDTH) & (head < H)
        _exchange(at, first, mine, mine & filled & (row < D), BACK)
        if second_ptr is not None:
            second = second_ptr + ((head - H) * D + row).to(tl.int64) * stride_second + column * stride_second_in
            mine = exists & (row < WIDTH) & (head >= H)
            _exchange(at, second, mine, mine & filled & (row < D), BACK)
    elif program < OF_HEADS + OF_EXPERTS:
        matrix = (program - OF_HEADS) // EXPERT_PARTS
        row = (program - OF_HEADS) % EXPERT_PARTS * BLOCK + i
        at = stacked + (FIRST_EXPERT + matrix * EXPERT_WIDTH + row).to(tl.int64) * stride_row
        expert = values_ptr + (matrix // E).to(tl.int64) * stride_head + (matrix % E).to(tl.int64) * stride_expert
        expert += row.to(tl.int64) * stride_out + column * stride_in
        mine = exists & (row < EXPERT_WIDTH)
        _exchange(at, expert, mine, mine & filled & (row < D), BACK)
    else:
        row = (program - OF_HEADS - OF_EXPERTS) * BLOCK + i
        at = stacked + (FIRST_SCORE + row).to(tl.int64) * stride_row
        scores = scores_ptr + row.to(tl.int64) * stride_score + column * stride_score_in
        mine = exists & (row < ROWS - FIRST_SCORE)
        _exchange(at, scores, mine, mine & filled & (row < SCORES), BACK)


@triton.jit
def _exchange(stacked, weight, mine, filled, BACK: tl.constexpr):
    """Copy what a weight fills of a tile that is `mine`, zeros elsewhere; or back into the weight."""
    if BACK:
        tl.store(weight, tl.load(stacked, mask=filled, other=0.0).to(weight.dtype.element_ty), mask=filled)
    else:
        value = tl.load(weight, mask=filled, other=0.0).to(tl.float32)
        tl.store(stacked, value.to(stacked.dtype.element_ty), mask=mine)

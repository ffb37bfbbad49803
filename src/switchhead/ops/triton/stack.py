"""Weights of all that a layer makes of its tokens as the rows of one matrix, cast and laid out by one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from switchhead.ops.triton.operator import visible

_BLOCK, _BLOCK_WIDE = 32, 64


def stack_weights(
    plain: Sequence[Tensor],
    values: Tensor,
    routers: Tensor | None,
    *,
    width: int,
    expert_width: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    """The matrix of this shape and dtype; what no weight fills is zero.

    Args:
        plain: one or two projections `[H * d, D]`; each head becomes `width` rows.
        values: experts `[H, E, D, d]`; each becomes `expert_width` rows.
        routers: `[R, E, D]`; each expert becomes one row. None: they have no rows.
        width: at least d.
        expert_width: at least d.
        shape: at least the rows of all, and D.
        dtype: of the result. Weights may have any float dtype and strides.
    """
    first, second = plain[0], plain[-1]
    heads, n_experts, d_model, d = values.shape
    scores = None if routers is None else routers.flatten(0, 1)
    behind = shape[0] - len(plain) * heads * width - heads * n_experts * expert_width
    parts, expert_parts = triton.cdiv(width, _BLOCK), triton.cdiv(expert_width, _BLOCK)
    blocks = len(plain) * heads * parts + heads * n_experts * expert_parts + triton.cdiv(behind, _BLOCK)
    out = torch.empty(shape, dtype=dtype, device=first.device)
    visible(_stack_weights_kernel)[(blocks, triton.cdiv(shape[1], _BLOCK_WIDE))](
        first, second, values, scores, out, *first.stride(), *second.stride(),
        *values.stride(), *((0, 0) if scores is None else scores.stride()),
        len(plain), heads, n_experts, 0 if scores is None else scores.shape[0], d, d_model, width, expert_width,
        *shape, parts, expert_parts, _BLOCK, _BLOCK_WIDE,
    )  # fmt: skip
    return out


@triton.jit
def _stack_weights_kernel(
    first_ptr,  # [H * D, D_MODEL]
    second_ptr,  # [H * D, D_MODEL] if PLAIN is 2
    values_ptr,  # [H, E, D_MODEL, D]
    scores_ptr,  # [SCORES, D_MODEL] or None
    out_ptr,  # [ROWS, COLUMNS]: PLAIN * H times WIDTH rows, H * E times EXPERT_WIDTH, SCORES, zeros
    stride_first, stride_first_in, stride_second, stride_second_in,
    stride_head, stride_expert, stride_in, stride_out, stride_score, stride_score_in,
    PLAIN: tl.constexpr, H: tl.constexpr, E: tl.constexpr, SCORES: tl.constexpr, D: tl.constexpr,
    D_MODEL: tl.constexpr, WIDTH: tl.constexpr, EXPERT_WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, EXPERT_PARTS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WIDE: tl.constexpr,
):  # fmt: skip
    """A program takes rows of one head or one expert, or of the routers and zeros."""
    OF_PLAIN: tl.constexpr = PLAIN * H * PARTS  # programs
    OF_EXPERTS: tl.constexpr = H * E * EXPERT_PARTS
    FIRST_EXPERT: tl.constexpr = PLAIN * H * WIDTH  # rows
    FIRST_SCORE: tl.constexpr = FIRST_EXPERT + H * E * EXPERT_WIDTH
    program = tl.program_id(0)
    row = tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK_WIDE + tl.arange(0, BLOCK_WIDE)
    inside = (column < D_MODEL)[None, :]
    value = tl.zeros((BLOCK, BLOCK_WIDE), tl.float32)
    if program < OF_PLAIN:
        head = program // PARTS
        row += program % PARTS * BLOCK
        target, mine = head * WIDTH + row, row < WIDTH
        filled = inside & (row < D)[:, None]
        value = _load(first_ptr, head * D + row, column, stride_first, stride_first_in, filled & (head < H))
        if PLAIN == 2:
            row += (head - H) * D
            value += _load(second_ptr, row, column, stride_second, stride_second_in, filled & (head >= H))
    elif program < OF_PLAIN + OF_EXPERTS:
        matrix = (program - OF_PLAIN) // EXPERT_PARTS
        row += (program - OF_PLAIN) % EXPERT_PARTS * BLOCK
        target, mine = FIRST_EXPERT + matrix * EXPERT_WIDTH + row, row < EXPERT_WIDTH
        at = values_ptr + (matrix // E).to(tl.int64) * stride_head + (matrix % E).to(tl.int64) * stride_expert
        value = _load(at, row, column, stride_out, stride_in, inside & (row < D)[:, None])
    else:
        row += (program - OF_PLAIN - OF_EXPERTS) * BLOCK
        target, mine = FIRST_SCORE + row, row < ROWS - FIRST_SCORE
        if scores_ptr is not None:
            value = _load(scores_ptr, row, column, stride_score, stride_score_in, inside & (row < SCORES)[:, None])
    at = out_ptr + target.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(at, value.to(out_ptr.dtype.element_ty), mask=mine[:, None] & (column < COLUMNS)[None, :])


@triton.jit
def _load(ptr, row, column, stride_row, stride_column, mask):
    at = ptr + row.to(tl.int64)[:, None] * stride_row + column.to(tl.int64)[None, :] * stride_column
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)

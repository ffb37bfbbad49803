"""`moe_linear` on Triton kernels, and its first derivatives, as custom operators."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from switchhead.ops.dtypes import compute_dtype
from switchhead.ops.triton.accumulate import accumulate
from switchhead.ops.triton.decode import decode
from switchhead.ops.triton.dense import combine_experts, spread_rows, sum_over_tokens
from switchhead.ops.triton.grouping import group_rows
from switchhead.ops.triton.operands import ALIGN, aligned_rows, pad_to, prepare_weight, scale_rows
from switchhead.ops.triton.operator import operator
from switchhead.ops.triton.problem import Problem
from switchhead.ops.triton.project import project
from switchhead.ops.triton.tuning import (
    WEIGHT_GRAD_CHUNK,
    accumulate_tile,
    project_tile,
    shared_memory,
    slot_width,
    weight_grad_tile,
)
from switchhead.ops.triton.weight_grad import weight_grad
from switchhead.routing import Routing

DECODE_TOKENS = 16  # up to here a token's few matrix-vector products beat sorting and casting all experts
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def moe_linear(
    x: Float[Tensor, "tokens *heads d_in"],
    weight: Float[Tensor, "pools experts d_in d_out"],
    routing: Routing,
    *,
    reduce: str | None,
) -> Tensor:
    """`moe_linear` for CUDA; differentiable once in x, weight and gates, repeatable bit for bit.

    With `reduce="heads"` x may be wider than d_in, up to the next multiple of 16, by zeros whose gradients are zero.

    x and weight may have any strides and any mix of float32, bfloat16 and float16: weights are cast as they are laid
    out for the kernels, so autocast needs no copy of its own.

    Raises:
        ValueError: for float64.
    """
    dtype = compute_dtype(x, weight)
    if dtype not in _DTYPES:
        raise ValueError(f"backend='triton' computes in float32, bfloat16 or float16, not {dtype}; use 'reference'")
    keep_slots = reduce == "k" and routing.gates.requires_grad and torch.is_grad_enabled()
    out, _ = _forward(x.to(dtype), weight, routing.gates, routing.expert_indices, reduce or "none", dtype, keep_slots)
    return out


@operator("switchhead::moe_linear")
def _forward(
    x: Tensor,
    weight: Tensor,
    gates: Tensor,
    expert_indices: Tensor,
    reduce: str,
    dtype: torch.dtype,
    keep_slots: bool,
) -> tuple[Tensor, Tensor]:
    """The result, and with `keep_slots` the unweighted rows `[N, H, K, d_out]` that the gates' gradients need."""
    p = Problem.of(x, weight, expert_indices)
    d_out = weight.shape[3]
    nothing = x.new_empty(0)
    shape = _out_shape(p, reduce, d_out)
    if p.tokens == 0:
        return x.new_empty(shape), x.new_empty(0, p.heads, p.k, d_out) if keep_slots else nothing
    if not keep_slots and p.tokens <= DECODE_TOKENS:
        per_token = {"heads": 1, "k": p.heads, "none": p.heads * p.k}[reduce]
        out = decode(x, weight, None if reduce == "none" else gates, expert_indices, dtype, per_token=per_token)
        return out.view(shape), nothing
    if reduce == "heads":
        rows = x[..., : pad_to(weight.shape[2], ALIGN)]
        return _accumulate(p, rows, weight, gates, expert_indices, dtype, narrow_in=True).view(shape), nothing
    shared = 1 if p.per_head else p.heads
    out, kept, _ = _project(
        p, x, _prepare(p, weight, dtype, narrow_in=False), None if reduce == "none" else gates, expert_indices, dtype,
        width=d_out, shared=shared, keep_from=0 if keep_slots or reduce == "none" else None,
    )  # fmt: skip
    if reduce == "none":
        assert kept is not None
        return kept.view(shape), nothing
    assert out is not None
    return out.view(shape), nothing if kept is None else kept.view(p.tokens, p.heads, p.k, d_out)


@operator("switchhead::moe_linear_backward")
def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    gates: Tensor,
    expert_indices: Tensor,
    kept: Tensor,
    reduce: str,
    dtype: torch.dtype,
    need_x: bool,
    need_weight: bool,
    need_gates: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and gates; an empty tensor where none is needed."""
    p = Problem.of(x, weight, expert_indices)
    if p.tokens == 0:
        return _zero_gradients(x, weight, gates, need_x, need_weight, need_gates)
    grad_x, grad_gates, grad_weight = (x.new_empty(0) for _ in range(3))  # outputs may not share storage
    d_in, d_out = weight.shape[2:]
    narrow_in = reduce == "heads"
    width = _slot_width(p, d_in if narrow_in else d_out)

    if narrow_in:
        wide, rows = aligned_rows(grad, dtype), x[..., : pad_to(d_in, ALIGN)]
        if need_x or need_gates:
            dot_with = x.contiguous() if need_gates else None
            out, _, dots = _project(
                p, wide, _prepare(p, weight, dtype, narrow_in=True), gates, expert_indices, dtype,
                width=x.shape[-1], shared=p.heads, dot_with=dot_with,
            )  # fmt: skip
            assert out is not None
            if need_x:
                grad_x = out.view(p.tokens, p.heads, x.shape[-1])
                grad_x = grad_x if p.per_head else grad_x.sum(1)
            if dots is not None:
                dots = dots[0] if dots.shape[0] == 1 else dots.sum(0)
                grad_gates = dots.view(gates.shape).to(gates.dtype)
        if need_weight and p.dense:
            spread, _ = _spread(p, rows, expert_indices, gates, dtype, width)
            return grad_x, _dense_weight_grad(wide, spread, weight, width, narrow_in=True), grad_gates
        if need_weight:
            scaled, _ = scale_rows(rows, expert_indices, gates, dtype, width=width)
    elif p.dense and reduce == "k":
        spread, dots = _spread(p, grad, expert_indices, gates, dtype, width, projected=kept if need_gates else None)
        if dots is not None:
            grad_gates = dots.to(gates.dtype)
        if need_x:
            grad_x = _dense_accumulate(p, spread, weight, dtype, narrow_in=False, per_head=p.per_head).view(x.shape)
        if need_weight:
            grad_weight = _dense_weight_grad(aligned_rows(x, dtype), spread, weight, width, narrow_in=False)
        return grad_x, grad_weight, grad_gates
    else:
        per_slot = reduce == "none"
        projected = kept if need_gates and not per_slot else None
        scaled, dots = scale_rows(
            grad, expert_indices, None if per_slot else gates, dtype,
            width=width, per_slot=per_slot, projected=projected,
        )  # fmt: skip
        if dots is not None:
            grad_gates = dots.to(gates.dtype)
        elif need_gates:
            grad_gates = gates.new_zeros(gates.shape)
        if need_x:
            grad_x = _accumulate_rows(p, scaled, weight, expert_indices, dtype, narrow_in=False, per_head=p.per_head)
            grad_x = grad_x.view(x.shape)
        wide = aligned_rows(x, dtype)

    if need_weight:
        grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        per_wide_row = p.k if p.per_head and not narrow_in else p.heads * p.k
        tile = weight_grad_tile(dtype, width)
        weight_grad(
            wide, scaled, group_rows(expert_indices, p.slot_rows(), WEIGHT_GRAD_CHUNK, even=tile.k), grad_weight,
            wide_in=not narrow_in, shared=per_wide_row, precision=_precision(), tile=tile,
        )  # fmt: skip
    return grad_x, grad_weight, grad_gates


def _zero_gradients(
    x: Tensor, weight: Tensor, gates: Tensor, need_x: bool, need_weight: bool, need_gates: bool
) -> tuple[Tensor, Tensor, Tensor]:
    def zeros(tensor: Tensor, needed: bool) -> Tensor:
        return tensor.new_zeros(tensor.shape) if needed else x.new_empty(0)

    return zeros(x, need_x), zeros(weight, need_weight), zeros(gates, need_gates)


def _setup_context(ctx, inputs, output):
    x, weight, gates, expert_indices, ctx.reduce, ctx.dtype, _ = inputs
    ctx.save_for_backward(x, weight, gates, expert_indices, output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad, _grad_kept):
    if grad is None:
        return (None,) * 7
    needs = ctx.needs_input_grad[:3]
    grads = _backward(grad, *ctx.saved_tensors, ctx.reduce, ctx.dtype, *needs)
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def project_values(
    p: Problem,
    tokens: Tensor,
    matrices: Tensor,
    gates: Tensor,
    expert_indices: Tensor,
    dtype: torch.dtype,
    width: int,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """`reduce="k"` of tokens that all heads read, `[N, H, width]`, and if `keep` the rows that it is the sum of.

    These are `[N, H, K - 1, width]`, since the first slot's follow from the others (see `spread_rows`), or all K where
    slots are rows of their own, and in float16, which has no exponents for sums by very small gates. `matrices` are
    the experts as `project_blocks` wants them; `width` may be theirs, or up to the next multiple of 16.
    """
    if p.tokens == 0:
        return tokens.new_empty(0, p.heads, width), tokens.new_empty(0, p.heads, p.k, width)
    keep_from = int((p.by_sets or p.dense_project) and dtype != torch.float16) if keep else None
    out, kept, _ = _project(
        p, tokens, matrices, gates, expert_indices, dtype, width=width, shared=p.heads, keep_from=keep_from
    )
    assert out is not None
    if kept is None:  # one expert, or nobody wants them
        kept = out.new_empty(p.tokens, p.heads, 0, width)
    return out.view(p.tokens, p.heads, width), kept.view(p.tokens, p.heads, -1, width) if kept.numel() else kept


def project_blocks(p: Problem, dtype: torch.dtype, width: int) -> tuple[int, int]:
    """What numbers the narrow and wide sides of experts `[H * E, narrow, wide]` are multiples of, for `_project`."""
    if p.dense_project:
        return ALIGN, ALIGN
    tile = project_tile(dtype, p.project_rows().slots, width)
    return tile.n, tile.k


def _prepare(p: Problem, weight: Tensor, dtype: torch.dtype, *, narrow_in: bool) -> Tensor:
    blocks = project_blocks(p, dtype, weight.shape[2] if narrow_in else weight.shape[3])
    return prepare_weight(weight, dtype, narrow_in=narrow_in, blocks=blocks)


def _out_shape(p: Problem, reduce: str, d_out: int) -> tuple[int, ...]:
    return {
        "heads": (p.tokens, d_out),
        "k": (p.tokens, p.heads, d_out),
        "none": (p.tokens, p.heads, p.k, d_out),
    }[reduce]


def _precision() -> str:
    """Of float32 matmuls; 16-bit operands have only one. Plain TF32 would cut operands off, where libraries round."""
    return "tf32x3" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _slot_width(p: Problem, width: int) -> int:
    """Columns of a scaled row."""
    if p.dense:
        return pad_to(width, ALIGN)
    rows, _ = p.accumulate_rows(per_head=False)
    return slot_width(width, rows.slots)


def _project(
    p: Problem,
    x: Tensor,
    matrices: Tensor,
    gates: Tensor | None,
    expert_indices: Tensor,
    dtype: torch.dtype,
    *,
    width: int,
    shared: int,
    keep_from: int | None = None,
    dot_with: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`project` for rows that are heads or slots; x has one row for `shared` heads.

    `width`: columns of the results, at most the next multiple of 16; those past the experts' are zero.
    """
    x = aligned_rows(x, dtype)
    if p.dense_project:
        out, kept, dots = _dense_project(p, x, matrices, gates, expert_indices, keep_from, dot_with, width)
        return out, kept, None if dots is None else dots[None]
    rows = p.project_rows()
    tile = project_tile(dtype, rows.slots, width)
    slots_per_head = p.k // rows.slots
    dot_shared = slots_per_head * (1 if p.per_head else p.heads)
    out, kept, dots = project(
        x, matrices, expert_indices.contiguous(), None if gates is None else gates.contiguous(),
        group_rows(expert_indices, rows, tile.m),
        width=width, shared=shared * slots_per_head, precision=_precision(), tile=tile,
        keep_from=keep_from, dot_with=dot_with, dot_shared=dot_shared,
    )  # fmt: skip
    if out is not None and slots_per_head > 1:
        out = out.view(-1, slots_per_head, width).sum(1)
    return out, kept, dots


def _accumulate(
    p: Problem,
    x: Tensor,
    weight: Tensor,
    gates: Tensor,
    expert_indices: Tensor,
    dtype: torch.dtype,
    *,
    narrow_in: bool,
) -> Tensor:
    """Scale the rows of x by their gates, multiply, and sum over slots and heads."""
    if p.dense:
        spread, _ = _spread(p, x, expert_indices, gates, dtype, pad_to(x.shape[-1], ALIGN))
        return _dense_accumulate(p, spread, weight, dtype, narrow_in=narrow_in, per_head=False)
    scaled, _ = scale_rows(x, expert_indices, gates, dtype, width=_slot_width(p, x.shape[-1]))
    return _accumulate_rows(p, scaled, weight, expert_indices, dtype, narrow_in=narrow_in, per_head=False)


def _accumulate_rows(
    p: Problem,
    scaled: Tensor,
    weight: Tensor,
    expert_indices: Tensor,
    dtype: torch.dtype,
    *,
    narrow_in: bool,
    per_head: bool,
) -> Tensor:
    """`accumulate` summed over slots, and over heads unless `per_head`."""
    width = weight.shape[3] if narrow_in else weight.shape[2]
    depth = scaled.shape[1]
    rows, passes = p.accumulate_rows(per_head=per_head)
    tile = accumulate_tile(dtype, rows.slots * depth, shared_memory(scaled.device))
    prepared = prepare_weight(weight, dtype, narrow_in=narrow_in, blocks=(depth, tile.n))
    out = accumulate(
        scaled, prepared, group_rows(expert_indices, rows, tile.m, by_segment=passes),
        width=width, depth=depth, passes=passes, precision=_precision(), tile=tile,
    )  # fmt: skip
    n_out = p.tokens * p.heads if per_head else p.tokens
    return out if out.shape[0] == n_out else out.view(n_out, -1, width).sum(1)


def _spread(
    p: Problem,
    x: Tensor,
    expert_indices: Tensor,
    gates: Tensor,
    dtype: torch.dtype,
    width: int,
    projected: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rows of x for every expert `[N, H * E * width]`, and their dot products with `projected`."""
    out = torch.empty(p.tokens, p.heads * p.n_experts * width, dtype=dtype, device=x.device)
    x = x if x.ndim == 3 else x[:, None].expand(p.tokens, p.heads, x.shape[-1])
    dots = spread_rows(x, expert_indices, gates, out, n_experts=p.n_experts, width=width, projected=projected)
    return out, dots


def _dense_accumulate(
    p: Problem, spread: Tensor, weight: Tensor, dtype: torch.dtype, *, narrow_in: bool, per_head: bool
) -> Tensor:
    """`accumulate` of spread rows; `[N, wide]`, or `[N, H, wide]` if `per_head`."""
    wide = weight.shape[3] if narrow_in else weight.shape[2]
    matrices = prepare_weight(weight, dtype, narrow_in=narrow_in, blocks=(ALIGN, ALIGN))  # [H * E, narrow, wide]
    if not per_head:
        return (spread @ matrices.flatten(0, 1))[:, :wide].contiguous()
    spread = spread.view(p.tokens, p.heads, -1).transpose(0, 1)
    return (spread @ matrices.view(p.heads, -1, matrices.shape[-1])).transpose(0, 1)[..., :wide].contiguous()


def _dense_project(
    p: Problem,
    x: Tensor,
    matrices: Tensor,
    gates: Tensor | None,
    expert_indices: Tensor,
    keep_from: int | None,
    dot_with: Tensor | None,
    d: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`project` through all experts; x has one row for all heads, or one for each; d columns of the results."""
    if x.shape[0] == p.tokens:
        y = x @ matrices.flatten(0, 1).mT
    else:
        y = x.view(p.tokens, p.heads, -1).transpose(0, 1) @ matrices.view(p.heads, -1, matrices.shape[-1]).mT
        y = y.transpose(0, 1).contiguous()
    if dot_with is not None:
        dot_with = dot_with.view(p.tokens, -1, d).expand(p.tokens, p.heads, d)
    y = y.view(p.tokens, p.heads, p.n_experts, -1)
    return combine_experts(y, expert_indices, gates, n_experts=p.n_experts, d=d, keep_from=keep_from, dot_with=dot_with)


def _dense_weight_grad(wide: Tensor, spread: Tensor, weight: Tensor, width: int, *, narrow_in: bool) -> Tensor:
    """Sums over tokens for all experts at once; `wide` has a row for each token, or for each token and head."""
    _, experts, d_in, d_out = weight.shape
    groups = wide.shape[0] // spread.shape[0]  # of heads that share rows of `wide`
    columns = spread.shape[1] // groups
    grads = []
    for g in range(groups):
        rows, others = spread[:, g * columns : (g + 1) * columns], wide[g::groups]
        if narrow_in:
            grads.append(sum_over_tokens(rows, others).view(-1, experts, width, others.shape[1])[:, :, :d_in, :d_out])
        else:  # experts' columns side by side: turning them into matrices moves whole rows
            side_by_side = sum_over_tokens(others, rows)[:d_in].view(d_in, -1, experts, width)
            grads.append(side_by_side.permute(1, 2, 0, 3)[..., :d_out])
    return torch.cat(grads).to(weight.dtype, memory_format=torch.contiguous_format)

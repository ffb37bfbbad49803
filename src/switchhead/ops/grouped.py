"""`moe_linear` on the chosen experts alone: rows grouped by what they chose, one matmul a group.

A custom operator, so that `torch.compile` sees one node. It loops over groups on the host, which suits a CPU; on a GPU
the Triton kernels do the same without leaving the device.

With enough rows for each set of k experts, a row is grouped by its set, whose experts stand side by side as one matrix:
`[d_in, k * d_out]` where their results are summed or listed, `[k * d_in, d_out]` where a sum over heads follows, whose
gates are multiplied into the rows. So it is gathered once for all its experts. Otherwise every choice is a row of its
own. Gates and their gradients touch the narrow side alone, in the order of the groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from switchhead.ops.dtypes import at_least_float32
from switchhead.routing import Routing

_CHUNK = 1024  # rows gathered at a time: a few MB, so that the matmul finds them in cache
_ROWS_OF_A_SET = 256  # on average, below which a matmul for every set costs more than gathering rows k times


def moe_linear(x: Tensor, weight: Tensor, routing: Routing, *, reduce: str | None) -> Tensor:
    """k matmuls' arithmetic for k chosen experts, at the price of gathering their rows."""
    keep = torch.is_grad_enabled() and routing.gates.requires_grad
    operands = (x, weight, routing.gates, routing.expert_indices)
    return torch.ops.switchhead.grouped_moe_linear(*operands, reduce or "none", keep)[0]


class _Rows(NamedTuple):
    """R rows of m choices each, ordered by the experts that they chose.

    Attributes:
        choices: `[R, m]`, which of the flattened gates.
        x_rows: `[R]`, which row of x.
        out_rows: `[R]`, which row of the result they add to (not for `"none"`, whose rows are the choices).
        groups: experts `[m]` of each group, as indices into `[pools * E]`, and its last place.
    """

    choices: Tensor
    x_rows: Tensor
    out_rows: Tensor
    groups: list[tuple[Tensor, int]]

    def chunks(self) -> Iterator[tuple[Tensor, slice]]:
        """Experts and places of some rows of a group."""
        start = 0
        for experts, end in self.groups:
            for first in range(start, end, _CHUNK):
                yield experts, slice(first, min(first + _CHUNK, end))
            start = end


def _ordered(x: Tensor, weight: Tensor, expert_indices: Tensor, reduce: str) -> _Rows:
    tokens, heads, k = expert_indices.shape
    pools, experts = weight.shape[:2]
    by_set = experts < 32 and tokens >= _ROWS_OF_A_SET * math.comb(experts, k)
    width = k if by_set else 1
    pool = torch.arange(heads, device=x.device)[:, None] if pools > 1 else 0
    chosen, within = (expert_indices.long() + pool * experts).view(-1, width).sort(-1)  # [R, m]
    key = (1 << chosen % experts).sum(-1) + (chosen[:, 0] // experts << experts) if by_set else chosen[:, 0]
    key, order = key.sort(stable=True)
    ends = torch.unique_consecutive(key, return_counts=True)[1].cumsum(0).tolist()
    groups = [(chosen[order[end - 1]], end) for end in ends]
    choices = within[order] + (order * width)[:, None]
    divisor = {"none": 1, "k": k // width, "heads": heads * k // width}[reduce]
    x_rows = order // (heads * k // width) if x.ndim == 2 else order // (k // width)
    return _Rows(choices, x_rows, order // divisor, groups)


def _side_by_side(experts: Tensor, reduce: str) -> Tensor:
    """`[m, d_in, d_out]` to `[m * d_in, d_out]` where results are summed over heads, else `[d_in, m * d_out]`."""
    return experts.flatten(0, 1) if reduce == "heads" else experts.transpose(0, 1).flatten(1)


@torch.library.custom_op("switchhead::grouped_moe_linear", mutates_args=())
def _grouped(
    x: Tensor, weight: Tensor, gates: Tensor, expert_indices: Tensor, reduce: str, keep: bool
) -> tuple[Tensor, Tensor]:
    """The result; with `keep`, for `"k"`, also the experts' own `[N, H, K, d_out]`, in the order of the groups."""
    wide, (d_in, d_out) = at_least_float32(x.dtype), weight.shape[-2:]
    experts, rows = weight.flatten(0, 1), x.reshape(-1, d_in)
    places = _ordered(x, weight, expert_indices, reduce)
    gate = gates.flatten().to(wide)[places.choices][..., None]  # [R, m, 1]
    out = x.new_zeros(_output_shape(gates, d_out, reduce), dtype=wide)
    flat = out.view(-1, d_out)
    if reduce == "heads":
        left = (rows.index_select(0, places.x_rows).to(wide)[:, None] * gate).to(x.dtype).flatten(1)  # [R, m * d_in]
        for chosen, chunk in places.chunks():
            y = left[chunk] @ _side_by_side(experts[chosen], reduce)
            flat.index_add_(0, places.out_rows[chunk], y.to(wide))
        return out.to(x.dtype), x.new_empty(0)
    results = x.new_empty(*places.choices.shape, d_out)  # [R, m, d_out]
    for chosen, chunk in places.chunks():
        gathered = rows.index_select(0, places.x_rows[chunk])
        torch.mm(gathered, _side_by_side(experts[chosen], reduce), out=results[chunk].flatten(1))
    if reduce == "none":
        flat[places.choices] = results.to(wide)
        return out.to(x.dtype), x.new_empty(0)
    flat.index_add_(0, places.out_rows, (results * gate).sum(1))
    return out.to(x.dtype), results.view(*gates.shape, d_out) if keep else x.new_empty(0)


def _output_shape(gates: Tensor, d_out: int, reduce: str) -> tuple[int, ...]:
    tokens, heads, k = gates.shape
    return {"none": (tokens, heads, k, d_out), "k": (tokens, heads, d_out), "heads": (tokens, d_out)}[reduce]


@_grouped.register_fake
def _(x, weight, gates, expert_indices, reduce, keep):
    d_out = weight.shape[-1]
    kept = x.new_empty((*gates.shape, d_out) if keep and reduce == "k" else 0)
    return x.new_empty(_output_shape(gates, d_out, reduce)), kept


@torch.library.custom_op("switchhead::grouped_moe_linear_backward", mutates_args=())
def _grouped_backward(
    grad: Tensor, x: Tensor, weight: Tensor, gates: Tensor, expert_indices: Tensor, kept: Tensor, reduce: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and gates; the last are zero for `"none"`, and for `"k"` where forward kept nothing."""
    wide, (d_in, d_out) = at_least_float32(x.dtype), weight.shape[-2:]
    experts, rows, grad_rows = weight.flatten(0, 1), x.reshape(-1, d_in), grad.reshape(-1, d_out)
    places = _ordered(x, weight, expert_indices, reduce)
    gate = gates.flatten().to(wide)[places.choices][..., None]  # [R, m, 1]
    grad_x = torch.zeros(rows.shape, dtype=wide, device=x.device)
    grad_weight = torch.zeros(experts.shape, dtype=wide, device=x.device)
    grad_gates = torch.zeros(gates.numel(), dtype=gates.dtype, device=x.device)
    if reduce == "heads":
        narrow = rows.index_select(0, places.x_rows).to(wide)[:, None]  # [R, 1, d_in]
        left = (narrow * gate).to(x.dtype).flatten(1)
        back = x.new_empty(*places.choices.shape, d_in)  # [R, m, d_in]
        for chosen, chunk in places.chunks():
            dy = grad_rows.index_select(0, places.out_rows[chunk])
            torch.mm(dy, _side_by_side(experts[chosen], reduce).mT, out=back[chunk].flatten(1))
            grad_weight.index_add_(0, chosen, (left[chunk].mT @ dy).to(wide).unflatten(0, (-1, d_in)))
        grad_gates[places.choices] = (back * narrow).sum(-1).to(gates.dtype)
        grad_x.index_add_(0, places.x_rows, (back * gate).sum(1))
    else:
        if reduce == "none":
            dy = grad_rows[places.choices]  # [R, m, d_out]
        else:
            narrow = grad_rows.index_select(0, places.out_rows).to(wide)[:, None]  # [R, 1, d_out]
            if kept.numel():
                of_gates = (narrow * kept.view(*places.choices.shape, d_out)).sum(-1)
                grad_gates[places.choices] = of_gates.to(gates.dtype)
            dy = (narrow * gate).to(x.dtype)
        right = dy.flatten(1)
        for chosen, chunk in places.chunks():
            dx = right[chunk] @ _side_by_side(experts[chosen], reduce).mT
            grad_x.index_add_(0, places.x_rows[chunk], dx.to(wide))
            of_matrix = rows.index_select(0, places.x_rows[chunk]).mT @ right[chunk]  # [d_in, m * d_out]
            grad_weight.index_add_(0, chosen, of_matrix.to(wide).unflatten(1, (-1, d_out)).transpose(0, 1))
    return (
        grad_x.view(x.shape).to(x.dtype),
        grad_weight.view(weight.shape).to(weight.dtype),
        grad_gates.view(gates.shape),
    )


@_grouped_backward.register_fake
def _(grad, x, weight, gates, expert_indices, kept, reduce):
    return x.new_empty(x.shape), weight.new_empty(weight.shape), gates.new_empty(gates.shape)


def _save(ctx, inputs, output):
    x, weight, gates, expert_indices, ctx.reduce, _ = inputs
    ctx.save_for_backward(x, weight, gates, expert_indices, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _grad_kept):
    if grad is None:
        return (None,) * 6
    return *_grouped_backward(grad, *ctx.saved_tensors, ctx.reduce), None, None, None


_grouped.register_autograd(_backward, setup_context=_save)

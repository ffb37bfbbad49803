"""`moe_linear` on the chosen experts alone: rows grouped by expert, one matmul a group.

A custom operator, so that `torch.compile` sees one node. It loops over groups on the host, which suits a CPU; on a GPU
the Triton kernels do the same without leaving the device.

With slot s = (n, h, j) of token n, x_s its input row, W_s its expert and g_s its gate:

    y_s = x_s W_s,      out = sum of g_s y_s over the reduced axes
    dx_s = g_s t_s,     dg_s = t_s . x_s,    dW_e = sum over the slots of e of x_s^T (g_s dout_s),   t_s = dout_s W_s^T

so that backward needs nothing of forward but its inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from switchhead.ops.dtypes import at_least_float32
from switchhead.routing import Routing

_CHUNK = 1024  # rows gathered at a time: a few MB, so that the matmul finds them in cache


def moe_linear(x: Tensor, weight: Tensor, routing: Routing, *, reduce: str | None) -> Tensor:
    """k matmuls' arithmetic for k chosen experts, at the price of gathering their rows."""
    return torch.ops.switchhead.grouped_moe_linear(x, weight, routing.gates, routing.expert_indices, reduce or "none")


class _Slots(NamedTuple):
    """Slots in group order: which row of x, and of the output, each reads and writes."""

    order: Tensor
    x_rows: Tensor
    out_rows: Tensor
    bounds: list[int]


def _group(x: Tensor, weight: Tensor, gates: Tensor, expert_indices: Tensor, reduce: str) -> _Slots:
    _, heads, k = gates.shape
    grouping = Routing(gates, expert_indices, weight.shape[1]).grouping(shared_pool=weight.shape[0] == 1)
    order = grouping.order
    divisor = {"none": 1, "k": k, "heads": heads * k}[reduce]
    x_rows = order // (heads * k) if x.ndim == 2 else order // k
    return _Slots(order, x_rows, order // divisor, grouping.offsets.tolist())


def _chunks(bounds: list[int]) -> Iterator[tuple[int, slice]]:
    for group, (start, stop) in enumerate(pairwise(bounds)):
        for first in range(start, stop, _CHUNK):
            yield group, slice(first, min(first + _CHUNK, stop))


def _output_shape(gates: Tensor, d_out: int, reduce: str) -> tuple[int, ...]:
    tokens, heads, k = gates.shape
    return {"none": (tokens, heads, k, d_out), "k": (tokens, heads, d_out), "heads": (tokens, d_out)}[reduce]


@torch.library.custom_op("switchhead::grouped_moe_linear", mutates_args=())
def _grouped(x: Tensor, weight: Tensor, gates: Tensor, expert_indices: Tensor, reduce: str) -> Tensor:
    slots = _group(x, weight, gates, expert_indices, reduce)
    experts = weight.flatten(0, 1)  # [G, d_in, d_out]
    rows = x.reshape(-1, x.shape[-1])
    out = x.new_zeros(_output_shape(gates, weight.shape[-1], reduce), dtype=at_least_float32(x.dtype))
    flat = out.view(-1, out.shape[-1])
    scale = gates.flatten()[slots.order].to(out.dtype)
    for group, chunk in _chunks(slots.bounds):
        y = (rows.index_select(0, slots.x_rows[chunk]) @ experts[group]).to(out.dtype)
        if reduce == "none":
            flat[slots.order[chunk]] = y
        else:
            flat.index_add_(0, slots.out_rows[chunk], y.mul_(scale[chunk, None]))
    return out.to(x.dtype)


@_grouped.register_fake
def _(x, weight, gates, expert_indices, reduce):
    return x.new_empty(_output_shape(gates, weight.shape[-1], reduce))


@torch.library.custom_op("switchhead::grouped_moe_linear_backward", mutates_args=())
def _grouped_backward(
    grad: Tensor, x: Tensor, weight: Tensor, gates: Tensor, expert_indices: Tensor, reduce: str
) -> tuple[Tensor, Tensor, Tensor]:
    slots = _group(x, weight, gates, expert_indices, reduce)
    experts = weight.flatten(0, 1)
    rows, grad_rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    wide = at_least_float32(x.dtype)
    grad_x = torch.zeros(rows.shape, dtype=wide, device=x.device)
    grad_weight = torch.zeros(experts.shape, dtype=wide, device=x.device)
    grad_gates = torch.zeros(gates.numel(), dtype=gates.dtype, device=x.device)
    scale = gates.flatten()[slots.order].to(wide)
    for group, chunk in _chunks(slots.bounds):
        x_chunk = rows.index_select(0, slots.x_rows[chunk])
        dy = grad_rows.index_select(0, slots.out_rows[chunk])
        t = (dy @ experts[group].mT).to(wide)
        if reduce != "none":
            grad_gates[slots.order[chunk]] = (t * x_chunk).sum(-1).to(gates.dtype)
            t.mul_(scale[chunk, None])
            dy = (dy * scale[chunk, None]).to(dy.dtype)
        grad_x.index_add_(0, slots.x_rows[chunk], t)
        grad_weight[group] += x_chunk.mT @ dy
    return (
        grad_x.view(x.shape).to(x.dtype),
        grad_weight.view(weight.shape).to(weight.dtype),
        grad_gates.view(gates.shape),
    )


@_grouped_backward.register_fake
def _(grad, x, weight, gates, expert_indices, reduce):
    return x.new_empty(x.shape), weight.new_empty(weight.shape), gates.new_empty(gates.shape)


def _save(ctx, inputs, output):
    *tensors, ctx.reduce = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):
    grad_x, grad_weight, grad_gates = _grouped_backward(grad, *ctx.saved_tensors, ctx.reduce)
    return grad_x, grad_weight, grad_gates, None, None


_grouped.register_autograd(_backward, setup_context=_save)

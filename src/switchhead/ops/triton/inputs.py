"""All that a SwitchHead layer makes of its tokens before attention, as one operator: queries and keys, routing, values.

Together they have one gradient with respect to the tokens. Apart, each writes its own `[N, d_model]` part and another
kernel adds them up; here two matrix products write and add, the routers' scores riding along as columns of the values'.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float
from torch import Tensor

from switchhead.ops.triton.dense import spread_rows, sum_over_tokens
from switchhead.ops.triton.moe_linear import _forward as moe_linear_op
from switchhead.ops.triton.operands import pad_to, prepare_weight
from switchhead.ops.triton.operator import operator, visible
from switchhead.ops.triton.router import _route as route_op
from switchhead.routing import Routing


def project_inputs(
    x: Float[Tensor, "tokens d_model"],
    plain: Float[Tensor, "plain d_model"],
    routers: Float[Tensor, "routers experts d_model"],
    values: Float[Tensor, "heads experts d_model d"],
    k: int,
    *,
    dropped: Bool[Tensor, "tokens routers experts"] | None = None,
) -> tuple[Float[Tensor, "tokens plain"], Float[Tensor, "tokens heads d"], Routing]:
    """`switchhead.ops.project_inputs` for CUDA and sigmoid gates; x in the dtype of the computation.

    Differentiable once in x and all weights.
    """
    rows, out, gates, expert_indices, _ = _project_inputs(x, plain.to(x.dtype), routers, values, k, dropped)
    return rows, out, Routing(gates, expert_indices, routers.shape[1])


@operator("switchhead::project_inputs")
def _project_inputs(
    x: Tensor, plain: Tensor, routers: Tensor, values: Tensor, k: int, dropped: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows, values, gates, indices, and the unweighted values that the gates' gradients need."""
    heads = values.shape[0]
    gates, expert_indices, _ = route_op(x, routers, k, False, dropped)
    own = (gates[:, -heads:].contiguous(), expert_indices[:, -heads:].contiguous())
    out, kept = moe_linear_op(x, values, *own, "k", x.dtype, True)
    return x @ plain.mT, out, gates, expert_indices, kept


@operator("switchhead::project_inputs_backward")
def _project_inputs_backward(
    grad_rows: Tensor,
    grad_values: Tensor,
    grad_gates: Tensor,
    x: Tensor,
    plain: Tensor,
    routers: Tensor,
    values: Tensor,
    gates: Tensor,
    expert_indices: Tensor,
    kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heads, experts, d_model, d = values.shape
    n_routers = routers.shape[0]
    if x.shape[0] == 0:
        return tuple(tensor.new_zeros(tensor.shape) for tensor in (x, plain, routers, values))
    width = pad_to(d, 8)
    inner, scores = heads * experts * width, n_routers * experts
    spread = torch.empty(x.shape[0], pad_to(inner + scores, 8), dtype=x.dtype, device=x.device)
    by_values = spread_rows(
        grad_values, expert_indices[:, -heads:], gates[:, -heads:], spread,
        n_experts=experts, width=width, projected=kept,
    )  # fmt: skip
    assert by_values is not None
    _write_score_gradients(grad_gates, by_values, gates, expert_indices, spread, inner, experts)
    grad_rows = grad_rows.contiguous()
    matrices = torch.zeros(spread.shape[1], x.shape[1], dtype=x.dtype, device=x.device)
    matrices[:inner] = prepare_weight(values, x.dtype, narrow_in=False, blocks=(8, 8)).flatten(0, 1)[:, :d_model]
    matrices[inner : inner + scores] = routers.flatten(0, 1)
    grad_x = torch.mm(grad_rows, plain).addmm_(spread, matrices)
    grad_plain = sum_over_tokens(grad_rows, x)
    # Columns of experts side by side: turning them into matrices moves whole rows of d.
    grad_matrices = sum_over_tokens(x, spread)  # [D, H*E*d and scores]
    grad_values = grad_matrices[:, :inner].view(d_model, heads, experts, width).permute(1, 2, 0, 3)[..., :d]
    grad_routers = grad_matrices[:, inner : inner + scores].mT.reshape(routers.shape)
    return (
        grad_x,
        grad_plain.to(plain.dtype),
        grad_routers.contiguous().to(routers.dtype),
        grad_values.to(values.dtype, memory_format=torch.contiguous_format, copy=True),
    )


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4], *output[2:])
    ctx.set_materialize_grads(False)  # kept has none


def _differentiate(ctx, grad_rows, grad_values, grad_gates, _grad_indices, _grad_kept):
    x, plain, _, values, gates, *_ = ctx.saved_tensors
    shapes = ((len(x), len(plain)), (len(x), len(values), values.shape[-1]), gates.shape)
    dtypes = (x.dtype, x.dtype, gates.dtype)
    grads = [
        x.new_zeros(shape, dtype=dtype) if grad is None else grad
        for grad, shape, dtype in zip((grad_rows, grad_values, grad_gates), shapes, dtypes, strict=True)
    ]
    return *_project_inputs_backward(*grads, *ctx.saved_tensors), None, None


_project_inputs.register_autograd(_differentiate, setup_context=_setup_context)


def _write_score_gradients(
    grad_gates: Tensor,
    by_values: Tensor,
    gates: Tensor,
    expert_indices: Tensor,
    out: Tensor,
    first: int,
    experts: int,
) -> None:
    """Gradients of the scores, `gate (1 - gate)` times the gates', into columns `first ..` of out; zeros behind."""
    tokens, routers, k = gates.shape
    columns = out.shape[1] - first
    block = 32
    visible(_score_gradients_kernel)[(triton.cdiv(tokens, block),)](
        grad_gates.contiguous(), by_values, gates, expert_indices, out, tokens, out.stride(0), first,
        routers, by_values.shape[1], k, experts, columns, block, triton.next_power_of_2(columns),
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_tokens"])
def _score_gradients_kernel(
    grad_gates_ptr,  # float32 [N, ROUTERS, K]
    by_values_ptr,  # float32 [N, HEADS, K]: more gradient for the last HEADS routers
    gates_ptr,  # float32 [N, ROUTERS, K]
    indices_ptr,  # int32 [N, ROUTERS, K]
    out_ptr,
    n_tokens, stride_out, first,
    ROUTERS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, E: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, BLOCK_COLUMNS)
    router, expert = column // E, column % E
    inside = (token < n_tokens)[:, None] & (router < ROUTERS)[None, :]
    total = tl.zeros((BLOCK, BLOCK_COLUMNS), tl.float32)
    for j in tl.static_range(K):
        slot = ((token * ROUTERS)[:, None] + router[None, :]) * K + j
        gate = tl.load(gates_ptr + slot, mask=inside, other=0.0)
        grad = tl.load(grad_gates_ptr + slot, mask=inside, other=0.0)
        own = router - (ROUTERS - HEADS)
        by_values = ((token * HEADS)[:, None] + own[None, :]) * K + j
        grad += tl.load(by_values_ptr + by_values, mask=inside & (own >= 0)[None, :], other=0.0)
        hit = tl.load(indices_ptr + slot, mask=inside, other=-1) == expert[None, :]
        total = tl.where(hit, grad * gate * (1 - gate), total)
    target = out_ptr + (token * stride_out)[:, None] + first + column[None, :]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=(token < n_tokens)[:, None] & (column < COLUMNS)[None, :])

"""All that a SwitchHead layer makes of its tokens before attention, as one operator: queries and keys, routing, values.

Together they have one gradient with respect to the tokens. Apart, each writes its own `[N, d_model]` part and another
kernel adds them up; here the gradients of all stand side by side, and two matrix products make those of tokens and
weights of them, the routers' scores riding along as columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from switchhead.ops.triton.decode import decode
from switchhead.ops.triton.dense import Routed, spread_rows, sum_over_tokens
from switchhead.ops.triton.moe_linear import DECODE_TOKENS, project_blocks, project_values
from switchhead.ops.triton.operands import ALIGN, aligned_rows, is_aligned, pad_to
from switchhead.ops.triton.operator import operator
from switchhead.ops.triton.problem import Problem
from switchhead.ops.triton.rotary import rotate_heads
from switchhead.ops.triton.router import choose
from switchhead.ops.triton.stack import Weights, stack_weights, unstack_weights
from switchhead.ops.widths import pad
from switchhead.routing import Routing


def project_inputs(
    x: Float[Tensor, "tokens d_model"],
    queries: Float[Tensor, "heads_d d_model"] | None,
    keys: Float[Tensor, "heads_d d_model"],
    routers: Float[Tensor, "routers experts d_model"],
    values: Float[Tensor, "heads experts d_model d"],
    k: int,
    *,
    rotation: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype,
    width: int,
    dropped: Bool[Tensor, "tokens routers experts"] | None = None,
) -> tuple[Tensor | None, Tensor, Tensor, list[Routing]]:
    """`switchhead.ops.project_inputs` for CUDA and sigmoid gates, computed in `dtype`, heads padded to `width`.

    Differentiable once in x and all weights, which may have any float dtype but float64.
    """
    inputs = (x, queries, keys, routers, values)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    cos, sin = (None, None) if rotation is None else (table.contiguous() for table in rotation)
    q, k_, v, gates, expert_indices, _, _ = _project_inputs(
        x, queries, keys, routers, values, k, cos, sin, dtype, width, keep, dropped
    )
    sides = zip(gates.unbind(), expert_indices.unbind(), strict=True)
    q = None if queries is None else q
    return q, k_, v, [Routing(side, chosen, routers.shape[1]) for side, chosen in sides]


@operator("switchhead::project_inputs")
def _project_inputs(
    x: Tensor,
    queries: Tensor | None,
    keys: Tensor,
    routers: Tensor,
    values: Tensor,
    k: int,
    cos: Tensor | None,
    sin: Tensor | None,
    dtype: torch.dtype,
    width: int,
    keep: bool,
    dropped: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values; gates and indices `[sides, N, H, K]`, the values' side last; what backward needs.

    Queries without a projection are empty. The last two are, if `keep`, rows of single experts, and the tokens as they
    were multiplied, empty where that is x.
    """
    heads, experts, _, d = values.shape
    tokens = aligned_rows(x, dtype)
    gates, expert_indices, _ = choose(tokens, routers, k, dropped=dropped, sides=routers.shape[0] // heads)
    plain = [keys] if queries is None else [queries, keys]
    kept = tokens.new_empty(0)
    rotates = cos is not None and tokens.shape[0] > 0
    product_width = min(pad_to(d, ALIGN), width) if rotates else width  # a rotation can write heads anew, wider
    if not keep and tokens.shape[0] <= DECODE_TOKENS:
        matrices = [_aligned_heads(weight, d, product_width, tokens) for weight in plain]
        rows = _project_heads(tokens, matrices, heads, width, cos, sin)
        out = decode(tokens, values, gates[-1], expert_indices[-1], dtype, per_token=heads, width=width)
        out = out.view(-1, heads, width)
    else:
        p = Problem.of(tokens, values, expert_indices[-1])
        blocks = project_blocks(p, dtype, width)
        narrow, wide = pad_to(d, blocks[0]), pad_to(tokens.shape[1], blocks[1])
        first = len(plain) * heads * product_width  # row of the experts
        shape, given = (first + heads * experts * narrow, wide), Weights(plain, values, None)
        weights = stack_weights(given, width=product_width, expert_width=narrow, shape=shape, dtype=dtype)
        matrices = weights[:first, : tokens.shape[1]].chunk(len(plain))
        rows = _project_heads(tokens, matrices, heads, width, cos, sin)
        prepared = weights[first:].view(heads * experts, narrow, wide)
        out, kept = project_values(p, tokens, prepared, gates[-1], expert_indices[-1], dtype, width, keep)
    own_tokens = keep and not is_aligned(x, dtype)  # an operator may not return its argument
    copy = tokens if own_tokens else tokens.new_empty(0)
    return tokens.new_empty(0) if queries is None else rows[0], rows[-1], out, gates, expert_indices, kept, copy


@operator("switchhead::project_inputs_backward")
def _project_inputs_backward(
    grad_queries: Tensor,
    grad_keys: Tensor,
    grad_values: Tensor,
    grad_gates: Tensor,
    tokens: Tensor,
    queries: Tensor | None,
    keys: Tensor,
    routers: Tensor,
    values: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    gates: Tensor,
    expert_indices: Tensor,
    kept: Tensor,
    out: Tensor,
    x_dtype: torch.dtype,
    of_tokens: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the tokens, if `of_tokens`, and of all weights; what has none is empty."""
    heads, experts, d_model, d = values.shape
    n_tokens, dtype = tokens.shape[0], tokens.dtype
    plain = [(grad_keys, keys)] if queries is None else [(grad_queries, queries), (grad_keys, keys)]
    weights = Weights([weight for _, weight in plain], values, routers)
    if n_tokens == 0:
        of_plain = [weight.new_zeros(weight.shape) for weight in weights.plain]
        none = Weights(of_plain, values.new_zeros(values.shape), routers.new_zeros(routers.shape))
        return _as_outputs(tokens.new_zeros((0, d_model), dtype=x_dtype), none)
    width = pad_to(d, ALIGN)
    first = len(plain) * heads * width  # column of the values' experts
    columns = first + heads * experts * width + routers.shape[0] * experts
    columns = pad_to(columns, 2 * ALIGN)  # strides that Triton knows to be aligned
    # Gradients of queries, keys, every expert's values, and scores; then the matrices that they go through.
    grads = torch.empty(n_tokens, columns, dtype=dtype, device=tokens.device)
    rotate_heads([grad for grad, _ in plain], [grads], cos, sin, width=width, back=True)
    spread_rows(
        grad_values, expert_indices[-1], gates[-1], grads, n_experts=experts, width=width, first=first,
        projected=kept if kept.shape[2] else None, combined=out if kept.shape[2] < gates.shape[3] else None,
        routed=Routed(grad_gates.contiguous(), gates, expert_indices),
    )  # fmt: skip
    sums = sum_over_tokens(tokens, grads)  # [D, columns]: experts' side by side, so that whole rows of d are moved
    of_weights = unstack_weights(sums.mT, weights, width=width, expert_width=width)
    if not of_tokens:
        return _as_outputs(tokens.new_empty(0), of_weights)
    shape = (columns, tokens.shape[1])
    matrices = stack_weights(weights, width=width, expert_width=width, shape=shape, dtype=dtype)
    return _as_outputs(_token_gradients(grads, matrices, d_model, x_dtype), of_weights)


def _as_outputs(of_tokens: Tensor, of_weights: Weights) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of tokens, queries, keys, routers and values; empty for queries where there are none."""
    (*of_queries, of_keys), of_values, of_routers = of_weights
    assert of_routers is not None
    return of_tokens, of_queries[0] if of_queries else of_keys.new_empty(0), of_keys, of_routers, of_values


def _aligned_heads(weight: Tensor, d: int, width: int, tokens: Tensor) -> Tensor:
    """Rows of a plain projection `[H * d, D]`, in the tokens' width and dtype, each head padded to `width` rows.

    A view where it already is like that: few tokens take no longer than a copy would.
    """
    heads = weight.to(tokens.dtype).unflatten(0, (-1, d))
    return pad(heads, (0, tokens.shape[1] - weight.shape[1], 0, width - d)).flatten(0, 1)


def _project_heads(
    tokens: Tensor, matrices: Sequence[Tensor], heads: int, width: int, cos: Tensor | None, sin: Tensor | None
) -> list[Tensor]:
    """Rows `[N, H, width]` of each projection; of narrower heads where a rotation makes them as wide."""
    products = [(tokens @ matrix.mT).view(-1, heads, matrix.shape[0] // heads) for matrix in matrices]
    if cos is None or tokens.shape[0] == 0:
        return products
    # A product each, for an operator's results may not share memory, and then a rotation may overwrite it.
    rotated = [rows if rows.shape[2] == width else rows.new_empty(*rows.shape[:2], width) for rows in products]
    rotate_heads(products, rotated, cos, sin, width=width)
    return rotated


def _token_gradients(grads: Tensor, matrices: Tensor, d_model: int, dtype: torch.dtype) -> Tensor:
    """`grads @ matrices`, `[N, d_model]` in `dtype`, written once where the library can."""
    if grads.is_cuda and dtype == torch.float32 and grads.dtype != dtype and d_model == matrices.shape[1]:
        return torch.mm(grads, matrices, out_dtype=dtype)
    return (grads @ matrices)[:, :d_model].to(dtype, memory_format=torch.contiguous_format)


def _setup_context(ctx, inputs, output):
    x, queries, keys, routers, values, _, cos, sin = inputs[:8]
    _, _, out, gates, expert_indices, kept, copy = output
    ctx.x_dtype = x.dtype
    tokens = copy if copy.numel() else x
    ctx.save_for_backward(tokens, queries, keys, routers, values, cos, sin, gates, expert_indices, kept, out)
    ctx.set_materialize_grads(False)  # kept and copy have none


def _differentiate(ctx, grad_queries, grad_keys, grad_values, grad_gates, *_unused):
    saved = ctx.saved_tensors  # checkpointing lets them be read once
    queries, (gates, *_, out) = saved[1], saved[-4:]
    of_queries = out[:0] if queries is None else out
    given = ((grad_queries, of_queries), (grad_keys, out), (grad_values, out), (grad_gates, gates))
    grads = [like.new_zeros(like.shape) if grad is None else grad for grad, like in given]
    found = _project_inputs_backward(*grads, *saved, ctx.x_dtype, ctx.needs_input_grad[0])
    wanted = ctx.needs_input_grad[: len(found)]
    return *(grad if needs else None for grad, needs in zip(found, wanted, strict=True)), *(None,) * 7


_project_inputs.register_autograd(_differentiate, setup_context=_setup_context)

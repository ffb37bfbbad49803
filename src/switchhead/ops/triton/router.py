"""`route` on Triton: scores, the k best and their gates in one pass over the tokens; scores are never written.

Scores have float32 precision whatever x is. bfloat16 rows are multiplied as they are with weights split into three
bfloat16 parts, whose sum is the float32 weight; other dtypes are multiplied as float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from switchhead.ops.triton.operands import pad_to
from switchhead.ops.triton.operator import operator, visible

_BLOCK_K = 64
_SPLITS = 32  # of the tokens, in the sum that is the weights' gradient
# Up to here a program for each token and head is done sooner than one for all of them, which waits for every step.
_FEW_TOKENS, _FEW_EXPERTS = 16, 64
_FEW_NUMBERS = 4096  # of the weights, that such a program holds at once


def route(
    x: Float[Tensor, "tokens d_model"],
    weight: Float[Tensor, "heads experts d_model"],
    k: int,
    *,
    gating: str = "sigmoid",
    dropped: Bool[Tensor, "tokens heads experts"] | None = None,
) -> tuple[Float[Tensor, "tokens heads k"], Int[Tensor, "tokens heads k"]]:
    """Gates (float32) and indices (int32) of the k best experts of each token and head, best first, ties to the lowest.

    Several routers over the same tokens run in one pass if their weights are concatenated along the heads.
    Differentiable once in x and weight.
    """
    gates, expert_indices, _ = _route(x, weight, k, gating == "softmax", dropped)
    return gates, expert_indices


@operator("switchhead::route")
def _route(x: Tensor, weight: Tensor, k: int, softmax: bool, dropped: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Gates, indices, and with softmax the probabilities of all experts, which its derivative needs."""
    gates, expert_indices, probabilities = choose(x, weight, k, softmax=softmax, dropped=dropped)
    return gates[0], expert_indices[0], probabilities


def choose(
    x: Tensor, weight: Tensor, k: int, *, softmax: bool = False, dropped: Tensor | None = None, sides: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Gates and indices `[sides, N, H / sides, K]`, and with softmax the probabilities `[N, H, E]` of all experts.

    x may be wider than the weight, with zeros behind.
    """
    tokens, d, (heads, experts) = *x.shape, weight.shape[:2]
    shape = (sides, tokens, heads // sides, k)
    gates = torch.empty(shape, dtype=torch.float32, device=x.device)
    expert_indices = torch.empty(shape, dtype=torch.int32, device=x.device)
    probabilities = x.new_empty((tokens, heads, experts) if softmax else 0, dtype=torch.float32)
    if tokens == 0:
        return gates, expert_indices, probabilities
    x = x if x.stride(1) == 1 else x.contiguous()
    dropped = None if dropped is None else dropped.contiguous()
    written = gates, expert_indices, probabilities if softmax else None
    padded_experts = triton.next_power_of_2(experts)
    if tokens <= _FEW_TOKENS and padded_experts <= _FEW_EXPERTS:
        visible(_route_few_kernel)[(tokens, heads)](
            x, weight, dropped, *written, tokens, x.stride(0), *weight.stride(), weight.shape[2],
            heads, experts, padded_experts, heads // sides, k, min(1024, _FEW_NUMBERS // padded_experts),
        )  # fmt: skip
        return gates, expert_indices, probabilities
    parts = _split_weight(x, weight)
    block = _block_m(parts.shape[1])
    few = parts.shape[1] <= 64  # with many experts, deep pipelines do not fit into shared memory
    visible(_route_kernel)[(triton.cdiv(tokens, block),)](
        x, parts, dropped, *written, tokens, x.stride(0), d, parts.shape[2], parts.shape[0], heads, experts,
        *_padded(heads, experts), heads // sides, k, _precision(x), block,
        _BLOCK_K if few else _BLOCK_K // 2, num_warps=4, num_stages=4 if few else 2,
    )  # fmt: skip
    return gates, expert_indices, probabilities


@operator("switchhead::route_backward")
def _route_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    gates: Tensor,
    expert_indices: Tensor,
    probabilities: Tensor,
    softmax: bool,
    need_x: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight; an empty tensor where none is needed."""
    tokens, (heads, experts, d) = x.shape[0], weight.shape
    if tokens == 0:
        grad_x, grad_weight = x.new_empty(x.shape), weight.new_zeros(weight.shape)
        return grad_x if need_x else x.new_empty(0), grad_weight if need_weight else x.new_empty(0)
    k = gates.shape[2]
    x = x if x.stride(1) == 1 else x.contiguous()
    padded_heads, padded_experts = _padded(heads, experts)
    width = padded_heads * padded_experts
    n_parts = 3 if x.dtype == torch.bfloat16 else 1
    dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    score_grads = torch.empty(n_parts, tokens, width, dtype=dtype, device=x.device)
    block = max(1, 2048 // width)
    visible(_score_grads_kernel)[(triton.cdiv(tokens, block),)](
        grad.contiguous(), gates, expert_indices, probabilities if softmax else None, score_grads, tokens,
        heads, experts, padded_heads, padded_experts, k, n_parts, block,
    )  # fmt: skip
    grad_x = grad_weight = x.new_empty(0)
    if need_x:
        parts = _split_weight(x, weight)
        grad_x = torch.empty(tokens, d, dtype=x.dtype, device=x.device)
        block_m, block_n = (128, 128) if width <= 64 else (64, 128)
        # Rounded to 16 bits in the end, the sum needs the first two parts of each factor only.
        visible(_grad_x_kernel)[(triton.cdiv(tokens, block_m), triton.cdiv(d, block_n))](
            score_grads, parts, grad_x, tokens, d, parts.shape[2], width, min(2, n_parts), min(2, parts.shape[0]),
            "tf32" if x.dtype == torch.float16 else _precision(x), block_m, block_n, min(width, 64),
        )  # fmt: skip
    if need_weight:
        partial = torch.empty(_SPLITS, heads * experts, d, dtype=torch.float32, device=x.device)
        block_m, block_d = (64, 128) if width <= 64 else (32, 32)
        visible(_grad_weight_kernel)[(triton.cdiv(d, block_d), _SPLITS)](
            score_grads, x, partial, tokens, x.stride(0), d, heads, experts, padded_experts, width, n_parts,
            _precision(x), block_m, block_d, num_warps=4, num_stages=3,
        )  # fmt: skip
        grad_weight = partial.sum(0).view(weight.shape).to(weight.dtype)
    return grad_x, grad_weight


def _setup_context(ctx, inputs, output):
    x, weight, _, ctx.softmax, _ = inputs
    gates, expert_indices, probabilities = output
    ctx.save_for_backward(x, weight, gates, expert_indices, probabilities)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad, _grad_indices, _grad_probabilities):
    if grad is None:
        return (None,) * 5
    needs = ctx.needs_input_grad[:2]
    grads = _route_backward(grad, *ctx.saved_tensors, ctx.softmax, *needs)
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), None, None, None


_route.register_autograd(_differentiate, setup_context=_setup_context)


def _padded(heads: int, experts: int) -> tuple[int, int]:
    """Heads and experts as powers of two whose product is at least 16, the least width of a matrix instruction."""
    experts = triton.next_power_of_2(experts)
    return max(triton.next_power_of_2(heads), 16 // experts), experts


def _block_m(width: int) -> int:
    """Tokens of a tile, so that one score for each of `width` experts fits into registers."""
    return 64 if width <= 64 else max(16, 8192 // width)


def _precision(x: Tensor) -> str:
    exact = x.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    return "ieee" if exact else "tf32x3"


def _split_weight(x: Tensor, weight: Tensor) -> Tensor:
    """`[parts, padded heads * padded experts, padded d]`: bfloat16 parts that sum to weight, or weight as float32."""
    heads, experts, d = weight.shape
    n_parts = (1 if weight.dtype == torch.bfloat16 else 3) if x.dtype == torch.bfloat16 else 1
    padded_heads, padded_experts = _padded(heads, experts)
    dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    shape = (n_parts, padded_heads * padded_experts, pad_to(x.shape[1], _BLOCK_K))
    parts = torch.empty(shape, dtype=dtype, device=x.device)
    visible(_split_weight_kernel)[(parts.shape[1], triton.cdiv(parts.shape[2], 256))](
        weight, parts, *weight.stride(), heads, experts, d, padded_experts, n_parts, parts.shape[1], parts.shape[2], 256
    )  # fmt: skip
    return parts


@triton.jit
def _split_weight_kernel(
    weight_ptr,  # any float dtype [H, E, d]
    parts_ptr,  # bfloat16 or float32 [PARTS, ROWS, D_PADDED]
    stride_h, stride_e, stride_d, heads, experts, d,
    PADDED_EXPERTS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, D_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head, expert = row // PADDED_EXPERTS, row % PADDED_EXPERTS
    inside = (j < d) & (head < heads) & (expert < experts)
    rest = tl.load(
        weight_ptr + head * stride_h + expert * stride_e + j * stride_d, mask=inside, other=0.0
    ).to(tl.float32)  # fmt: skip
    for part in tl.static_range(PARTS):
        value = rest.to(parts_ptr.dtype.element_ty)
        tl.store(parts_ptr + (part * ROWS + row) * D_PADDED + j, value, mask=j < D_PADDED)
        rest -= value.to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def _route_kernel(
    x_ptr,  # [tokens, D]
    parts_ptr,  # [PARTS, PH * PE, D_PADDED]
    dropped_ptr,  # bool [tokens, H, E] or None
    gates_ptr,  # float32 [H / SIDE, tokens, SIDE, K]
    indices_ptr,  # int32 [H / SIDE, tokens, SIDE, K]
    probabilities_ptr,  # float32 [tokens, H, E] or None
    tokens, stride_x,
    D: tl.constexpr, D_PADDED: tl.constexpr, PARTS: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
    PH: tl.constexpr, PE: tl.constexpr, SIDE: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = PH * PE
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, WIDTH)
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * stride_x + k[None, :]
    scores = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    for k0 in range(0, D, BLOCK_K):
        if D % BLOCK_K == 0:
            x = tl.load(x_at + k0)
        else:
            x = tl.load(x_at + k0, mask=(k0 + k < D)[None, :], other=0.0)
        for part in tl.static_range(PARTS):
            w = tl.load(parts_ptr + (part * WIDTH + n)[:, None] * D_PADDED + k0 + k[None, :])
            scores = tl.dot(x.to(w.dtype), w.T, scores, input_precision=PRECISION)

    _choose_best(
        tl.reshape(scores, (BLOCK_M, PH, PE)), token, tl.arange(0, PH), tokens,
        dropped_ptr, gates_ptr, indices_ptr, probabilities_ptr, H, E, PE, SIDE, K,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _route_few_kernel(
    x_ptr,  # [tokens, D]
    weight_ptr,  # any float dtype [H, E, D]
    dropped_ptr,  # bool [tokens, H, E] or None
    gates_ptr,  # float32 [H / SIDE, tokens, SIDE, K]
    indices_ptr,  # int32 [H / SIDE, tokens, SIDE, K]
    probabilities_ptr,  # float32 [tokens, H, E] or None
    tokens, stride_x, stride_h, stride_e, stride_d, D,
    H: tl.constexpr, E: tl.constexpr, PE: tl.constexpr, SIDE: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program for each token and head, which reads that head's weights as they are."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    e = tl.arange(0, PE)[:, None]
    products = tl.zeros((PE, BLOCK_K), tl.float32)
    for k0 in range(0, D, BLOCK_K):
        k = (k0 + tl.arange(0, BLOCK_K))[None, :]
        x = tl.load(x_ptr + token * stride_x + k, mask=k < D, other=0.0)
        at = weight_ptr + head.to(tl.int64) * stride_h + e.to(tl.int64) * stride_e + k.to(tl.int64) * stride_d
        products += x.to(tl.float32) * tl.load(at, mask=(e < E) & (k < D), other=0.0).to(tl.float32)
    _choose_best(
        tl.sum(products, 1)[None, None, :], token + tl.arange(0, 1), head + tl.arange(0, 1), tokens,
        dropped_ptr, gates_ptr, indices_ptr, probabilities_ptr, H, E, PE, SIDE, K,
    )  # fmt: skip


@triton.jit
def _choose_best(
    scores,  # float32 [tokens here, heads here, PE]
    token,  # int [tokens here]
    head,  # int [heads here]
    tokens, dropped_ptr, gates_ptr, indices_ptr, probabilities_ptr,
    H: tl.constexpr, E: tl.constexpr, PE: tl.constexpr, SIDE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    token, head = token.to(tl.int64)[:, None], head[None, :]
    inside = (token < tokens) & (head < H)
    e = tl.arange(0, PE)[None, None, :]
    at = (token * H + head)[:, :, None] * E + e
    exists = inside[:, :, None] & (e < E)
    # Least of all but -inf, which marks experts already taken and padding: a score of -inf, or one that is not a
    # number, must lead neither to an index out of range nor to an expert that is chosen twice.
    LEAST: tl.constexpr = -3.0e38
    allowed = scores == scores
    if dropped_ptr is not None:
        allowed = allowed & (tl.load(dropped_ptr + at, mask=exists, other=0) == 0)
    left = tl.where(allowed, tl.maximum(scores, LEAST), LEAST)
    left = tl.where(e < E, left, float("-inf"))
    if probabilities_ptr is not None:
        top = tl.max(left, 2)
        exponentials = tl.where(left > LEAST, tl.exp(left - top[:, :, None]), 0.0)
        total = tl.sum(exponentials, 2)
        total = tl.where(total > 0, total, 1.0)
        tl.store(probabilities_ptr + at, exponentials / total[:, :, None], mask=exists)
    slot = ((head // SIDE * tokens + token) * SIDE + head % SIDE) * K
    for j in tl.static_range(K):
        best, expert = tl.max(left, 2, return_indices=True, return_indices_tie_break_left=True)
        if probabilities_ptr is not None:
            gate = tl.exp(tl.maximum(best - top, -100.0)) / total
        else:
            small = tl.exp(-tl.abs(best))
            gate = tl.where(best >= 0, 1.0, small) / (1 + small)
        gate = tl.where(best > LEAST, gate, 0.0)
        tl.store(gates_ptr + slot + j, gate, mask=inside)
        tl.store(indices_ptr + slot + j, expert, mask=inside)
        left = tl.where(e == expert[:, :, None], float("-inf"), left)


@triton.jit(do_not_specialize=["tokens"])
def _score_grads_kernel(
    grad_ptr,  # [tokens, H, K]
    gates_ptr,  # float32 [tokens, H, K]
    indices_ptr,  # int32 [tokens, H, K]
    probabilities_ptr,  # float32 [tokens, H, E] or None
    score_grads_ptr,  # [PARTS, tokens, PH * PE]: parts whose sum is the gradient of the scores
    tokens,
    H: tl.constexpr, E: tl.constexpr, PH: tl.constexpr, PE: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    c = tl.arange(0, PH * PE)[None, :]
    h, e = c // PE, c % PE
    inside = (token < tokens) & (h < H)
    first = (token * H + h) * K
    rest = tl.zeros((BLOCK, PH * PE), tl.float32)
    mean = tl.zeros((BLOCK, PH * PE), tl.float32)
    for j in tl.static_range(K):
        grad = tl.load(grad_ptr + first + j, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(gates_ptr + first + j, mask=inside, other=0.0)
        expert = tl.load(indices_ptr + first + j, mask=inside, other=-1)
        if probabilities_ptr is not None:
            mean += grad * gate
            value = grad * gate
        else:
            value = grad * gate * (1 - gate)
        rest += tl.where(e == expert, value, 0.0)
    if probabilities_ptr is not None:
        at = probabilities_ptr + (token * H + h) * E + e
        rest -= tl.load(at, mask=inside & (e < E), other=0.0) * mean
    for part in tl.static_range(PARTS):
        value = rest.to(score_grads_ptr.dtype.element_ty)
        at = (part * tl.cast(tokens, tl.int64) + token) * (PH * PE) + c
        tl.store(score_grads_ptr + at, value, mask=token < tokens)
        rest -= value.to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def _grad_x_kernel(
    score_grads_ptr,  # [parts, tokens, WIDTH]
    parts_ptr,  # [parts, WIDTH, D_PADDED]
    grad_x_ptr,  # [tokens, D]
    tokens,
    D: tl.constexpr, D_PADDED: tl.constexpr, WIDTH: tl.constexpr, GRAD_PARTS: tl.constexpr,
    WEIGHT_PARTS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, WIDTH, BLOCK_K):
        c = first + tl.arange(0, BLOCK_K)
        for i in tl.static_range(GRAD_PARTS):
            at = (i * tl.cast(tokens, tl.int64) + token) * WIDTH + c[None, :]
            grads = tl.load(score_grads_ptr + at, mask=token < tokens, other=0.0)
            for j in tl.static_range(WEIGHT_PARTS):
                if i + j < 2:
                    at = parts_ptr + (j * WIDTH + c)[:, None] * D_PADDED + n
                    w = tl.load(at, mask=n < D, other=0.0)
                    total = tl.dot(grads, w, total, input_precision=PRECISION)
    tl.store(grad_x_ptr + token * D + n, total.to(grad_x_ptr.dtype.element_ty), mask=(token < tokens) & (n < D))


@triton.jit(do_not_specialize=["tokens"])
def _grad_weight_kernel(
    score_grads_ptr,  # [PARTS, tokens, WIDTH]
    x_ptr,  # [tokens, D]
    partial_ptr,  # float32 [splits, H * E, D]
    tokens, stride_x,
    D: tl.constexpr, H: tl.constexpr, E: tl.constexpr, PE: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    split, splits = tl.program_id(1), tl.num_programs(1)
    per_split = tl.cdiv(tl.cdiv(tokens, splits), BLOCK_M) * BLOCK_M
    first = split * per_split
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    c = tl.arange(0, WIDTH)[None, :]
    total = tl.zeros((BLOCK_D, WIDTH), tl.float32)
    for start in range(first, tl.minimum(first + per_split, tokens), BLOCK_M):
        token = (start + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        valid = token < tokens
        x = tl.load(x_ptr + token * stride_x + d[None, :], mask=valid & (d < D)[None, :], other=0.0)
        for part in tl.static_range(PARTS):
            at = (part * tl.cast(tokens, tl.int64) + token) * WIDTH + c
            grads = tl.load(score_grads_ptr + at, mask=valid, other=0.0)
            total = tl.dot(x.to(grads.dtype).T, grads, total, input_precision=PRECISION)
    exists = (c // PE < H) & (c % PE < E)
    line = split.to(tl.int64) * (H * E) + c // PE * E + c % PE
    tl.store(partial_ptr + line * D + d[:, None], total, mask=exists & (d < D)[:, None])

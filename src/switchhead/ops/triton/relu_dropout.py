"""ReLU and dropout of a feed-forward layer in one pass, with nothing kept for backward but the result.

The result says which units are left: those above zero. A mask would be another byte for each, written and read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from switchhead.ops.triton.operator import operator, visible

_BLOCK = 1024  # elements of a group, see the kernel
_ROUNDS = 7  # of Philox: the fewest that pass all of BigCrush (Salmon et al., 2011); ten take a quarter longer in all
_ROWS, _STEPS, _COLUMNS = 16, 8, 64  # of a tile of backward, and tiles one below the other that a program sums up


def relu_dropout(x: Tensor, bias: Tensor | None, p: float) -> Tensor:
    """`switchhead.ops.relu_dropout` for CUDA and p < 1; differentiable once."""
    seed = torch.randint(2**62, (1,), device=x.device)  # from the generator that dropout draws from
    threshold = min(round(p * 2**31), 2**31 - 1)  # numbers of 31 bits below it drop a unit
    scale = 1 / (1 - threshold / 2**31)
    return _forward(x.reshape(-1, x.shape[-1]).contiguous(), bias, seed, threshold, scale).view(x.shape)


@operator("switchhead::relu_dropout")
def _forward(x: Tensor, bias: Tensor | None, seed: Tensor, threshold: int, scale: float) -> Tensor:
    out = torch.empty_like(x)
    if x.numel():
        visible(_forward_kernel)[(triton.cdiv(x.numel(), 4 * _BLOCK),)](
            x, bias, seed, out, x.numel(), threshold, scale, x.shape[1], _ROUNDS, _BLOCK
        )
    return out


@operator("switchhead::relu_dropout_backward")
def _backward(grad: Tensor, out: Tensor, scale: float, of_bias: bool) -> tuple[Tensor, Tensor]:
    """Gradients of the input, and in float32 of the bias, or an empty one."""
    rows, width = out.shape
    grad_x = torch.empty_like(out)
    parts = triton.cdiv(rows, _ROWS * _STEPS)
    sums = torch.empty(parts, width if of_bias else 0, dtype=torch.float32, device=out.device)
    if out.numel():
        visible(_backward_kernel)[(parts, triton.cdiv(width, _COLUMNS))](
            grad.contiguous(), out, grad_x, sums if of_bias else None, rows, scale, width, _ROWS, _STEPS, _COLUMNS
        )
    return grad_x, sums.sum(0)


def _setup_context(ctx, inputs, output):
    _, bias, _, _, ctx.scale = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(output)


def _differentiate(ctx, grad):
    (out,) = ctx.saved_tensors
    of_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[1]
    grad_x, grad_bias = _backward(grad, out, ctx.scale, of_bias)
    return grad_x, grad_bias.to(ctx.bias_dtype) if of_bias else None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)


@triton.jit
def _forward_kernel(
    x_ptr,  # [size]
    bias_ptr,  # [WIDTH] or None
    seed_ptr,  # int64 [1]
    out_ptr,  # [size]
    size, threshold, scale,
    WIDTH: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    zero = tl.zeros((BLOCK,), tl.int32)
    # One call makes four numbers: of four groups, each contiguous. 64-bit counters would make it draw 64-bit numbers.
    draws = tl.philox(tl.load(seed_ptr), lane, zero + program, zero, zero, n_rounds=ROUNDS)
    for group in tl.static_range(4):
        at = (program.to(tl.int64) * 4 + group) * BLOCK + lane
        valid = at < size
        x = tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            x += tl.load(bias_ptr + at % WIDTH, mask=valid, other=0.0).to(tl.float32)
        kept = (draws[group] >> 1).to(tl.int32) >= threshold
        out = tl.where(kept & (x > 0), x * scale, 0.0)
        out = tl.where(x == x, out, x)  # what is not a number must be seen
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    grad_ptr,  # [rows, WIDTH]
    out_ptr,  # [rows, WIDTH]
    grad_x_ptr,  # [rows, WIDTH]
    sums_ptr,  # float32 [programs, WIDTH] or None: of the rows of one program
    rows, scale,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in tl.static_range(STEPS):
        row = (tl.program_id(0).to(tl.int64) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        at = row[:, None] * WIDTH + column[None, :]
        out = tl.load(out_ptr + at, mask=inside, other=0.0)
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.where(out <= 0, 0.0, grad * scale)
        tl.store(grad_x_ptr + at, grad.to(grad_x_ptr.dtype.element_ty), mask=inside)
        total += grad
    if sums_ptr is not None:
        tl.store(sums_ptr + tl.program_id(0) * WIDTH + column, tl.sum(total, 0), mask=column < WIDTH)

"""Dropout, its random numbers drawn four at a time: alone as a mask, or with the ReLU of a feed-forward layer.

What `torch.compile` makes of `torch.nn.functional.dropout` draws four numbers for each element and uses one, which
takes a GPU longer than to read and write the element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from switchhead.ops.triton.operator import operator, visible

_BLOCK = 1024  # elements of a group, of which a program has four
_ROUNDS = 7  # of Philox: the fewest that pass all of BigCrush (Salmon et al., 2011); ten take a quarter longer in all
_ROWS, _STEPS, _COLUMNS = 16, 8, 64  # of a tile of backward, and tiles one below the other that a program sums up


def keep_mask(x: Tensor, p: float) -> tuple[Tensor, float]:
    """Which elements of x are kept, `[*x.shape]` boolean, and what these are multiplied with; p < 1."""
    threshold, scale = _threshold_and_scale(p)
    return _keep_mask(_new_seed(x.device), list(x.shape), threshold), scale


def relu_dropout(x: Tensor, bias: Tensor | None, p: float) -> Tensor:
    """`switchhead.ops.relu_dropout` for CUDA and p < 1.

    Nothing is kept for backward but the result: units that are left are those above zero.
    """
    threshold, scale = _threshold_and_scale(p)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    bias = None if bias is None else bias.contiguous()
    return _relu_dropout(rows, bias, _new_seed(x.device), threshold, scale).view(x.shape)


def _new_seed(device: torch.device) -> Tensor:
    """A seed `[1]` from the generator that PyTorch's own dropout draws from."""
    return torch.randint(2**62, (1,), device=device)


def _threshold_and_scale(p: float) -> tuple[int, float]:
    """Numbers of 31 bits below the one drop an element; the others are multiplied by the other."""
    threshold = min(round(p * 2**31), 2**31 - 1)
    return threshold, 1 / (1 - threshold / 2**31)


@operator("switchhead::keep_mask")
def _keep_mask(seed: Tensor, shape: list[int], threshold: int) -> Tensor:
    mask = torch.empty(shape, dtype=torch.bool, device=seed.device)
    if mask.numel():
        visible(_keep_mask_kernel)[(triton.cdiv(mask.numel(), 4 * _BLOCK),)](
            seed, mask, mask.numel(), threshold, _ROUNDS, _BLOCK
        )
    return mask


@operator("switchhead::relu_dropout")
def _relu_dropout(x: Tensor, bias: Tensor | None, seed: Tensor, threshold: int, scale: float) -> Tensor:
    out = torch.empty_like(x)
    if x.numel():
        visible(_relu_dropout_kernel)[(triton.cdiv(x.numel(), 4 * _BLOCK),)](
            x, bias, seed, out, x.numel(), threshold, scale, x.shape[1], _ROUNDS, _BLOCK
        )
    return out


@operator("switchhead::relu_dropout_backward")
def _relu_dropout_backward(grad: Tensor, out: Tensor, scale: float, of_bias: bool) -> tuple[Tensor, Tensor]:
    """Gradients of the input, and in float32 of the bias, or an empty one."""
    rows, width = out.shape
    grad_x = torch.empty_like(out)
    parts = triton.cdiv(rows, _ROWS * _STEPS)
    sums = torch.empty(parts, width if of_bias else 0, dtype=torch.float32, device=out.device)
    if out.numel():
        visible(_relu_dropout_backward_kernel)[(parts, triton.cdiv(width, _COLUMNS))](
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
    grad_x, grad_bias = _relu_dropout_backward(grad, out, ctx.scale, of_bias)
    return grad_x, grad_bias.to(ctx.bias_dtype) if of_bias else None, None, None, None


_relu_dropout.register_autograd(_differentiate, setup_context=_setup_context)


@triton.jit
def _draw(seed_ptr, program, lane, ROUNDS: tl.constexpr):
    """Four blocks of numbers of 31 bits. Of 64-bit counters Philox makes 64-bit numbers, at several times the cost."""
    zero = tl.zeros_like(lane)
    a, b, c, d = tl.philox(tl.load(seed_ptr), lane, zero + program, zero, zero, n_rounds=ROUNDS)
    return (a >> 1).to(tl.int32), (b >> 1).to(tl.int32), (c >> 1).to(tl.int32), (d >> 1).to(tl.int32)


@triton.jit
def _keep_mask_kernel(
    seed_ptr,  # int64 [1]
    mask_ptr,  # bool [size]
    size, threshold,
    ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    draws = _draw(seed_ptr, program, lane, ROUNDS)
    for group in tl.static_range(4):
        at = (program.to(tl.int64) * 4 + group) * BLOCK + lane
        tl.store(mask_ptr + at, draws[group] >= threshold, mask=at < size)


@triton.jit
def _relu_dropout_kernel(
    x_ptr,  # [size]
    bias_ptr,  # [WIDTH] or None
    seed_ptr,  # int64 [1]
    out_ptr,  # [size]
    size, threshold, scale,
    WIDTH: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    draws = _draw(seed_ptr, program, lane, ROUNDS)
    for group in tl.static_range(4):
        at = (program.to(tl.int64) * 4 + group) * BLOCK + lane
        valid = at < size
        x = tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            x += tl.load(bias_ptr + at % WIDTH, mask=valid, other=0.0).to(tl.float32)
        out = tl.where((draws[group] >= threshold) & (x > 0), x * scale, 0.0)
        out = tl.where(x == x, out, x)  # what is not a number must be seen
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["rows"])
def _relu_dropout_backward_kernel(
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

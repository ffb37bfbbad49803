"""Relative attention as a differentiable PyTorch operator around the Triton kernels."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from switchhead.ops.availability import on_device
from switchhead.ops.triton_attention.backward import (
    key_gradient_kernel,
    position_gradient_kernel,
    query_gradient_kernel,
)
from switchhead.ops.triton_attention.forward import forward_kernel

_LOG2_E = 1 / math.log(2)
_CHUNK_BYTES = 512 * 2**20  # of the position scores' gradients, which would otherwise grow with the length squared


class Launch(NamedTuple):
    """How the kernels run for one width and dtype: tile size, and launch options of each kernel."""

    tile: int
    forward: dict[str, int]
    query_gradient: dict[str, int]
    position_gradient: dict[str, int]
    key_gradient: dict[str, int]


def launch_for(width: int, dtype: torch.dtype) -> Launch:
    """The launch parameters for heads of this width: the fastest measured (docs/relative-attention.md).

    All are short of registers before anything else; tiles shrink so that seven of them fit into shared memory.
    """
    row_bytes = triton.next_power_of_2(width) * dtype.itemsize
    product = {"num_warps": 4, "num_stages": 4}
    if row_bytes <= 128:
        options = {"num_warps": 4, "num_stages": 2}
        return Launch(64, options | {"maxnreg": 168}, options, product, options)
    options = {"num_warps": 4, "num_stages": 1}
    if row_bytes <= 256:
        return Launch(64, options, options, product, options)
    return Launch(32 if row_bytes <= 512 else 16, options, options, options, options)


class Chunk(NamedTuple):
    """Tiles of queries whose position scores' gradients exist at once: all tiles of some sequences, or some of one."""

    first_sequence: int
    n_sequences: int
    first_tile: int
    n_tiles: int


class Division(NamedTuple):
    """Backward in chunks, the largest first.

    The position scores of a tile of queries lie in a window of `blocks` blocks of distances; the windows of all tiles
    together have `windows`. The gradient of positions is summed over the sequences of a chunk in `splits` parts.
    """

    chunks: list[Chunk]
    blocks: int
    windows: int
    splits: int


def divide(q: Tensor, k: Tensor, tile: int, *, causal: bool) -> Division:
    """Chunks that keep the gradients of the position scores within `_CHUNK_BYTES`, if a tile of all heads does."""
    batch, heads, queries, _ = q.shape
    tiles = triton.cdiv(queries, tile)
    blocks = triton.cdiv(k.shape[2] - queries + tiles * tile if causal else k.shape[2], tile) + 1
    windows = blocks if causal else tiles - 1 + blocks
    fitting_tiles = max(1, _CHUNK_BYTES // (heads * blocks * tile**2 * q.itemsize))
    n_sequences, n_tiles = _even(batch, fitting_tiles // tiles), _even(tiles, fitting_tiles)
    chunks = [
        Chunk(sequence, min(n_sequences, batch - sequence), tile, min(n_tiles, tiles - tile))
        for sequence in range(0, batch, n_sequences)
        for tile in range(0, tiles, n_tiles)
    ]
    splits = max(1, min(n_sequences, 4 * _multiprocessors(q.device) // (windows * heads)))
    return Division(chunks, blocks, windows, splits)


def _even(total: int, at_most: int) -> int:
    """Size of nearly equal parts of a total, none above `at_most` (taken as 1 at least)."""
    return triton.cdiv(total, triton.cdiv(total, max(1, at_most)))


@torch.library.custom_op("switchhead::relative_attention", mutates_args=())
def relative_attention(
    q: Tensor,
    u: Tensor | None,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    padding: Tensor | None,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """`softmax(scale * (q k + skew(u r))) v`, and the base-2 logarithm of the softmax's denominator.

    Args:
        q: queries of the content scores, `[B, H, T, d]`, d a multiple of 8.
        u: queries of the position scores; None: q.
        k, v: `[B, Hk, S, d]`, S >= T; H a multiple of Hk.
        r: `[H, P, d]`, row p belongs to distance `p - (S - 1)`.
        padding: `[B, S]` boolean, True = may not be attended.
        scale: factor of the scores.
        causal: query i sees the first `S - T + i + 1` keys.

    Returns:
        `[B, H, T, d]` like q, and float32 `[B, H, T]` (infinite where a query sees no key).
    """
    q, k, v, r = (_rows_contiguous(x) for x in (q, k, v, r))
    u = q if u is None else _rows_contiguous(u)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    batch, heads, queries, width = q.shape
    launch = launch_for(width, q.dtype)
    if out.numel() == 0:
        return out, lse
    with on_device(q.device):
        forward_kernel[(triton.cdiv(queries, launch.tile) * batch * heads,)](
            q, u, k, v, r, _bytes(padding, q), out, lse,
            scale * _LOG2_E,
            *_strides(q, u, k, v), *r.stride()[:2], *_strides(out),
            heads, queries, k.shape[2], r.shape[1],
            **_meta(q, u, k, padding, causal, launch),
            **launch.forward,
        )  # fmt: skip
    return out, lse


@relative_attention.register_fake
def _(q, u, k, v, r, padding, scale, causal):
    q = _rows_contiguous(q)
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("switchhead::relative_attention_backward", mutates_args=())
def relative_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    u: Tensor | None,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    padding: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, u (empty where u is None: it is part of q's), k, v and r."""
    grad_out, q, k, v, r = (_rows_contiguous(x) for x in (grad_out, q, k, v, r))
    has_bias = u is not None
    u = q if u is None else _rows_contiguous(u)
    batch, heads, queries, width = q.shape
    launch = launch_for(width, q.dtype)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    grad_u = torch.empty_like(u) if has_bias else q.new_empty(0)
    if q.numel() == 0:
        return grad_q, grad_u, grad_k.zero_(), grad_v.zero_(), r.new_zeros(r.shape)

    delta = torch.empty_like(lse)
    meta = _meta(q, u, k, padding, causal, launch)
    pad = _bytes(padding, q)
    sizes = (heads, queries, k.shape[2], r.shape[1])
    inputs = (*_strides(q, u, k, v), *r.stride()[:2])
    chunks, blocks, windows, splits = divide(q, k, launch.tile, causal=causal)
    largest = (chunks[0].n_sequences * heads, chunks[0].n_tiles)
    grad_p = q.new_empty(*largest, blocks, launch.tile, launch.tile)
    grad_r = r.new_zeros(splits, *r.shape, dtype=torch.float32)
    with on_device(q.device):
        for chunk in chunks:
            query_gradient_kernel[(chunk.n_tiles * chunk.n_sequences * heads,)](
                q, u, k, v, r, pad, out, grad_out, lse, delta, grad_q, grad_u,
                grad_p.view(torch.int32 if q.itemsize == 2 else torch.int64),
                scale * _LOG2_E, scale,
                *inputs, *_strides(out, grad_out, grad_q, grad_u if has_bias else grad_q),
                *sizes, blocks, chunk.first_sequence, chunk.first_tile, chunk.n_tiles,
                **meta,
                **launch.query_gradient,
            )  # fmt: skip
            position_gradient_kernel[(windows * splits * heads,)](
                u, grad_p, grad_r,
                *_strides(u),
                *sizes, blocks, *chunk, windows, splits,
                CAUSAL=causal, PRECISION=meta["PRECISION"], M=launch.tile, WIDTH=width, D=meta["D"],
                **launch.position_gradient,
            )  # fmt: skip
        key_gradient_kernel[(triton.cdiv(k.shape[2], launch.tile) * batch * k.shape[1],)](
            q, u, k, v, r, pad, grad_out, lse, delta, grad_k, grad_v,
            scale * _LOG2_E, scale,
            *inputs, *_strides(grad_out, grad_k, grad_v),
            *sizes,
            **meta,
            **launch.key_gradient,
        )  # fmt: skip
    return grad_q, grad_u, grad_k, grad_v, (grad_r.sum(0) * scale).to(r.dtype)


@relative_attention_backward.register_fake
def _(grad_out, q, u, k, v, r, padding, out, lse, scale, causal):
    grad_u = q.new_empty(0) if u is None else torch.empty_like(_rows_contiguous(u))
    grads = (torch.empty_like(_rows_contiguous(x)) for x in (q, k, v))
    grad_q, grad_k, grad_v = grads
    return grad_q, grad_u, grad_k, grad_v, r.new_empty(r.shape)


def _setup_context(ctx, inputs, output) -> None:
    q, u, k, v, r, padding, ctx.scale, ctx.causal = inputs
    ctx.save_for_backward(q, u, k, v, r, padding, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_out, _grad_lse):
    saved = ctx.saved_tensors  # checkpointing lets them be read once
    grad_q, grad_u, *grads = relative_attention_backward(grad_out, *saved, ctx.scale, ctx.causal)
    has_bias = saved[1] is not None
    return grad_q, grad_u if has_bias else None, *grads, None, None, None


relative_attention.register_autograd(_backward, setup_context=_setup_context)


def _rows_contiguous(x: Tensor) -> Tensor:
    """Rows of neighbouring numbers, all of a head's within the reach of 32-bit offsets."""
    return x if x.stride(-1) == 1 and x.shape[-2] * x.stride(-2) < 2**31 else x.contiguous()


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for x in tensors for stride in x.stride()[:3])


def _bytes(padding: Tensor | None, unused: Tensor) -> Tensor:
    return unused if padding is None else padding.contiguous().view(torch.int8)


def _meta(q: Tensor, u: Tensor, k: Tensor, padding: Tensor | None, causal: bool, launch: Launch) -> dict[str, object]:
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "CAUSAL": causal,
        "HAS_PAD": padding is not None,
        "HAS_BIAS": u is not q,
        "PRECISION": "tf32x3" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "M": launch.tile,
        "WIDTH": q.shape[3],
        "D": max(16, triton.next_power_of_2(q.shape[3])),
    }


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

"""Skewing inside a tile: from scores of (query, distance) to scores of (query, key), and back.

A tile has M = 2B queries (rows i) and M keys (columns j). Its position scores lie on a window of 2M - 1 rows of r:
entry (i, j) is at window column c = j - i + M - 1. The window is held as four blocks of B columns, p0 .. p3. Row i
needs, for B consecutive keys, B consecutive columns. They straddle two neighbouring blocks: the last columns of the
left one and the first of the right one, and both lie at `(j - i - 1) mod B` of their block. So the two blocks are
merged by a select, and the merged block is rotated within each row: no entry is computed or moved twice.

Rows i >= B read (p0, p1) for the first B keys and (p1, p2) for the others; rows i < B read one block further right.

A rotation costs one gather that stays inside a warp. Both halves of the keys need the same one, so they share it: the
keys (and the rows of r) of a tile are taken in the order 0, B, 1, B + 1, ..., which makes the two halves neighbours in
a row, and two neighbours are read as one word of twice the width.
"""

import triton
import triton.language as tl


@triton.jit
def interleaved(M: tl.constexpr):
    """0, M/2, 1, M/2 + 1, ...: the order of keys and distances in a tile."""
    n = tl.arange(0, M)
    return (n & 1) * (M // 2) + (n >> 1)


@triton.jit
def pack(x, M: tl.constexpr):
    """[M, M] numbers -> [M, M/2] words of two neighbours, the first in the low half."""
    WORD: tl.constexpr = tl.uint32 if x.dtype.primitive_bitwidth == 16 else tl.uint64
    HALF: tl.constexpr = tl.uint16 if x.dtype.primitive_bitwidth == 16 else tl.uint32
    low, high = tl.split(tl.reshape(x.to(HALF, bitcast=True), (M, M // 2, 2)))
    return low.to(WORD) | (high.to(WORD) << HALF.primitive_bitwidth)


@triton.jit
def unpack(words, dtype: tl.constexpr, M: tl.constexpr):
    """Inverse of `pack`."""
    HALF: tl.constexpr = tl.uint16 if dtype.primitive_bitwidth == 16 else tl.uint32
    low = words.to(HALF).to(dtype, bitcast=True)
    high = (words >> HALF.primitive_bitwidth).to(HALF).to(dtype, bitcast=True)
    return tl.reshape(tl.join(low, high), (M, M))


@triton.jit
def rotate(words, SIGN: tl.constexpr, M: tl.constexpr):
    """`out[i, c] = words[i, (c + SIGN * (i + 1)) mod M/2]`."""
    source = tl.arange(0, M // 2)[None, :] + SIGN * (tl.arange(0, M) + 1)[:, None]
    return tl.gather(words, source & (M // 2 - 1), 1)


@triton.jit
def first_block(M: tl.constexpr):
    """Which of p0 .. p3 a merged entry's first half comes from (0, 1 or 2): [M, M/2]."""
    B: tl.constexpr = M // 2
    i = tl.arange(0, M)[:, None]
    c = tl.arange(0, B)[None, :]
    return (i < B).to(tl.int32) + (c < B - 1 - (i & (B - 1))).to(tl.int32)


@triton.jit
def skew(p01, p23, dtype: tl.constexpr, M: tl.constexpr):
    """Packed position scores of a window's two halves, [M, M/2] each -> those of the tile's keys, [M, M]."""
    BITS: tl.constexpr = dtype.primitive_bitwidth
    block = first_block(M)
    p12 = (p01 >> BITS) | (p23 << BITS)
    merged = tl.where(block == 0, p01, tl.where(block == 1, p12, p23))
    return unpack(rotate(merged, -1, M), dtype, M)


@triton.jit
def unskew(x, carry, M: tl.constexpr):
    """Transpose of `skew`, for gradients: [M, M] by keys -> packed, by distance, [M, M/2] for each half of the window.

    `carry` is what the previous tile left for the first half. Every entry belongs to one tile, so "or" adds them up.
    """
    BITS: tl.constexpr = x.dtype.primitive_bitwidth
    block = first_block(M)
    words = rotate(pack(x, M), 1, M)
    zero = tl.zeros_like(words)
    p01 = carry | tl.where(block == 0, words, tl.where(block == 1, words << BITS, zero))
    p23 = tl.where(block == 2, words, tl.where(block == 1, words >> BITS, zero))
    return p01, p23


@triton.jit
def load_rows(ptr, first, order, n_rows, stride, WIDTH: tl.constexpr, D: tl.constexpr):
    """Rows `first + order` of a matrix of n_rows rows of WIDTH <= D numbers, zeros behind: [len(order), D].

    A row outside is read as the nearest one inside: masks would take registers, and the callers give no weight to it.
    """
    column = tl.arange(0, D)[None, :]
    row = tl.minimum(tl.maximum(first + order, 0), n_rows - 1)
    pointers = ptr + row[:, None] * stride + column
    if WIDTH < D:
        return tl.load(pointers, mask=column < WIDTH, other=0.0)
    return tl.load(pointers)


@triton.jit
def store_rows(ptr, x, first, order, n_rows, stride, WIDTH: tl.constexpr, D: tl.constexpr):
    """Inverse of `load_rows`; writes nothing outside."""
    column = tl.arange(0, D)[None, :]
    inside = ((first + order >= 0) & (first + order < n_rows))[:, None]
    if WIDTH < D:
        inside = inside & (column < WIDTH)
    pointers = ptr + tl.cast(first, tl.int64) * stride + order[:, None] * stride + column
    tl.store(pointers, x.to(ptr.dtype.element_ty), mask=inside)

"""Backward kernels, for the gradients of queries, of positions, and of keys and values.

The first and the last recompute the scores. The first writes the gradients of the position scores, by distance, for
the second, some sequences or tiles at a time. Nothing is added atomically, so results repeat bit for bit.
"""

import triton
import triton.language as tl

from switchhead.ops.triton_attention.forward import LENGTHS, last_visible, locate, visible
from switchhead.ops.triton_attention.skew import (
    interleaved,
    load_rows,
    pack,
    skew,
    store_rows,
    unpack,
    unskew,
)

CHUNK = [*LENGTHS, "n_blocks", "first_sequence", "first_tile", "n_tiles"]


@triton.jit(do_not_specialize=CHUNK)
def query_gradient_kernel(
    q_ptr, u_ptr,  # [B, H, T, d]
    k_ptr, v_ptr,  # [B, Hk, S, d]
    r_ptr,  # [H, P, d]
    pad_ptr,  # [B, S] int8, or unused
    out_ptr, grad_out_ptr,  # [B, H, T, d]
    lse_ptr,  # [B, H, T] float32
    delta_ptr,  # [B, H, T] float32, written: sum of out * grad_out over the width, for the other kernel
    grad_q_ptr, grad_u_ptr,  # [B, H, T, d], written; without biases grad_q has both parts
    grad_p_ptr,  # [sequences * H, tiles, blocks, M, M/2] words, written: gradients of the position scores
    scale,  # times log2(e)
    grad_scale,  # without
    stride_qb, stride_qh, stride_qt: tl.constexpr,
    stride_ub, stride_uh, stride_ut: tl.constexpr,
    stride_kb, stride_kh, stride_kt: tl.constexpr,
    stride_vb, stride_vh, stride_vt: tl.constexpr,
    stride_rh, stride_rp: tl.constexpr,
    stride_ob, stride_oh, stride_ot: tl.constexpr,
    stride_gb, stride_gh, stride_gt: tl.constexpr,
    stride_dqb, stride_dqh, stride_dqt: tl.constexpr,
    stride_dub, stride_duh, stride_dut: tl.constexpr,
    n_heads, n_queries, n_keys, n_positions, n_blocks, first_sequence, first_tile, n_tiles,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_PAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Gradients of queries and of their position scores; a program takes one tile of queries."""
    natural = tl.arange(0, M)
    order = interleaved(M)
    place, sequence, h = locate(n_tiles, n_heads)
    tile = n_tiles - 1 - place  # long rows first
    i0 = (first_tile + tile) * M
    b = first_sequence + sequence
    k_ptr += b * stride_kb + (h // GROUP) * stride_kh
    v_ptr += b * stride_vb + (h // GROUP) * stride_vh
    r_ptr += h * stride_rh
    pad_ptr += b * n_keys

    q = load_rows(q_ptr + b * stride_qb + h * stride_qh, i0, natural, n_queries, stride_qt, WIDTH, D)
    u = q
    if HAS_BIAS:
        u = load_rows(u_ptr + b * stride_ub + h * stride_uh, i0, natural, n_queries, stride_ut, WIDTH, D)
    out = load_rows(out_ptr + b * stride_ob + h * stride_oh, i0, natural, n_queries, stride_ot, WIDTH, D)
    grad_out = load_rows(grad_out_ptr + b * stride_gb + h * stride_gh, i0, natural, n_queries, stride_gt, WIDTH, D)
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)
    i = i0 + natural
    row = (b * n_heads + h) * n_queries + i
    tl.store(delta_ptr + row, delta, mask=i < n_queries)
    lse = tl.load(lse_ptr + row, mask=i < n_queries, other=float("inf"))  # rows behind the last get no weight

    last = last_visible(i, n_queries, n_keys, CAUSAL)
    end = (n_keys - n_queries + i0 + M) if CAUSAL else n_keys  # the last tile's may lie behind the last key
    full = 0 if HAS_PAD else (tl.minimum(n_keys, n_keys - n_queries + i0 + 1) if CAUSAL else n_keys) // M * M
    first_position = n_queries - M - i0
    own = (sequence * n_heads + h) * n_tiles + tile
    words = grad_p_ptr + own * n_blocks * (M * M // 2) + natural[:, None] * (M // 2) + tl.arange(0, M // 2)[None, :]

    r = load_rows(r_ptr, first_position, order, n_positions, stride_rp, WIDTH, D)
    p01 = pack(tl.dot(u, tl.trans(r), input_precision=PRECISION).to(q.dtype), M)
    carry = tl.zeros_like(p01)
    grad_q = tl.zeros((M, D), tl.float32)
    grad_u = tl.zeros((M, D), tl.float32)
    for MASKED in tl.static_range(2):
        for j0 in range(full if MASKED else 0, end if MASKED else full, M):
            position = first_position + j0
            r = load_rows(r_ptr, position + M, order, n_positions, stride_rp, WIDTH, D)
            k = load_rows(k_ptr, j0, order, n_keys, stride_kt, WIDTH, D)
            v = load_rows(v_ptr, j0, order, n_keys, stride_vt, WIDTH, D)
            p23 = pack(tl.dot(u, tl.trans(r), input_precision=PRECISION).to(q.dtype), M)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) + skew(p01, p23, q.dtype, M)
            p01 = p23
            weights = tl.exp2(scores * scale - lse[:, None])
            if MASKED:
                weights = tl.where(visible(j0 + order, last, pad_ptr, n_keys, HAS_PAD), weights, 0.0)
            grad_weights = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION)
            grad_scores = (weights * (grad_weights - delta[:, None])).to(q.dtype)
            grad_q = tl.dot(grad_scores, k, grad_q, input_precision=PRECISION)

            complete, carry = unskew(grad_scores, carry, M)
            tl.store(words, complete)
            words += M * M // 2
            r = load_rows(r_ptr, position, order, n_positions, stride_rp, WIDTH, D)
            if HAS_BIAS:
                grad_u = tl.dot(unpack(complete, q.dtype, M), r, grad_u, input_precision=PRECISION)
            else:
                grad_q = tl.dot(unpack(complete, q.dtype, M), r, grad_q, input_precision=PRECISION)

    # The window's last M distances.
    tl.store(words, carry)
    r = load_rows(r_ptr, first_position + tl.cdiv(end, M) * M, order, n_positions, stride_rp, WIDTH, D)
    if HAS_BIAS:
        grad_u = tl.dot(unpack(carry, q.dtype, M), r, grad_u, input_precision=PRECISION)
        grad_u_row = grad_u_ptr + b * stride_dub + h * stride_duh
        store_rows(grad_u_row, grad_u * grad_scale, i0, natural, n_queries, stride_dut, WIDTH, D)
    else:
        grad_q = tl.dot(unpack(carry, q.dtype, M), r, grad_q, input_precision=PRECISION)
    grad_q_row = grad_q_ptr + b * stride_dqb + h * stride_dqh
    store_rows(grad_q_row, grad_q * grad_scale, i0, natural, n_queries, stride_dqt, WIDTH, D)


@triton.jit(do_not_specialize=[*CHUNK, "n_sequences", "n_windows", "n_splits"])
def position_gradient_kernel(
    u_ptr,  # [B, H, T, d]
    grad_p_ptr,  # [sequences * H, tiles, blocks, M, M]: what query_gradient_kernel wrote, two numbers a word
    grad_r_ptr,  # [splits, H, P, d] float32: added to
    stride_ub, stride_uh, stride_ut: tl.constexpr,
    n_heads, n_queries, n_keys, n_positions, n_blocks, first_sequence, n_sequences, first_tile, n_tiles,
    n_windows, n_splits,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Gradient of the positions; a program takes M distances of one head, and every `n_splits`-th sequence.

    The windows of all tiles of queries begin a multiple of M apart, the last tile's at block 0.
    """
    natural = tl.arange(0, M)
    block = tl.program_id(0) % n_windows
    h = (tl.program_id(0) // n_windows % n_heads).to(tl.int64)
    split = tl.program_id(0) // n_windows // n_heads
    last_tile = tl.cdiv(n_queries, M) - 1
    begin = tl.maximum(first_tile, last_tile - block)
    end = first_tile + n_tiles
    if not CAUSAL:  # windows of causal tiles all end together
        end = tl.minimum(end, last_tile - block + tl.cdiv(n_keys, M) + 1)
    if begin >= end or split >= n_sequences:  # nothing to add
        return

    u_ptr += h * stride_uh
    entries = grad_p_ptr + natural[:, None] * M + natural[None, :]
    grad_r = tl.zeros((M, D), tl.float32)
    for sequence in range(split, n_sequences, n_splits):
        u_row = u_ptr + (first_sequence + sequence).to(tl.int64) * stride_ub
        first = (sequence * n_heads + h) * n_tiles - first_tile
        for tile in range(begin, end):
            u = load_rows(u_row, tile * M, natural, n_queries, stride_ut, WIDTH, D)
            grad_p = tl.load(entries + ((first + tile) * n_blocks + block - (last_tile - tile)) * (M * M))
            grad_r = tl.dot(tl.trans(grad_p), u, grad_r, input_precision=PRECISION)

    grad_r_ptr += (split * n_heads + h) * n_positions * WIDTH
    first_position = block * M + n_queries - (last_tile + 1) * M
    order = interleaved(M)
    grad_r += load_rows(grad_r_ptr, first_position, order, n_positions, WIDTH, WIDTH, D)
    store_rows(grad_r_ptr, grad_r, first_position, order, n_positions, WIDTH, WIDTH, D)


@triton.jit(do_not_specialize=LENGTHS)
def key_gradient_kernel(
    q_ptr, u_ptr,  # [B, H, T, d]
    k_ptr, v_ptr,  # [B, Hk, S, d]
    r_ptr,  # [H, P, d]
    pad_ptr,  # [B, S] int8, or unused
    grad_out_ptr,  # [B, H, T, d]
    lse_ptr, delta_ptr,  # [B, H, T] float32
    grad_k_ptr, grad_v_ptr,  # [B, Hk, S, d], written
    scale,  # times log2(e)
    grad_scale,  # without
    stride_qb, stride_qh, stride_qt: tl.constexpr,
    stride_ub, stride_uh, stride_ut: tl.constexpr,
    stride_kb, stride_kh, stride_kt: tl.constexpr,
    stride_vb, stride_vh, stride_vt: tl.constexpr,
    stride_rh, stride_rp: tl.constexpr,
    stride_gb, stride_gh, stride_gt: tl.constexpr,
    stride_dkb, stride_dkh, stride_dkt: tl.constexpr,
    stride_dvb, stride_dvh, stride_dvt: tl.constexpr,
    n_heads, n_queries, n_keys, n_positions,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_PAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values; one program per tile of keys, one pass over the queries."""
    natural = tl.arange(0, M)
    order = interleaved(M)
    tile, b, key_head = locate(tl.cdiv(n_keys, M), n_heads // GROUP)
    j0 = tile * M
    pad_ptr += b * n_keys
    k = load_rows(k_ptr + b * stride_kb + key_head * stride_kh, j0, order, n_keys, stride_kt, WIDTH, D)
    v = load_rows(v_ptr + b * stride_vb + key_head * stride_vh, j0, order, n_keys, stride_vt, WIDTH, D)
    # The first tile with a query that sees one of these keys, and the first whose queries see them all. Keys beyond
    # the last need no mask: what they get is not stored.
    begin = tl.maximum(j0 - (n_keys - n_queries), 0) // M * M if CAUSAL else 0
    full = begin
    if HAS_PAD:
        full = tl.cdiv(n_queries, M) * M
    elif CAUSAL:
        full = tl.cdiv(tl.maximum(j0 + M - 1 - (n_keys - n_queries), 0), M) * M

    grad_k = tl.zeros((M, D), tl.float32)
    grad_v = tl.zeros((M, D), tl.float32)
    for member in range(GROUP):
        h = key_head * GROUP + member
        q_row = q_ptr + b * stride_qb + h * stride_qh
        u_row = u_ptr + b * stride_ub + h * stride_uh
        grad_out_row = grad_out_ptr + b * stride_gb + h * stride_gh
        r_row = r_ptr + h * stride_rh
        statistics = (b * n_heads + h) * n_queries
        for MASKED in tl.static_range(2):
            for i0 in range(begin if MASKED else full, full if MASKED else n_queries, M):
                q = load_rows(q_row, i0, natural, n_queries, stride_qt, WIDTH, D)
                grad_out = load_rows(grad_out_row, i0, natural, n_queries, stride_gt, WIDTH, D)
                u = q
                if HAS_BIAS:
                    u = load_rows(u_row, i0, natural, n_queries, stride_ut, WIDTH, D)
                position = n_queries - M - i0 + j0
                r = load_rows(r_row, position, order, n_positions, stride_rp, WIDTH, D)
                p01 = pack(tl.dot(u, tl.trans(r), input_precision=PRECISION).to(q.dtype), M)
                r = load_rows(r_row, position + M, order, n_positions, stride_rp, WIDTH, D)
                p23 = pack(tl.dot(u, tl.trans(r), input_precision=PRECISION).to(q.dtype), M)
                scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) + skew(p01, p23, q.dtype, M)

                i = i0 + natural
                lse = tl.load(lse_ptr + statistics + i, mask=i < n_queries, other=float("inf"))
                delta = tl.load(delta_ptr + statistics + i, mask=i < n_queries, other=0.0)
                weights = tl.exp2(scores * scale - lse[:, None])
                if MASKED:
                    last = last_visible(i, n_queries, n_keys, CAUSAL)
                    weights = tl.where(visible(j0 + order, last, pad_ptr, n_keys, HAS_PAD), weights, 0.0)
                grad_v = tl.dot(tl.trans(weights.to(q.dtype)), grad_out, grad_v, input_precision=PRECISION)
                grad_weights = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION)
                grad_scores = (weights * (grad_weights - delta[:, None])).to(q.dtype)
                grad_k = tl.dot(tl.trans(grad_scores), q, grad_k, input_precision=PRECISION)

    grad_k_row = grad_k_ptr + b * stride_dkb + key_head * stride_dkh
    store_rows(grad_k_row, grad_k * grad_scale, j0, order, n_keys, stride_dkt, WIDTH, D)
    grad_v_row = grad_v_ptr + b * stride_dvb + key_head * stride_dvh
    store_rows(grad_v_row, grad_v, j0, order, n_keys, stride_dvt, WIDTH, D)

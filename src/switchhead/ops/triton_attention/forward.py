"""Forward kernel: one program per tile of queries, one pass over the keys with the online softmax."""

import triton
import triton.language as tl

from switchhead.ops.triton_attention.skew import interleaved, load_rows, pack, skew, store_rows


@triton.jit
def locate(n_tiles, n_heads):
    """This program's tile, sequence and head, numbered in one grid dimension: the others end at 65,535."""
    head = tl.program_id(0) // n_tiles
    return tl.program_id(0) % n_tiles, (head // n_heads).to(tl.int64), (head % n_heads).to(tl.int64)


@triton.jit
def last_visible(i, n_queries, n_keys, CAUSAL: tl.constexpr):
    """The last key that query i may see; queries are aligned to the last keys."""
    if CAUSAL:
        return n_keys - n_queries + i
    return tl.zeros_like(i) + (n_keys - 1)


@triton.jit
def visible(j, last, pad_ptr, n_keys, HAS_PAD: tl.constexpr):
    """Which of the keys j a query may see: those up to its `last` one that are not padding: [queries, keys]."""
    allowed = j[None, :] <= last[:, None]
    if HAS_PAD:
        is_padding = tl.load(pad_ptr + j, mask=j < n_keys, other=1)
        allowed = allowed & (is_padding == 0)[None, :]
    return allowed


# One compilation serves all lengths.
LENGTHS = ["n_queries", "n_keys", "n_positions"]


@triton.jit(do_not_specialize=LENGTHS)
def forward_kernel(
    q_ptr,  # [B, H, T, d]
    u_ptr,  # [B, H, T, d]: queries of the position scores (q itself where there are no biases)
    k_ptr,  # [B, Hk, S, d]
    v_ptr,  # [B, Hk, S, d]
    r_ptr,  # [H, P, d]
    pad_ptr,  # [B, S] int8, or unused
    out_ptr,  # [B, H, T, d]
    lse_ptr,  # [B, H, T] float32: log2 of the sum of exp2 of the scaled scores; inf where no key is visible
    scale,  # of the scores, times log2(e)
    stride_qb, stride_qh, stride_qt: tl.constexpr,
    stride_ub, stride_uh, stride_ut: tl.constexpr,
    stride_kb, stride_kh, stride_kt: tl.constexpr,
    stride_vb, stride_vh, stride_vt: tl.constexpr,
    stride_rh, stride_rp: tl.constexpr,
    stride_ob, stride_oh, stride_ot: tl.constexpr,
    n_heads, n_queries, n_keys, n_positions,
    GROUP: tl.constexpr,  # query heads per key head
    CAUSAL: tl.constexpr,
    HAS_PAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Weighted averages of the values; one program per tile of queries."""
    n_tiles = tl.cdiv(n_queries, M)
    place, b, h = locate(n_tiles, n_heads)
    i0 = (n_tiles - 1 - place) * M  # long rows first
    k_ptr += b * stride_kb + (h // GROUP) * stride_kh
    v_ptr += b * stride_vb + (h // GROUP) * stride_vh
    r_ptr += h * stride_rh
    pad_ptr += b * n_keys

    natural = tl.arange(0, M)
    order = interleaved(M)
    q = load_rows(q_ptr + b * stride_qb + h * stride_qh, i0, natural, n_queries, stride_qt, WIDTH, D)
    u = q
    if HAS_BIAS:
        u = load_rows(u_ptr + b * stride_ub + h * stride_uh, i0, natural, n_queries, stride_ut, WIDTH, D)

    # The last key that a query may see, and the row of r that meets the tile's last query and the first key.
    i = i0 + natural
    last = last_visible(i, n_queries, n_keys, CAUSAL)
    end = tl.minimum(n_keys, n_keys - n_queries + i0 + M) if CAUSAL else n_keys
    first_position = n_queries - M - i0

    r = load_rows(r_ptr, first_position, order, n_positions, stride_rp, WIDTH, D)
    p01 = pack(tl.dot(u, tl.trans(r), input_precision=PRECISION).to(q.dtype), M)

    maximum = tl.full((M,), -1e30, tl.float32)  # finite: an empty row so far gives exp2(-inf - maximum) = 0
    total = tl.zeros((M,), tl.float32)
    out = tl.zeros((M, D), tl.float32)
    for j0 in range(0, end, M):
        r = load_rows(r_ptr, first_position + j0 + M, order, n_positions, stride_rp, WIDTH, D)
        k = load_rows(k_ptr, j0, order, n_keys, stride_kt, WIDTH, D)
        p23 = pack(tl.dot(u, tl.trans(r), input_precision=PRECISION).to(q.dtype), M)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) + skew(p01, p23, q.dtype, M)
        p01 = p23
        scores = tl.where(visible(j0 + order, last, pad_ptr, n_keys, HAS_PAD), scores, float("-inf"))

        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_maximum[:, None])
        shrink = tl.exp2(maximum - new_maximum)
        total = total * shrink + tl.sum(weights, 1)
        maximum = new_maximum
        v = load_rows(v_ptr, j0, order, n_keys, stride_vt, WIDTH, D)
        out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None], input_precision=PRECISION)

    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    out = out / total[:, None]
    store_rows(out_ptr + b * stride_ob + h * stride_oh, out, i0, natural, n_queries, stride_ot, WIDTH, D)
    lse = tl.where(is_empty, float("inf"), maximum + tl.log2(total))
    tl.store(lse_ptr + (b * n_heads + h) * n_queries + i, lse, mask=i < n_queries)

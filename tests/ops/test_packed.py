import pytest
import torch
from torch.nn import functional as F

from switchhead.ops.packed import document_boundaries, packed_attention

LENGTHS = [[5, 1, 7, 4], [17]]  # of the documents in each row


def positions(lengths=LENGTHS):
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


def tensors(heads=4, key_heads=4, width=16, dtype=torch.float64, device="cpu", length=17):
    shapes = ((2, heads, length, width), (2, key_heads, length, width), (2, key_heads, length, width))
    return [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]


def one_by_one(q, k, v, scale, lengths=LENGTHS):
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    rows = []
    for b, row in enumerate(lengths):
        parts = [
            F.scaled_dot_product_attention(*documents, is_causal=True, scale=scale)
            for documents in zip(*(x[b].split(row, dim=-2) for x in (q, k, v)), strict=True)
        ]
        rows.append(torch.cat(parts, dim=-2))
    return torch.stack(rows)


def relative_error(x, y):
    return ((x.double() - y.double()).norm() / y.double().norm()).item()


def test_boundaries_are_where_positions_restart():
    assert document_boundaries(positions()).tolist() == [0, 5, 6, 13, 17, 34]


def test_a_row_that_continues_a_cut_document_begins_one():
    assert document_boundaries(torch.tensor([[3, 4, 0, 1], [7, 8, 9, 10]])).tolist() == [0, 2, 4, 8]


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_packed_documents_match_each_document_alone(key_heads):
    q, k, v = tensors(key_heads=key_heads)
    packed = packed_attention(q, k, v, cu_seqlens=document_boundaries(positions()), scale=0.3)
    alone = one_by_one(q, k, v, 0.3)
    torch.testing.assert_close(packed, alone)
    grad = torch.randn_like(alone)
    for got, expected in zip(
        torch.autograd.grad(packed, (q, k, v), grad), torch.autograd.grad(alone, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(got, expected)


def test_a_document_does_not_change_when_its_neighbours_do():
    q, k, v = (x.detach() for x in tensors())
    cu_seqlens = document_boundaries(positions())
    before = packed_attention(q, k, v, cu_seqlens=cu_seqlens, scale=0.3)
    others = [x.clone() for x in (q, k, v)]
    for x in others:
        x[0, :, :5] += 1
        x[0, :, 13:] += 1
    after = packed_attention(*others, cu_seqlens=cu_seqlens, scale=0.3)
    assert torch.equal(before[0, :, 5:13], after[0, :, 5:13])


def test_compiles_whole():
    q, k, v = (x.detach() for x in tensors(dtype=torch.float32))
    compiled = torch.compile(packed_attention, fullgraph=True, backend="aot_eager")  # needs no C++ compiler
    cu_seqlens = document_boundaries(positions())
    torch.testing.assert_close(
        compiled(q, k, v, cu_seqlens=cu_seqlens, scale=0.3), packed_attention(q, k, v, cu_seqlens=cu_seqlens, scale=0.3)
    )


def test_bad_input_is_refused():
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"\[batch, T\]; got \(17,\)"):
        document_boundaries(torch.arange(17))
    cu_seqlens = document_boundaries(positions())
    with pytest.raises(ValueError, match="int32"):
        packed_attention(q, k, v, cu_seqlens=cu_seqlens.long(), scale=1.0)
    with pytest.raises(ValueError, match="multiple of Hk"):
        packed_attention(q, k[:, :3], v[:, :3], cu_seqlens=cu_seqlens, scale=1.0)
    with pytest.raises(ValueError, match="CUDA device"):
        packed_attention(q, k, v, cu_seqlens=cu_seqlens, scale=1.0, backend="varlen")
    with pytest.raises(ValueError, match="unknown"):
        packed_attention(q, k, v, cu_seqlens=cu_seqlens, scale=1.0, backend="dense")


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 41, 112, 132])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_varlen_is_as_accurate_as_documents_alone(width, key_heads, dtype):
    lengths = [[500, 1, 23, 500], [1024]]
    q, k, v = tensors(key_heads=key_heads, width=width, dtype=dtype, device="cuda", length=1024)
    cu_seqlens = document_boundaries(positions(lengths)).cuda()
    torch.compiler.reset()  # every scale is compiled for itself, and only so many are
    run = torch.compile(packed_attention, fullgraph=True)
    packed = run(q, k, v, cu_seqlens=cu_seqlens, scale=width**-0.5, backend="varlen")
    alone = one_by_one(q, k, v, width**-0.5, lengths)
    exact_inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = one_by_one(*exact_inputs, width**-0.5, lengths)
    grad = torch.randn_like(alone)
    got = (packed, *torch.autograd.grad(packed, (q, k, v), grad))
    plain = (alone, *torch.autograd.grad(alone, (q, k, v), grad))
    expected = (exact, *torch.autograd.grad(exact, exact_inputs, grad.double()))
    for name, x, y, z in zip(("out", "q", "k", "v"), got, plain, expected, strict=True):
        assert relative_error(x, z) <= 2 * relative_error(y, z), name

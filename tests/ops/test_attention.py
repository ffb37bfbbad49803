"""Masks that are shared by layers; what masks mean is tested with the layers."""

import pytest
import torch

from switchhead.ops.attention import attend, share_mask


def operands(dtype):
    q, k, v = (torch.randn(2, 3, length, 8, dtype=dtype) for length in (5, 7, 7))
    return dict(q=q, k=k, v=v, scale=0.3, causal=False)


def boolean_mask(batch, heads):
    mask = torch.rand(batch, heads, 5, 7) < 0.4
    mask[0, 0, 2] = True  # a query that sees nothing
    return mask


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_shared_mask_gives_what_the_mask_itself_gives(dtype, sizes):
    inputs, ignored = operands(dtype), boolean_mask(*sizes)
    added = torch.randn(ignored.shape).masked_fill(ignored, torch.finfo(torch.float32).min)
    for mask in (ignored, added, added.masked_fill(ignored, -torch.inf)):
        expected = attend(**inputs, attn_mask=mask)
        assert torch.equal(attend(**inputs, attn_mask=share_mask(mask, dtype)), expected)
    assert not expected[0, 0, 2].any()
    assert expected[0, 0, 1].all()


def test_who_is_never_blind_is_not_looked_at():
    ignored = boolean_mask(1, 1)
    ignored[..., 0] = False
    inputs, shared = operands(torch.float64), share_mask(ignored, torch.float64, may_be_blind=False)
    assert shared.blind is None
    assert torch.equal(attend(**inputs, attn_mask=shared), attend(**inputs, attn_mask=ignored))


def test_a_shared_mask_is_all_that_masks():
    inputs, shared = operands(torch.float64), share_mask(boolean_mask(1, 1), torch.float64)
    for other in (dict(causal=True), dict(key_padding_mask=torch.zeros(2, 7, dtype=torch.bool))):
        with pytest.raises(ValueError, match="SharedMask does not go with causal, key_padding_mask or bias"):
            attend(**inputs | other, attn_mask=shared)


def test_a_shared_mask_of_another_size_is_refused():
    shared = share_mask(boolean_mask(1, 1)[..., 1:], torch.float64)
    with pytest.raises(ValueError, match=r"\[2, 3 or 1, 5, 7\]; got torch.float64 \(1, 1, 5, 6\)"):
        attend(**operands(torch.float64), attn_mask=shared)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_a_mask_of_numbers_that_are_not_added_is_refused(dtype):
    with pytest.raises(ValueError, match=rf"must be boolean .* or floating point .*; got {dtype} \(1, 1, 5, 7\)"):
        share_mask(boolean_mask(1, 1).to(dtype), torch.float32)

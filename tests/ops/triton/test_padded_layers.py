"""Layers whose heads are padded for a GPU's kernels compute what they compute on a CPU."""

import contextlib
import copy

import pytest
import torch

from switchhead import SwitchHeadAttention
from switchhead.ops import document_boundaries
from switchhead.ops.availability import as_on_a_gpu
from tests.helpers import gradients, relative_error


class Rows:
    """A cache that keeps what it is given."""

    def __init__(self):
        self.kept = None

    def update(self, *new):
        self.kept = new if self.kept is None else [torch.cat(pair, dim=2) for pair in zip(self.kept, new, strict=True)]
        return self.kept


def layers(d_head, device):
    """The same layer for the reference and for kernels."""
    sizes = dict(d_model=24, n_heads=2, d_head=d_head, n_experts=4, k=2, positions="rotary")
    plain = SwitchHeadAttention(**sizes, backend="reference").to(device)
    fused = copy.deepcopy(plain)
    fused.v_proj.backend = fused.o_proj.backend = "triton"
    return plain, fused


def kernels(device):
    return as_on_a_gpu() if device == "cpu" else contextlib.nullcontext()


every_width = pytest.mark.parametrize("d_head", [7, 24, 41])


@every_width
@pytest.mark.parametrize("packed", [False, True])
def test_outputs_and_gradients(packed, d_head, device, poisoned_allocations):
    plain, fused = layers(d_head, device)
    x = torch.randn(2, 10, 24, device=device, requires_grad=True)
    positions = torch.tensor([[*range(6), *range(4)], [*range(10)]], device=device)
    options = dict(position_ids=positions, cu_seqlens=document_boundaries(positions)) if packed else {}
    expected = plain(x, **options)
    with kernels(device):
        found = fused(x, **options)
        of_found = gradients(found, x, *fused.parameters())
    assert relative_error(found, expected) < 1e-5
    for a, b in zip(of_found, gradients(expected, x, *plain.parameters()), strict=True):
        assert relative_error(a, b) < 1e-5


@every_width
@torch.no_grad()
def test_a_cache_keeps_heads_without_their_padding(d_head, device):
    plain, fused = layers(d_head, device)
    x, cache = torch.randn(2, 20, 24, device=device), Rows()
    positions = torch.arange(20, device=device)
    with kernels(device):
        pieces = [
            fused(x[:, part], position_ids=positions[part], cache=cache)
            for part in (slice(0, 18), slice(18, 19), slice(19, 20))
        ]
    assert all(rows.shape == (2, 2, 20, d_head) for rows in cache.kept)
    assert relative_error(torch.cat(pieces, dim=1), plain(x)) < 1e-5

import math

import pytest
import torch
from torch import nn

from switchhead.nn import Router, SwitchHeadAttention
from switchhead.routing import Routing
from switchhead.train.distributed import ALONE
from switchhead.train.usage import measure_usage


class Chooses(nn.Module):
    """A model whose one router decides as it is told."""

    def __init__(self, gates, experts, n_experts):
        super().__init__()
        self.router = Router(d_model=4, n_heads=1, n_experts=n_experts, k=1)
        self.routing = Routing(torch.tensor(gates), torch.tensor(experts), n_experts)

    def forward(self):
        self.router(torch.zeros(1, 4), self.routing)


def test_usage_is_what_one_counts_by_hand():
    # Two tokens, two heads, k = 2 of 4 experts; one gate is closed.
    gates = [[[0.5, 0.25], [0.5, 0.5]], [[0.75, 0.0], [0.5, 0.5]]]
    experts = [[[0, 1], [2, 3]], [[0, 1], [2, 3]]]
    model = Chooses(gates, experts, 4)
    (usage,) = measure_usage(model, [(model, True)], ALONE).values()
    first = [2 / 3, 1 / 3, 0, 0]
    assert usage.share[0] == pytest.approx(first)
    assert usage.share[1] == pytest.approx([0, 0, 0.5, 0.5])
    of_heads = [-sum(p * math.log(p) for p in first if p), math.log(2)]
    assert usage.entropy == pytest.approx(sum(of_heads) / 2 / math.log(4))
    assert usage.dead_experts == 4
    assert usage.mean_gate == pytest.approx(3.5 / 7)
    assert usage.average_k == pytest.approx(7 / 4)


def test_passes_add_up_and_those_that_do_not_count_do_not():
    model = Chooses([[[1.0]], [[1.0]]], [[[0]], [[0]]], 2)

    def second():
        model.router(torch.zeros(1, 4), Routing(torch.tensor([[[0.5]]]), torch.tensor([[[1]]]), 2))

    both = measure_usage(model, [(model, True), (second, True)], ALONE)["router"]
    assert both.share == [pytest.approx([2 / 3, 1 / 3])]
    first = measure_usage(model, [(model, True), (second, False)], ALONE)["router"]
    assert first.share == [[1.0, 0.0]]
    assert first.average_k == 1.0


def test_every_side_of_every_layer_has_its_name():
    layer = SwitchHeadAttention(d_model=8, n_heads=2, n_experts=3, d_head=4, k=2)
    usage = measure_usage(layer, [(lambda: layer(torch.randn(2, 5, 8)), True)], ALONE)
    assert usage.keys() == {"source_router", "destination_router"}
    for value in usage.values():
        assert value.average_k == 2
        assert [sum(head) for head in value.share] == pytest.approx([1, 1])
        assert 0 < value.mean_gate < 1

import torch

from switchhead.routing import Routing


def test_every_slot_as_a_head_keeps_gates_and_experts_in_order():
    gates = torch.rand(5, 2, 3)
    indices = torch.stack([torch.randperm(4)[:3] for _ in range(10)]).view(5, 2, 3)
    slots = Routing(gates, indices, 4).per_slot()
    assert (slots.n_heads, slots.k, slots.n_experts) == (6, 1, 4)
    assert torch.equal(slots.gates.view(5, 2, 3), gates)
    assert torch.equal(slots.expert_indices.view(5, 2, 3), indices)


def test_average_k_counts_the_gates_that_are_not_zero():
    gates = torch.tensor([[[0.5, 0.0], [0.7, 0.2]], [[0.0, 0.0], [0.1, 0.0]]])
    indices = torch.tensor([0, 1]).expand(2, 2, 2)
    assert Routing(gates, indices, 3).average_k().item() == 1.0

import pytest
import torch

from switchhead.ops import route
from tests.helpers import gradients, relative_error


def test_gates_are_sigmoids_of_the_k_best_scores():
    x, weight = torch.randn(5, 8, dtype=torch.float64), torch.randn(2, 4, 8, dtype=torch.float64)
    routing = route(x, weight, 2)
    for n in range(5):
        for h in range(2):
            scores = weight[h] @ x[n]
            best = sorted(range(4), key=lambda e: -scores[e].item())[:2]
            assert routing.expert_indices[n, h].tolist() == best
            assert torch.allclose(routing.gates[n, h], torch.sigmoid(scores[best]), rtol=1e-14)


def test_softmax_gates_compete_over_all_experts():
    x, weight = torch.randn(5, 8, dtype=torch.float64), torch.randn(2, 4, 8, dtype=torch.float64)
    routing = route(x, weight, 3, gating="softmax")
    probabilities = torch.einsum("nd,hed->nhe", x, weight).softmax(-1)
    assert torch.allclose(routing.gates, probabilities.gather(-1, routing.expert_indices))
    assert (routing.gates.sum(-1) < 1).all()


def test_ties_go_to_the_lowest_index_where_sigmoids_saturate_too():
    x = torch.full((3, 2), 100.0)
    weight = torch.tensor([[[1.0, 1.0], [2.0, 2.0], [1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]])
    routing = route(x, weight, 4)
    assert routing.expert_indices.tolist() == [[[1, 3, 4, 0]]] * 3
    assert routing.gates.eq(1).all()  # all saturated, so only the scores could tell them apart


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_and_gates_are_float32_inside_autocast_and_for_half_inputs(dtype):
    x, weight = torch.randn(64, 128).to(dtype), torch.randn(2, 4, 128).to(dtype)
    exact = torch.einsum("nd,hed->nhe", x.double(), weight.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = route(x, weight, 2)
    assert routing.gates.dtype == torch.float32
    assert relative_error(routing.gates, exact.gather(-1, routing.expert_indices).sigmoid()) < 1e-6
    assert route(x.double(), weight.double(), 2).gates.dtype == torch.float64


def test_gradients_pass_gradcheck():
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    for gating in ("sigmoid", "softmax"):
        assert torch.autograd.gradcheck(lambda x, w, g=gating: route(x, w, 2, gating=g).gates, (x, weight))


@pytest.mark.parametrize("gating", ["sigmoid", "softmax"])
def test_dropped_experts_are_never_chosen_while_k_remain_and_weigh_nothing_after(gating):
    x = torch.randn(200, 8, requires_grad=True)
    weight = torch.randn(2, 4, 8, requires_grad=True)
    dropped = torch.rand(200, 2, 4) < 0.5
    dropped[:5] = True  # nothing left
    routing = route(x, weight, 2, gating=gating, dropped=dropped)
    chosen_dropped = dropped.gather(-1, routing.expert_indices)
    left = (~dropped).sum(-1, keepdim=True)
    assert not chosen_dropped[(left >= 2).expand(-1, -1, 2)].any()
    assert routing.gates[chosen_dropped].eq(0).all()
    assert all(torch.isfinite(g).all() for g in gradients(routing.gates, x, weight))


def test_groups_number_the_experts_of_all_heads():
    routing = route(torch.randn(50, 8), torch.randn(3, 4, 8), 2)
    assert torch.equal(routing.groups(shared_pool=True), routing.expert_indices)
    assert torch.equal(routing.groups() // 4, torch.arange(3)[:, None].expand(50, 3, 2))
    assert torch.equal(routing.groups() % 4, routing.expert_indices)


def test_bad_arguments_are_named():
    x, weight = torch.randn(5, 8), torch.randn(2, 4, 8)
    with pytest.raises(ValueError, match="k=5 experts cannot be chosen out of 4"):
        route(x, weight, 5)
    with pytest.raises(ValueError, match="gating='hard' is unknown"):
        route(x, weight, 2, gating="hard")
    with pytest.raises(ValueError, match=r"\[heads, experts, d_model\]; got \(4, 8\)"):
        route(x, weight[0], 2)
    with pytest.raises(ValueError, match="x and weight must be floating point"):
        route(x.long(), weight, 2)
    with pytest.raises(ValueError, match=r"dropped must be boolean \[5, 2, 4\]"):
        route(x, weight, 2, dropped=torch.zeros(5, 4, dtype=torch.bool))

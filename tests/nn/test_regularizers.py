"""Auxiliary losses against cases computed by hand, with padding, and over several ranks."""

import json
import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from switchhead.nn.regularizers import cv_loss, entropy_loss, router_z_loss, switch_loss
from tests.helpers import gradients, relative_error

LOG2, LOG3 = math.log(2), math.log(3)
# Two tokens and three experts with probabilities 1/2, 1/4, 1/4 and 1/4, 1/2, 1/4; then a token that is padding.
SCORES = torch.tensor([[LOG2, 0.0, 0.0], [0.0, LOG2, 0.0], [5.0, -7.0, 9.0]], dtype=torch.float64)
GATES = torch.tensor([[0.5, 0.25, 0.0], [0.25, 0.5, 0.0], [0.0, 3.0, 8.0]], dtype=torch.float64)
IS_TOKEN = torch.tensor([True, True, False])


@pytest.mark.parametrize(("rows", "mask"), [(slice(2), None), (slice(3), IS_TOKEN)], ids=["tokens", "and padding"])
def test_losses_are_those_computed_by_hand(rows, mask):
    scores, gates = SCORES[rows], GATES[rows]
    # Loads 3/4, 3/4, 0: mean 1/2, sum of squared deviations 3/8, unbiased variance 3/16.
    assert cv_loss(gates, mask).item() == pytest.approx((3 / 16) / (1 / 4), rel=1e-12)
    # Probabilities 3/8, 3/8, 1/4 and frequencies 1/2, 1/2, 0.
    assert switch_loss(scores, gates, mask).item() == pytest.approx(3 * (3 / 8), rel=1e-12)
    # Both sums of exponentials are 4.
    assert router_z_loss(scores, mask).item() == pytest.approx(math.log(4) ** 2, rel=1e-12)
    expected = 2 * (3 / 8) * math.log(3 / 8) + (1 / 4) * math.log(1 / 4)
    assert entropy_loss(scores, mask).item() == pytest.approx(expected, rel=1e-12)


def test_losses_are_least_where_experts_are_used_evenly():
    even, gates = torch.zeros(4, 4, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
    assert cv_loss(gates).item() == pytest.approx(0.0, abs=1e-15)
    assert switch_loss(even, gates).item() == pytest.approx(1.0)
    assert entropy_loss(even).item() == pytest.approx(-math.log(4))
    certain = torch.full((4, 4), -1000.0).fill_diagonal_(0.0)[:1].expand(4, 4).double()
    assert entropy_loss(certain).item() == pytest.approx(0.0, abs=1e-300)


def test_a_single_expert_and_a_batch_of_padding_have_finite_losses_and_gradients():
    assert cv_loss(torch.rand(3, 1)).item() == 0.0
    scores = SCORES.clone().requires_grad_()
    nothing = torch.zeros(3, dtype=torch.bool)
    gates = scores.sigmoid()
    losses = [
        cv_loss(gates, nothing),
        switch_loss(scores, gates, nothing),
        router_z_loss(scores, nothing),
        entropy_loss(scores, nothing),
    ]
    (gradient,) = torch.autograd.grad(sum(losses), scores)
    assert all(loss.item() == 0.0 for loss in losses)
    assert gradient.isfinite().all()


def test_gradients_pass_gradcheck():
    scores, gates = torch.randn(5, 4, dtype=torch.float64), torch.rand(5, 4, dtype=torch.float64)
    mask = torch.tensor([True, False, True, True, True])
    tensors = scores.requires_grad_(), gates.requires_grad_()
    assert torch.autograd.gradcheck(lambda s, g: cv_loss(g, mask) + switch_loss(s, g.detach(), mask), tensors)
    assert torch.autograd.gradcheck(lambda s: router_z_loss(s, mask) + entropy_loss(s, mask), tensors[:1])


def entropy_of_a_rank(rank, directory):
    """Of its own tokens, of all, and the latter's gradient with respect to its scores."""
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2)
    try:
        scores = torch.tensor(json.loads((directory / "scores.json").read_text()), dtype=torch.float64)
        scores = (scores[3:] if rank else scores[:3]).requires_grad_()
        mask = None if rank else torch.tensor([True, True, False])
        alone, together = entropy_loss(scores, mask), entropy_loss(scores, mask, synchronize=True)
        (gradient,) = torch.autograd.grad(together, scores)
    finally:
        dist.destroy_process_group()
    return alone.item(), together.item(), gradient.tolist()


def run_second_rank(_, directory):
    (directory / "second.json").write_text(json.dumps(entropy_of_a_rank(1, directory)))


@pytest.mark.slow
def test_synchronised_entropy_and_its_averaged_gradient_are_those_of_the_whole_batch(tmp_path):
    whole = torch.randn(5, 4, dtype=torch.float64).requires_grad_()
    (tmp_path / "scores.json").write_text(json.dumps(whole.tolist()))
    other = mp.spawn(run_second_rank, (tmp_path,), nprocs=1, join=False)
    first = entropy_of_a_rank(0, tmp_path)
    other.join()
    second = json.loads((tmp_path / "second.json").read_text())
    expected = entropy_loss(whole, torch.tensor([True, True, False, True, True]))
    (gradient,) = torch.autograd.grad(expected, whole)
    assert first[0] != second[0]
    assert first[1] == second[1] == pytest.approx(expected.item(), rel=1e-12)
    # Data parallelism averages over the ranks, so each must hold twice its share.
    found = torch.tensor(first[2] + second[2], dtype=torch.float64) / 2
    assert relative_error(found, gradient) < 1e-12


def test_synchronised_entropy_compiles_to_one_graph(tmp_path):
    torch.compiler.reset()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        scores = torch.randn(5, 4, requires_grad=True)
        compiled = torch.compile(entropy_loss, fullgraph=True, backend="aot_eager")
        found, expected = compiled(scores, synchronize=True), entropy_loss(scores)
        assert relative_error(found, expected) < 1e-6
        for a, b in zip(gradients(found, scores), gradients(expected, scores), strict=True):
            assert relative_error(a, b) < 1e-6
    finally:
        dist.destroy_process_group()


def test_synchronising_without_ranks_changes_nothing():
    assert entropy_loss(SCORES, synchronize=True).item() == entropy_loss(SCORES).item()

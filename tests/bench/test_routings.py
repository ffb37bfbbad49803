import pytest
import torch

from switchhead import SwitchHeadAttention
from switchhead.bench import LAYERS, bench_layer, bench_passes
from switchhead.bench.routings import NAMES, steer, trained_scores, wanted_scores
from switchhead.errors import DeviceError


def layer():
    return SwitchHeadAttention(d_model=48, n_heads=2, n_experts=4, d_head=8, k=2)


@pytest.mark.parametrize("name", ["uniform", "skewed"])
def test_steered_inputs_give_the_wanted_scores(name):
    module = layer()
    scores = wanted_scores(name, 500, torch.device("cpu"), n_heads=2, n_experts=4, k=2)
    x = steer(module, torch.randn(500, 48), scores)
    for side, router in enumerate((module.destination_router, module.source_router)):
        found = torch.einsum("nd,hed->nhe", x, router.weight)
        assert torch.allclose(found, scores[:, side], atol=1e-4)


def test_a_skewed_router_sends_four_of_five_tokens_to_one_expert():
    scores = wanted_scores("skewed", 2000, torch.device("cpu"), n_heads=2, n_experts=4, k=2)
    share = (scores.topk(2, -1).indices == 0).any(-1).float().mean().item()
    assert share == pytest.approx(0.8, abs=0.02)


@pytest.mark.slow
def test_trained_scores_cover_both_sides_of_every_token():
    scores = trained_scores(2, 4, 2, 300, torch.device("cpu"), steps=3)
    assert scores.shape == (300, 2, 2, 4)
    assert torch.isfinite(scores).all()


def test_twins_have_the_parameters_they_claim():
    for config in LAYERS.values():
        dense = 4 * config.dense_heads
        assert 2 * config.gqa_heads + 2 * 4 == dense
        assert config.gqa_heads % 4 == 0


def test_bench_without_a_gpu_says_so():
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="measures a CUDA device"):
            next(iter(bench_layer()))
        with pytest.raises(DeviceError, match="bench passes measures a CUDA device"):
            next(iter(bench_passes()))
    assert set(NAMES) == {"uniform", "skewed", "trained"}

"""What is particular to SwitchHead; what all attention layers share is in test_attention.py."""

import itertools

import numpy as np
import pytest
import torch

from switchhead import Relative, Rotary, SwitchHeadAttention
from switchhead.nn.reference import switchhead_reference
from switchhead.ops import route
from tests.helpers import gradients, relative_error

SUBSETS = ["".join(s) for n in range(5) for s in itertools.combinations("qkvo", n)]


def layer(**options):
    sizes = dict(d_model=10, n_heads=2, n_experts=4, d_head=5, k=2)
    return SwitchHeadAttention(**{**sizes, **options}).double()


def agrees(module, x, **inputs):
    """Values and every gradient of the layer and of the paper's loops."""
    x = x.detach().requires_grad_()
    tensors = [x, *module.parameters()]
    found, expected = module(x, **inputs), switchhead_reference(module, x, **inputs)
    assert relative_error(found, expected) < 1e-12
    names = ["x", *(name for name, _ in module.named_parameters())]
    for name, a, b in zip(names, gradients(found, *tensors), gradients(expected, *tensors), strict=True):
        assert relative_error(a, b) < 1e-11, name


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("experts", SUBSETS)
def test_every_subset_of_expert_projections_matches_the_papers_loops(experts, shared):
    module = layer(expert_projections=experts, shared_selection=shared, positions="rotary")
    agrees(module, torch.randn(1, 4, 10, dtype=torch.float64))


@pytest.mark.parametrize("positions", ["none", Rotary(fraction=0.5), Rotary(fraction=0.9, base=100.0), "relative"])
@pytest.mark.parametrize("source", [None, ("memory", 3), ("context", 3), ("context", 5), ("context", 2)])
@pytest.mark.parametrize("causal", [True, False])
def test_positions_memory_and_context_match_the_papers_loops(positions, source, causal):
    inputs = {source[0]: torch.randn(2, source[1], 10, dtype=torch.float64)} if source else {}
    agrees(layer(positions=positions, causal=causal), torch.randn(2, 3, 10, dtype=torch.float64), **inputs)


def test_padding_and_queries_that_see_nothing_match_the_papers_loops():
    padding = torch.tensor([[True, True, False, False], [False, False, False, True]])
    module, x = layer(positions="rotary"), torch.randn(2, 4, 10, dtype=torch.float64)
    agrees(module, x, key_padding_mask=padding)
    assert module(x, key_padding_mask=padding)[0, :2].eq(0).all()


@pytest.mark.parametrize("experts", ["vo", "qkvo"])
@pytest.mark.parametrize("source", ["memory", "context"])
def test_shared_selection_and_padding_beside_a_source_match_the_papers_loops(source, experts):
    module = layer(shared_selection=True, expert_projections=experts, positions="relative")
    x, other = torch.randn(2, 3, 10, dtype=torch.float64), torch.randn(2, 4, 10, dtype=torch.float64)
    padding = torch.zeros(2, 7 if source == "memory" else 4, dtype=torch.bool)
    padding[0, :3] = padding[1, -1] = True
    agrees(module, x, **{source: other}, key_padding_mask=padding)


def test_softmax_gating_matches_the_papers_loops():
    module, x = layer(gating="softmax"), torch.randn(1, 4, 10, dtype=torch.float64)
    assert relative_error(module(x), switchhead_reference(module, x, softmax_gating=True)) < 1e-12


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("experts", SUBSETS)
def test_a_single_expert_is_plain_projections_with_an_output_gate(experts, shared):
    module = layer(n_experts=1, k=1, expert_projections=experts, shared_selection=shared)
    x = torch.randn(1, 4, 10, dtype=torch.float64)
    agrees(module, x)
    assert module.source_router is None
    assert (module.destination_router is not None) == ("o" in experts)
    assert module.v_proj.weight.shape == (10, 10)


@pytest.mark.parametrize("backend", ["reference", "gated", "grouped"])
def test_backends_agree_in_the_layer(backend):
    a, b = layer(backend=backend), layer(backend="auto")
    b.load_state_dict(a.state_dict())
    x = torch.randn(2, 6, 10, dtype=torch.float64)
    assert relative_error(a(x), b(x)) < 1e-13


@pytest.mark.parametrize("experts", ["vo", "v", "kv", "qkvo", "ko"])
def test_shared_selection_routes_each_token_once(experts, monkeypatch):
    passes = []
    for place in ("switchhead.ops.inputs.route", "switchhead.nn.router.route"):
        monkeypatch.setattr(place, lambda x, w, *a, **o: passes.append((len(x), len(w))) or route(x, w, *a, **o))
    shared, x = layer(shared_selection=True, expert_projections=experts), torch.randn(1, 4, 10, dtype=torch.float64)
    shared(x)
    shared(x, memory=x)
    assert passes[0] == (4, 2)
    assert sum(tokens for tokens, _ in passes[1:]) == 8
    assert sum("router" in name for name, _ in shared.named_parameters()) == 1


@pytest.mark.parametrize("shared", [False, True])
def test_self_attention_routes_in_one_pass(shared, monkeypatch):
    module = layer(shared_selection=shared)
    assert (module.source_router is None) == shared
    heads = []
    monkeypatch.setattr(
        "switchhead.ops.inputs.route", lambda x, w, *a, **o: heads.append(len(w)) or route(x, w, *a, **o)
    )
    seen = []
    for router in filter(None, (module.destination_router, module.source_router)):
        router.register_forward_hook(lambda router, args, routing: seen.append(routing.gates.shape))
    module(torch.randn(1, 4, 10, dtype=torch.float64))
    assert heads == [2 if shared else 4]
    assert seen == [(4, 2, 2)] * (1 if shared else 2)  # hooks see every decision


def test_expert_dropout_acts_in_training_only_and_follows_the_seed():
    module, x = layer(expert_dropout=0.5), torch.randn(2, 8, 10, dtype=torch.float64)
    plain = layer()
    plain.load_state_dict(module.state_dict())
    torch.manual_seed(3)
    first = module(x)
    torch.manual_seed(3)
    assert torch.equal(first, module(x))
    assert not torch.equal(first, module(x))
    assert torch.equal(module.eval()(x), plain(x))


def test_initial_deviations_are_the_papers():
    module = SwitchHeadAttention(
        d_model=256, n_heads=4, n_experts=8, d_head=96, k=2, positions=Relative(), init_scale=0.5
    )
    by_input, by_heads = 0.5 / 256**0.5, 0.5 / (4 * 96) ** 0.5
    expected = dict.fromkeys(["q_proj", "k_proj", "v_proj", "position_proj"], by_input) | {"o_proj": by_heads}
    expected |= dict.fromkeys(["source_router", "destination_router"], by_input)
    for name, std in expected.items():
        assert getattr(module, name).weight.std().item() == pytest.approx(std, rel=0.03), name


def test_expert_norm_init_brings_experts_to_one_norm_and_keeps_the_deviation():
    module = SwitchHeadAttention(
        d_model=96, n_heads=2, n_experts=6, d_head=40, k=2, expert_norm_init=True, init_scale=0.5
    )
    for projection, fan_in in ((module.v_proj, 96), (module.o_proj, 2 * 40)):
        norms = projection.weight.norm(dim=1)  # across the experts
        assert (norms / norms.mean() - 1).abs().max() < 1e-5
        assert projection.weight.std().item() == pytest.approx(0.5 / fan_in**0.5, rel=0.03)
    plain = SwitchHeadAttention(d_model=96, n_heads=2, n_experts=6, d_head=40, k=2)
    assert plain.v_proj.weight.norm(dim=1).std() > 0.01


def test_the_cache_holds_two_vectors_a_head_whatever_the_number_of_experts():
    class Cache:
        def update(self, k, v):
            self.numbers = k.numel() + v.numel()
            return k, v

    for n_experts in (2, 8):
        cache = Cache()
        layer(n_experts=n_experts)(torch.randn(1, 3, 10, dtype=torch.float64), cache=cache)
        assert cache.numbers == 3 * 2 * 2 * 5  # tokens, heads, keys and values, d_head


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(k=5), "k=5 experts cannot be chosen out of n_experts=4"),
        (dict(d_head=0), "d_head=0 must be an integer of at least 1"),
        (dict(d_head=2.5), "d_head=2.5 must be an integer of at least 1"),
        (dict(positions=Rotary(fraction=1.0)), "d_head=5 is odd"),
        (dict(positions="absolute"), "positions='absolute' is unknown"),
        (dict(positions=3), "got int"),
        (dict(expert_projections="vx"), "expert_projections='vx'"),
        (dict(expert_projections="vv"), "expert_projections='vv'"),
        (dict(gating="hard"), "gating='hard' is unknown"),
        (dict(expert_dropout=1.0), r"expert_dropout=1.0 must be"),
        (dict(gating="hard", expert_projections=""), "gating='hard' is unknown"),
    ],
)
def test_bad_constructor_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        layer(**options)


def test_sizes_may_be_integers_of_numpy():
    sizes = {name: np.int64(value) for name, value in dict(d_model=10, n_heads=2, n_experts=4, d_head=5, k=2).items()}
    assert layer(**sizes)(torch.randn(1, 3, 10, dtype=torch.float64)).shape == (1, 3, 10)


def test_an_odd_head_rotates_its_even_part_where_the_fraction_leaves_room():
    assert Rotary(fraction=0.5).rotated_width(41) == 20
    assert Rotary(fraction=1.0).rotated_width(64) == 64
    assert Rotary(fraction=0.5).rotated_width(1) == 0
    with pytest.raises(ValueError, match="fraction=0"):
        Rotary(fraction=0.0)

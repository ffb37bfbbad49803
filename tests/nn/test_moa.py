"""What is particular to MoA; what all attention layers share is in test_attention.py."""

import math
from dataclasses import replace

import pytest
import torch

from switchhead.nn import MoAAttention, Rotary
from tests.helpers import gradients, relative_error

GATINGS = ["softmax", "softmax_chosen", "sigmoid"]


def layer(**options):
    sizes = dict(d_model=10, n_heads=2, n_experts=5, d_head=5)
    return MoAAttention(**{**sizes, **options}).double()


def moa_reference(module, x, *, gating="softmax", memory=None, context=None, key_padding_mask=None):
    """The layer token by token: loops over queries, their best experts, and keys; shares no code with it."""
    source = context if context is not None else x if memory is None else torch.cat([memory, x], 1)
    n_queries, n_keys = x.shape[1], source.shape[1]
    out = torch.zeros_like(x)
    for b in range(len(x)):
        keys = [module.k_proj.weight @ token for token in source[b]]
        values = [module.v_proj.weight @ token for token in source[b]]
        rows = []
        for i, token in enumerate(x[b]):
            scores = [row @ token for row in module.router.weight[0]]
            best = sorted(range(len(scores)), key=lambda e: -scores[e].item())[: module.n_heads]
            sums = {"softmax": scores, "softmax_chosen": [scores[e] for e in best]}
            y = torch.zeros_like(token)
            for e in best:
                if gating == "sigmoid":
                    gate = 1 / (1 + torch.exp(-scores[e]))
                else:
                    gate = torch.exp(scores[e]) / sum(torch.exp(s) for s in sums[gating])
                query = token @ module.q_proj.weight[0, e]
                at = n_keys - n_queries + i
                seen = [j for j in range(n_keys) if not (module.causal and j > at)]
                seen = [j for j in seen if key_padding_mask is None or not key_padding_mask[b, j]]
                if not seen:
                    continue
                first = i if context is not None else at
                exponents = torch.stack([_score(module, query, keys[j], first, j, j - at) for j in seen])
                weights = torch.exp(exponents - exponents.max())
                attended = sum(w * values[j] for w, j in zip(weights, seen, strict=True)) / weights.sum()
                y = y + gate * (attended @ module.o_proj.weight[0, e])
            rows.append(y)
        out = out.index_put((torch.tensor([b]),), torch.stack(rows)[None])
    return out


def _score(module, query, key, query_position, key_position, distance):
    kind = type(module.positions).__name__
    if kind == "Rotary":
        half = int(module.positions.fraction * module.d_head / 2)
        return _rotated(query, query_position, half) @ _rotated(key, key_position, half) / math.sqrt(module.d_head)
    if kind == "Relative":
        wave = [
            math.sin(distance / 10000 ** (c / module.d_model))
            if c % 2 == 0
            else math.cos(distance / 10000 ** ((c - 1) / module.d_model))
            for c in range(module.d_model)
        ]
        return module.scale[0] * (query @ key + query @ (module.position_proj.weight @ query.new_tensor(wave)))
    return query @ key / math.sqrt(module.d_head)


def _rotated(vector, position, half):
    pairs = [vector[i] + 1j * vector[i + half] for i in range(half)]
    turned = [
        z * complex(math.cos(a), math.sin(a)) for i, z in enumerate(pairs) for a in [position / 10000 ** (i / half)]
    ]
    return torch.stack([*(z.real for z in turned), *(z.imag for z in turned), *vector[2 * half :]])


def agrees(module, x, gating="softmax", **inputs):
    x = x.detach().requires_grad_()
    tensors = [x, *module.parameters()]
    found, expected = module(x, **inputs), moa_reference(module, x, gating=gating, **inputs)
    assert relative_error(found, expected) < 1e-12
    names = ["x", *(name for name, _ in module.named_parameters())]
    for name, a, b in zip(names, gradients(found, *tensors), gradients(expected, *tensors), strict=True):
        assert relative_error(a, b) < 1e-11, name


@pytest.mark.parametrize("positions", ["none", Rotary(fraction=0.9), "relative"])
@pytest.mark.parametrize("gating", GATINGS)
def test_every_gating_and_position_matches_the_loops(gating, positions):
    agrees(layer(gating=gating, positions=positions), torch.randn(1, 4, 10, dtype=torch.float64), gating)


@pytest.mark.parametrize("positions", ["rotary", "relative"])
@pytest.mark.parametrize("source", [("memory", 3), ("context", 3), ("context", 5)])
@pytest.mark.parametrize("causal", [True, False])
def test_memory_and_context_match_the_loops(source, positions, causal):
    inputs = {source[0]: torch.randn(2, source[1], 10, dtype=torch.float64)}
    agrees(layer(positions=positions, causal=causal), torch.randn(2, 3, 10, dtype=torch.float64), **inputs)


def test_padding_matches_the_loops_and_blind_queries_give_zeros():
    module, x = layer(positions="relative"), torch.randn(2, 4, 10, dtype=torch.float64)
    padding = torch.tensor([[True, True, False, False], [False, False, False, True]])
    agrees(module, x, key_padding_mask=padding)
    assert module(x, key_padding_mask=padding)[0, :2].eq(0).all()


@pytest.mark.parametrize("backend", ["reference", "gated", "grouped"])
def test_backends_agree_in_the_layer(backend):
    a, b = layer(backend=backend, positions="rotary"), layer(positions="rotary")
    b.load_state_dict(a.state_dict())
    x = torch.randn(2, 6, 10, dtype=torch.float64)
    tensors = list(a.parameters()), list(b.parameters())
    assert relative_error(a(x), b(x)) < 1e-13
    for found, expected in zip(gradients(a(x), *tensors[0]), gradients(b(x), *tensors[1]), strict=True):
        assert relative_error(found, expected) < 1e-12


@pytest.mark.parametrize("backend", ["reference", "gated", "grouped"])
def test_experts_that_nobody_chose_have_gradients_of_exactly_zero(backend, poisoned_allocations):
    module, x = layer(backend=backend), torch.randn(2, 6, 10, dtype=torch.float64)
    module.router.register_forward_hook(
        lambda router, args, routing: replace(routing, expert_indices=torch.arange(2).expand_as(routing.gates))
    )
    module(x).square().sum().backward()
    for projection in (module.q_proj, module.o_proj):
        assert projection.weight.grad[0, :2].any()
        assert projection.weight.grad[0, 2:].eq(0).all()


def test_the_temperature_starts_at_the_usual_scale_and_exists_with_relative_positions_only():
    assert layer(positions="relative").scale.item() == pytest.approx(5**-0.5)
    assert "scale" not in dict(layer(positions="rotary").named_parameters())


def test_keys_and_values_of_all_experts_are_one_head():
    class Cache:
        def update(self, k, v):
            self.shapes = k.shape, v.shape
            return k, v

    cache = Cache()
    layer()(torch.randn(2, 3, 10, dtype=torch.float64), cache=cache)
    assert cache.shapes == ((2, 1, 3, 5), (2, 1, 3, 5))


def test_initial_deviations_are_the_papers():
    module = MoAAttention(d_model=256, n_heads=3, n_experts=8, d_head=96, positions="relative", init_scale=0.5)
    by_input, by_heads = 0.5 / 256**0.5, 0.5 / (3 * 96) ** 0.5
    expected = dict.fromkeys(["q_proj", "k_proj", "v_proj", "position_proj", "router"], by_input) | {"o_proj": by_heads}
    for name, std in expected.items():
        assert getattr(module, name).weight.std().item() == pytest.approx(std, rel=0.03), name


def test_auxiliary_losses_are_those_of_the_tokens_alone():
    module, x = layer(), torch.randn(2, 4, 10, dtype=torch.float64)
    padding = torch.tensor([[True, True, False, False], [False, False, False, False]])
    plain = module(x, key_padding_mask=padding)
    y, aux = module(x, key_padding_mask=padding, return_aux=True)
    assert torch.equal(y, plain)
    assert list(aux) == ["cv_loss", "switch_loss", "router_z_loss"]
    tokens = x[~padding][None]
    _, expected = module(tokens, return_aux=True)
    behind_memory = torch.cat([torch.zeros(2, 3, dtype=torch.bool), padding], 1)
    _, with_memory = module(x, memory=x[:, :3], key_padding_mask=behind_memory, return_aux=True)
    for name, loss in aux.items():
        assert loss.shape == ()
        assert relative_error(loss, expected[name]) < 1e-12, name
        assert relative_error(with_memory[name], expected[name]) < 1e-12, name
        (gradient,) = torch.autograd.grad(loss, module.router.weight, retain_graph=True)
        assert gradient.any(), name


def test_auxiliary_losses_of_several_rows_are_not_taken_along_time():
    # The authors' code scatters gates along the time axis; the losses may not depend on how tokens stand in rows.
    module, x = layer(), torch.randn(2, 6, 10, dtype=torch.float64)
    _, rows = module(x, return_aux=True)
    _, one_row = module(x.view(1, 12, 10), return_aux=True)
    _, columns = module(x.view(12, 1, 10), return_aux=True)
    for name, loss in rows.items():
        assert relative_error(one_row[name], loss) < 1e-12, name
        assert relative_error(columns[name], loss) < 1e-12, name


def test_a_threshold_removes_weak_experts_and_their_gradients():
    module = layer(gating="sigmoid", router_threshold=0.75)
    x = torch.randn(2, 6, 10, dtype=torch.float64)
    routings = []
    module.router.register_forward_hook(lambda router, args, routing: routings.append(routing))
    module(x)
    used = routings[0].gates != 0
    assert 0 < used.sum() < used.numel()
    assert routings[0].gates[used].min() > 0.75
    plain = layer(gating="sigmoid")
    plain.load_state_dict(module.state_dict())
    unused = ~used.squeeze(1).any(-1).view(2, 6)
    assert unused.any()
    assert module(x)[unused].eq(0).all()
    assert not plain(x)[unused].eq(0).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(n_heads=6), "n_heads=6 experts cannot be chosen out of n_experts=5"),
        (dict(n_heads=0), "n_heads=0 must be an integer of at least 1"),
        (dict(gating="hard"), "gating='hard' is unknown; use 'sigmoid' or 'softmax' or 'softmax_chosen'"),
        (dict(router_threshold=1.0), "router threshold=1.0 must be"),
        (dict(expert_dropout=-0.1), "expert_dropout=-0.1 must be"),
        (dict(positions="rope"), "positions='rope' is unknown"),
    ],
)
def test_bad_constructor_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        layer(**options)

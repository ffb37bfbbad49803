"""sigma-MoE against its definition as loops."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from switchhead.nn import SigmaMoE
from tests.helpers import gradients, relative_error


def layer(**options):
    return SigmaMoE(**{**dict(d_model=10, n_experts=5, expert_size=7, k=2), **options}).double()


def sigma_moe_reference(module, x, softmax=False):
    rows = []
    for token in x.flatten(0, -2):
        scores = [row @ token for row in module.router.weight[0]]
        best = sorted(range(len(scores)), key=lambda e: -scores[e].item())[: module.k]
        total = sum(torch.exp(score) for score in scores)
        y = torch.zeros_like(token)
        for e in best:
            gate = torch.exp(scores[e]) / total if softmax else 1 / (1 + torch.exp(-scores[e]))
            y = y + gate * ((token @ module.up_proj.weight[0, e]).clamp(min=0) @ module.down_proj.weight[0, e])
        rows.append(y)
    return torch.stack(rows).view(x.shape)


@pytest.mark.parametrize("backend", ["auto", "reference", "gated", "grouped"])
@pytest.mark.parametrize(("gating", "k"), [("sigmoid", 2), ("softmax", 2), ("sigmoid", 1), ("sigmoid", 5)])
def test_values_and_gradients_match_the_loops(gating, k, backend):
    module = layer(gating=gating, k=k, backend=backend)
    x = torch.randn(2, 4, 10, dtype=torch.float64, requires_grad=True)
    found, expected = module(x), sigma_moe_reference(module, x, softmax=gating == "softmax")
    tensors = [x, *module.parameters()]
    assert relative_error(found, expected) < 1e-12
    for a, b in zip(gradients(found, *tensors), gradients(expected, *tensors), strict=True):
        assert relative_error(a, b) < 1e-11


def test_gradients_pass_gradcheck():
    module, x = layer(), torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*module.named_parameters(), strict=True)

    def function(x, *parameters):
        y, aux = torch.func.functional_call(
            module, dict(zip(names, parameters, strict=True)), (x,), {"return_aux": True}
        )
        return y, aux["entropy_loss"]

    assert torch.autograd.gradcheck(function, (x, *parameters), fast_mode=True)


def test_entropy_loss_is_of_the_mean_choice_of_real_tokens():
    module, x = layer(), torch.randn(2, 4, 10, dtype=torch.float64)
    padding = torch.tensor([[True, True, False, False], [False, False, False, True]])
    y, aux = module(x, padding_mask=padding, return_aux=True)
    assert torch.equal(y, module(x))
    mean = torch.softmax(x[~padding] @ module.router.weight[0].mT, -1).mean(0)
    assert aux["entropy_loss"].item() == pytest.approx(sum(p * math.log(p) for p in mean.tolist()), rel=1e-12)
    (gradient,) = torch.autograd.grad(aux["entropy_loss"], module.router.weight)
    assert gradient.any()


def test_dropped_experts_are_not_used_in_training_only():
    module, x = layer(expert_dropout=0.4), torch.randn(50, 10, dtype=torch.float64)
    plain = layer()
    plain.load_state_dict(module.state_dict())
    routings = []
    module.router.register_forward_hook(lambda router, args, routing: routings.append(routing))
    torch.manual_seed(1)
    first = module(x)
    torch.manual_seed(1)
    assert torch.equal(module(x), first)
    assert not torch.equal(module(x), first)
    assert (routings[0].gates == 0).any()  # of the five experts of some token at least four were dropped
    assert torch.equal(module.eval()(x), plain(x))


def test_router_rows_have_one_norm_and_all_weights_the_papers_deviations():
    module = SigmaMoE(d_model=200, n_experts=16, expert_size=40, k=2, init_scale=0.5)
    norms = module.router.weight[0].norm(dim=-1)
    assert relative_error(norms, norms.mean().expand(16)) < 1e-6
    expected = {"router": 0.5 / 200**0.5, "up_proj": 0.5 / 200**0.5, "down_proj": 0.5 / (16 * 40) ** 0.5}
    for name, std in expected.items():
        assert getattr(module, name).weight.std().item() == pytest.approx(std, rel=0.03), name


def test_a_threshold_leaves_out_weak_experts():
    module, x = layer(router_threshold=0.5, k=3), torch.randn(20, 10, dtype=torch.float64)
    scores = x @ module.router.weight[0].mT
    kept = layer(k=3)
    kept.load_state_dict(module.state_dict())
    few = (scores > 0).sum(-1) < 3
    assert few.any()
    assert not few.all()
    assert torch.equal(module(x)[~few], kept(x)[~few])
    none = scores.max(-1).values <= 0
    assert module(x)[none].eq(0).all()
    assert not torch.allclose(module(x)[few], kept(x)[few])


@pytest.mark.parametrize("backend", ["reference", "gated", "grouped"])
def test_experts_that_nobody_chose_have_gradients_of_exactly_zero(backend, poisoned_allocations):
    module = layer(backend=backend, k=1)
    with torch.no_grad():
        module.router.weight[0, 1:] = -module.router.weight[0, :1]
    x = torch.randn(6, 10, dtype=torch.float64)
    x = x * (x @ module.router.weight[0, 0]).sign()[:, None]  # every token prefers expert 0
    module(x).square().sum().backward()
    for projection in (module.up_proj, module.down_proj):
        assert projection.weight.grad[0, 0].any()
        assert projection.weight.grad[0, 1:].eq(0).all()


@pytest.mark.parametrize("shape", [(10,), (0, 10), (3, 10), (2, 0, 10), (2, 3, 4, 10)])
def test_any_leading_shape(shape):
    module, x = layer(), torch.randn(shape, dtype=torch.float64)
    assert module(x).shape == shape


def test_mixed_dtypes_run_outside_autocast_and_inside():
    exact = layer()
    x = torch.randn(6, 10)
    expected = exact(x.double())
    for weights in (torch.float32, torch.bfloat16, torch.float16):
        module = layer().to(weights)
        module.load_state_dict(exact.state_dict())
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            y = module(x.to(dtype))
            assert y.dtype == torch.promote_types(weights, dtype)
            y.sum().backward()
    module = layer().float()
    module.load_state_dict(exact.state_dict())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, aux = module(x, return_aux=True)
    assert y.dtype == torch.bfloat16
    assert aux["entropy_loss"].dtype == torch.float32
    assert relative_error(y, expected) < 0.05


def test_the_layer_traces_to_one_graph():
    torch.compiler.reset()
    module, x = layer(), torch.randn(6, 10, dtype=torch.float64)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    found, aux = compiled(x, return_aux=True)
    expected, expected_aux = module(x, return_aux=True)
    assert relative_error(found, expected) < 1e-12
    assert relative_error(aux["entropy_loss"], expected_aux["entropy_loss"]) < 1e-12
    tensors = list(module.parameters())
    for a, b in zip(gradients(found, *tensors), gradients(expected, *tensors), strict=True):
        assert relative_error(a, b) < 1e-12


def test_checkpointing_changes_no_gradient():
    module, x = layer(), torch.randn(6, 10, dtype=torch.float64, requires_grad=True)
    tensors = [x, *module.parameters()]
    for a, b in zip(
        gradients(checkpoint(module, x, use_reentrant=False), *tensors), gradients(module(x), *tensors), strict=True
    ):
        assert relative_error(a, b) < 1e-13


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(k=6), "k=6 experts cannot be chosen out of n_experts=5"),
        (dict(expert_size=0), "expert_size=0 must be an integer of at least 1"),
        (dict(gating="softmax_chosen"), "gating='softmax_chosen' is unknown"),
        (dict(expert_dropout=1.0), "expert_dropout=1.0 must be"),
        (dict(router_threshold=-0.5), "router threshold=-0.5 must be"),
    ],
)
def test_bad_constructor_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        layer(**options)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"x must be \[..., d_model=10\]; got \(3, 9\)"):
        layer()(torch.randn(3, 9, dtype=torch.float64))


@pytest.mark.parametrize("mask", [torch.zeros(2, dtype=torch.bool), torch.zeros(3)])
def test_a_padding_mask_that_cannot_be_is_named(mask):
    with pytest.raises(ValueError, match=r"padding_mask must be boolean \[3\]"):
        layer()(torch.randn(3, 10, dtype=torch.float64), padding_mask=mask, return_aux=True)

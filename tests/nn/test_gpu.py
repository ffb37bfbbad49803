"""Every layer on a CUDA device against itself in float64 on the CPU."""

import copy

import pytest
import torch

from switchhead.nn import SigmaMoE
from tests.helpers import gradients, relative_error
from tests.nn.layers import LAYERS, every_layer, every_position

pytestmark = pytest.mark.gpu
every_dtype = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])


def check_on_a_gpu(module, dtype, tolerance, *, device="cuda", **inputs):
    """Values and all gradients; operands are rounded to dtype on both sides, so that tokens choose alike."""
    exact = module.to(dtype).double()
    on_gpu = copy.deepcopy(exact).to(device, dtype)
    x = torch.randn(2, 33, 12).to(dtype)
    results = []
    for layer, to in ((on_gpu, dict(device=device, dtype=dtype)), (exact, dict(dtype=torch.float64))):
        tokens = x.detach().to(**to).requires_grad_()
        y = layer(tokens, **{name: value.to(to.get("device", "cpu")) for name, value in inputs.items()})
        results.append((y, *gradients(y.cpu(), tokens, *layer.parameters())))
    for found, expected in zip(*results, strict=True):
        if expected.numel() == 1:  # a sum over all outputs that may be near zero: what each rounds by stays
            assert (found.cpu() - expected).abs() < tolerance * max(results[1][0].norm(), expected.abs())
        else:
            assert relative_error(found, expected) < tolerance


@every_layer
@every_position
@every_dtype
@pytest.mark.parametrize("padded", [False, True])
def test_attention_layers(make, positions, dtype, tolerance, padded):
    mask = torch.zeros(2, 33, dtype=torch.bool)
    mask[0, 20:] = True
    check_on_a_gpu(make(positions=positions), dtype, tolerance, **({"key_padding_mask": mask} if padded else {}))


@every_dtype
@pytest.mark.parametrize("k", [1, 2, 5])
def test_sigma_moe(k, dtype, tolerance):
    check_on_a_gpu(SigmaMoE(d_model=12, n_experts=5, expert_size=21, k=k), dtype, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["switchhead", "switchhead-qk-norm", "moa", "head-gating"])
def test_compiled_layers_equal_eager_ones(kind):
    torch.compiler.reset()
    module, x = LAYERS[kind](positions="rotary").cuda(), torch.randn(2, 33, 12, device="cuda")
    found, expected = torch.compile(module, fullgraph=True)(x), module(x)
    assert relative_error(found, expected) < 1e-5
    tensors = list(module.parameters())
    for a, b in zip(gradients(found.cpu(), *tensors), gradients(expected.cpu(), *tensors), strict=True):
        assert relative_error(a, b) < 1e-4

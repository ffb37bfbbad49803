"""Dense feed-forward layers against their equations."""

import pytest
import torch

from switchhead.nn import MLP, SwiGLU
from tests.helpers import relative_error


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [MLP, SwiGLU])
def test_layers_compute_their_equations(kind, bias):
    layer = kind(d_model=12, d_ff=20, bias=bias).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    assert sum("bias" in name for name, _ in layer.named_parameters()) == (len(list(layer.children())) - 1) * bias

    def affine(name, x):
        projection = getattr(layer, name)
        return x @ projection.weight.mT + (projection.bias if bias else 0)

    x = torch.randn(2, 5, 12, dtype=torch.float64)
    hidden = affine("up_proj", x)
    if kind is MLP:
        hidden = hidden.clamp(min=0)
    else:
        gate = affine("gate_proj", x)
        hidden = hidden * gate / (1 + torch.exp(-gate))
    assert relative_error(layer(x), affine("down_proj", hidden)) < 1e-13
    y, aux = layer(x, return_aux=True)
    assert torch.equal(y, layer(x))
    assert aux == {}


@pytest.mark.parametrize("kind", [MLP, SwiGLU])
def test_dropout_acts_on_inner_units_in_training_only(kind):
    layer, x = kind(d_model=12, d_ff=20, dropout=0.5), torch.randn(2, 12)
    seen = []
    layer.down_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    layer(x)
    layer.eval()(x)
    assert seen[0].shape == seen[1].shape == (2, 20)
    kept = seen[0] != 0
    assert not kept.all()
    assert torch.allclose(seen[0][kept], 2 * seen[1][kept])


def test_what_hangs_on_the_first_projection_acts_in_training_too():
    layer, x = MLP(d_model=12, d_ff=20, dropout=0.5), torch.randn(2, 12)
    seen = []
    handle = layer.up_proj.register_forward_hook(lambda module, args, output: seen.append(output))
    layer(x)
    assert torch.equal(seen[0] + layer.up_proj.bias, layer.up_proj(x))  # its bias comes with the activation
    handle.remove()
    torch.nn.utils.parametrizations.weight_norm(layer.up_proj)
    layer(x).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.up_proj.parameters())


def test_training_and_evaluation_agree_on_the_dtype_of_mixed_operands():
    layer, x = MLP(d_model=12, d_ff=20, dropout=0.5).bfloat16(), torch.randn(2, 12, dtype=torch.bfloat16)
    layer.up_proj.bias.data = layer.up_proj.bias.data.float()
    assert layer(x).dtype == layer.eval()(x).dtype == torch.float32


@pytest.mark.parametrize("kind", [MLP, SwiGLU])
def test_initial_weights_have_the_stated_deviation_and_biases_are_zero(kind):
    layer = kind(d_model=300, d_ff=500, init_scale=0.7)
    for name, parameter in layer.named_parameters():
        if "bias" in name:
            assert parameter.eq(0).all()
        else:
            assert parameter.std().item() == pytest.approx(0.7 / parameter.shape[1] ** 0.5, rel=0.02), name
            assert parameter.abs().max() <= 2.001 * 0.7 / parameter.shape[1] ** 0.5 / 0.8796


def test_widths_below_one_are_refused():
    with pytest.raises(ValueError, match="d_ff=0 must be an integer of at least 1"):
        SwiGLU(d_model=12, d_ff=0)

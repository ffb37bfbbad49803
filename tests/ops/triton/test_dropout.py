import pytest
import torch
from torch.nn import functional as F

from switchhead.nn.dropout import Dropout
from switchhead.nn.feed_forward import MLP
from switchhead.ops import dropout
from switchhead.ops.triton.dropout import _keep_mask, _relu_dropout, _relu_dropout_backward, keep_mask, relu_dropout
from tests.helpers import check_operator, gradients, relative_error

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}


def operands(shape=(3, 50, 70), dtype=torch.float32, *, device):
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    return x, torch.randn(shape[-1], device=device, requires_grad=True)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(3, 50, 70), (1, 1, 1), (300, 41), (2, 4099)])
def test_units_above_zero_are_scaled_or_dropped_and_so_are_their_gradients(shape, dtype, with_bias, device):
    x, bias = operands(shape, dtype, device=device)
    out = relu_dropout(x, bias if with_bias else None, 0.25)
    assert out.dtype == dtype
    x64, bias64 = (t.detach().double().requires_grad_() for t in (x, bias))
    expected = F.relu(x64 + bias64 if with_bias else x64)
    kept = (out > 0) | (expected <= 0)  # which were dropped is the kernel's choice
    expected = expected * kept / 0.75
    cotangent = torch.randn(shape, device=device, dtype=torch.float64)
    assert relative_error(out, expected) <= TOLERANCE[dtype]
    inputs, exact = ((x, bias), (x64, bias64)) if with_bias else ((x,), (x64,))
    found = gradients(out, *inputs, cotangent=cotangent.to(dtype))
    for grad, other, of in zip(found, gradients(expected, *exact, cotangent=cotangent), inputs, strict=True):
        assert grad.dtype == of.dtype
        assert relative_error(grad, other) <= TOLERANCE[dtype]


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_units_are_dropped_with_their_probability_and_independently(p, alone, device):
    torch.manual_seed(0)
    rows, width = 256, 512
    ones = torch.ones(rows, width, device=device)
    out = dropout(ones, p, backend="triton") if alone else relu_dropout(ones, None, p)
    dropped = (out == 0).double()
    assert out.max().item() == pytest.approx(1 / (1 - p), rel=1e-6)
    deviation = (p * (1 - p)) ** 0.5
    assert abs(dropped.mean() - p) < 4 * deviation / (rows * width) ** 0.5
    for part in (dropped.mean(0) - p, dropped.mean(1) - p):  # no row and no column sticks out
        assert part.abs().max() < 5 * deviation / (len(dropped) if part.numel() == width else width) ** 0.5
    centred = (dropped - p).flatten()
    for distance in (1, 2, 4, width, 1024, 4096):  # neighbours, rows, and the kernel's groups and programs
        together = (centred[:-distance] * centred[distance:]).mean() / deviation**2
        assert abs(together) < 5 / (rows * width) ** 0.5


def test_draws_repeat_with_the_generator_and_not_otherwise(device):
    x, bias = operands(device=device)

    def draw():
        return relu_dropout(x, bias, 0.5)

    torch.manual_seed(1)
    first, second = draw(), draw()
    torch.manual_seed(1)
    assert torch.equal(draw(), first)
    assert torch.equal(draw(), second)
    assert not torch.equal(first, second)


def test_what_is_not_finite_is_seen(device):
    x = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1.0]], device=device).expand(64, 4)
    out = relu_dropout(x, None, 0.5)
    assert out[:, 0].isnan().all()
    assert set(out[:, 1].tolist()) == {0.0, float("inf")}
    assert not out[:, 2].any()


def test_rows_of_any_strides_and_none(device):
    x, bias = operands((6, 5, 8), device=device)
    torch.manual_seed(2)
    expected = relu_dropout(x.transpose(0, 1).contiguous(), bias, 0.5)
    torch.manual_seed(2)
    assert torch.equal(relu_dropout(x.transpose(0, 1), bias, 0.5), expected)
    spaced = torch.zeros(2 * len(bias), device=device)
    spaced[::2] = bias.detach()
    torch.manual_seed(2)
    assert torch.equal(relu_dropout(x.transpose(0, 1), spaced[::2], 0.5), expected)
    none = relu_dropout(x[:0], bias, 0.5)
    assert none.shape == (0, 5, 8)
    assert keep_mask(x[:0], 0.5)[0].shape == (0, 5, 8)
    assert not any(grad.any() for grad in gradients(none, x, bias, cotangent=none))


def test_operators_tell_a_compiler_what_they_do(device):
    x, bias = operands((7, 12), torch.bfloat16, device=device)
    seed = torch.zeros(1, dtype=torch.int64, device=device)
    check_operator(_keep_mask, (seed, [3, 5], 2**29), differentiable=False)
    for given in (bias, None):
        check_operator(_relu_dropout, (x, given, seed, 2**29, 4 / 3))
        check_operator(
            _relu_dropout_backward, (torch.randn_like(x), torch.randn_like(x).relu(), 4 / 3, given is not None)
        )


@pytest.mark.gpu
def test_compiled_dropout_draws_masks_that_backward_sees():
    layer = torch.compile(Dropout(0.25), fullgraph=True)
    x = torch.randn(300, 41, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = layer(x)
    kept = out != 0
    assert abs(kept.double().mean() - 0.75) < 0.02
    assert torch.equal(out, torch.where(kept, (x.float() / 0.75).bfloat16(), 0.0))
    (grad,) = gradients(out, x, cotangent=torch.ones_like(out))
    assert torch.equal(grad, torch.where(kept, 1 / 0.75, 0.0).bfloat16())
    assert not torch.equal(layer(x), out)
    layer.eval()
    assert torch.equal(layer(x), x)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_on_a_gpu_keeps_its_inner_units_once(compiled):
    layer = MLP(d_model=64, d_ff=256, dropout=0.2).cuda()
    layer = torch.compile(layer, fullgraph=True) if compiled else layer
    x = torch.randn(1000, 64, device="cuda", requires_grad=True)
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), torch.autocast("cuda", torch.bfloat16):
        y = layer(x)
    y.sum().backward()
    assert sum(size for size in kept.values() if size >= 1000 * 256) <= 1000 * 256 * 2 + 1000
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())

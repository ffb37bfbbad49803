import pytest
import torch
from torch import nn

from switchhead import SwitchHeadAttention
from switchhead.nn import MLP, Block, SigmaMoE
from tests.helpers import relative_error


def block(dropout=0.0):
    attention = SwitchHeadAttention(d_model=12, n_heads=2, n_experts=3, d_head=7, k=2, positions="relative")
    norms = dict(attention_norm=nn.LayerNorm(12), feed_forward_norm=nn.LayerNorm(12))
    return Block(attention=attention, feed_forward=MLP(d_model=12, d_ff=20, dropout=dropout), dropout=dropout, **norms)


def test_block_is_two_pre_norm_residual_sublayers():
    module, x = block(), torch.randn(2, 5, 12)
    middle = x + module.attention(nn.functional.layer_norm(x, (12,)))
    hidden = (nn.functional.layer_norm(middle, (12,)) @ module.feed_forward.up_proj.weight.mT).relu()
    expected = middle + hidden @ module.feed_forward.down_proj.weight.mT  # biases start at zero
    assert relative_error(module(x), expected) < 1e-6


def test_memory_is_normed_by_the_block():
    module, x = block(), torch.randn(2, 8, 12)
    assert relative_error(module(x[:, 5:], memory=x[:, :5]), module(x)[:, 5:]) < 1e-5


def test_padding_of_a_context_hides_no_token_of_the_input_from_auxiliary_losses():
    module, x, context = block(), torch.randn(2, 5, 12), torch.randn(2, 3, 12)
    module.feed_forward = SigmaMoE(d_model=12, n_experts=3, expert_size=4, k=1)
    seen = []
    module.feed_forward_norm.register_forward_hook(lambda norm, args, tokens: seen.append(tokens))
    padding = torch.tensor([[False, True, True], [False, False, True]])
    _, aux = module(x, context=context, key_padding_mask=padding, return_aux=True)
    _, expected = module.feed_forward(seen[0], return_aux=True)
    assert aux == {"ffn_entropy_loss": expected["entropy_loss"]}


def test_dropout_acts_on_both_sublayers_in_training_only():
    module, x = block(dropout=0.5), torch.randn(2, 5, 12)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


def test_initial_mlp_weights_are_truncated_and_have_the_stated_deviation():
    mlp = MLP(d_model=300, d_ff=500, init_scale=0.7)
    for projection, fan_in in ((mlp.up_proj, 300), (mlp.down_proj, 500)):
        std = 0.7 / fan_in**0.5
        assert projection.weight.std().item() == pytest.approx(std, rel=0.02)
        assert projection.weight.abs().max() <= 2.001 * std / 0.8796
        assert projection.bias.eq(0).all()

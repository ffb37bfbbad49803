import pytest
import torch
from torch import nn

from switchhead import MultiHeadAttention, SwitchHeadAttention
from switchhead.nn import HeadGatedAttention, MoAAttention, QKNorm
from tests.helpers import relative_error


def by_hand(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def random_norm():
    norm = QKNorm(5).double()
    for weight in norm.parameters():
        nn.init.normal_(weight)
    return norm


def test_queries_and_keys_are_divided_by_their_root_mean_square():
    norm = random_norm()
    q, k = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randn(2, 1, 6, 5, dtype=torch.float64)
    found_q, found_k = norm(q, k)
    assert relative_error(found_q, by_hand(q, norm.q_weight)) < 1e-14
    assert relative_error(found_k, by_hand(k, norm.k_weight)) < 1e-14


def test_zeros_padded_behind_a_head_do_not_count():
    norm = random_norm()
    q = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    padded, _ = norm(nn.functional.pad(q, (0, 3)), q)
    plain, _ = norm(q, q)
    assert torch.equal(padded[..., :5], plain)
    assert padded[..., 5:].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes_pass_through_whatever_the_weights_are(dtype, autocast):
    norm, q = QKNorm(64), torch.randn(1, 2, 3, 64)
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        found, _ = norm(q.to(dtype), q)
    assert found.dtype == dtype
    assert relative_error(found, by_hand(q, 1.0)) < 0.01


def test_scores_do_not_depend_on_the_size_of_the_projections():
    x = torch.randn(1, 6, 12, dtype=torch.float64)
    layers = [
        SwitchHeadAttention(d_model=12, n_heads=2, n_experts=3, d_head=6, k=2, positions="rotary", qk_norm=True),
        MultiHeadAttention(d_model=12, n_heads=2, d_head=6, positions="rotary", qk_norm=True),
        MoAAttention(d_model=12, n_heads=2, n_experts=3, d_head=6, positions="rotary", qk_norm=True),
        HeadGatedAttention(d_model=12, n_heads=2, k=1, d_head=6, positions="rotary", qk_norm=True),
    ]
    for layer in layers:
        layer.double()
        expected = layer(x)
        with torch.no_grad():
            layer.q_proj.weight.mul_(1e3)
            layer.k_proj.weight.mul_(1e3)
        assert relative_error(layer(x), expected) < 1e-4  # up to the small number added to the mean square


def test_the_norm_stands_before_the_rotation():
    layer = MultiHeadAttention(d_model=12, n_heads=1, d_head=6, positions="rotary", qk_norm=True).double()
    with torch.no_grad():
        layer.qk_norm.q_weight.copy_(torch.randn(6))
    x = torch.randn(1, 4, 12, dtype=torch.float64)
    q, k, v = ((x @ getattr(layer, f"{p}_proj").weight.mT)[:, None] for p in "qkv")
    q, k = by_hand(q, layer.qk_norm.q_weight), by_hand(k, layer.qk_norm.k_weight)
    table = layer.positions.table(torch.arange(4), 6, torch.float64)
    q, k = layer.positions.rotate(q, table), layer.positions.rotate(k, table)
    attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert relative_error(layer(x), attended[:, 0] @ layer.o_proj.weight.mT) < 1e-12

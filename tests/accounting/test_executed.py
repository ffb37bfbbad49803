"""What the modules execute, counted by PyTorch, against what it should come to by hand."""

import pytest

from switchhead.accounting import attention_cost, feed_forward_cost
from switchhead.hf import SwitchHeadConfig

T, M, D, H, d, E, K = 16, 32, 24, 3, 6, 5, 2
S = T + M
SHAPE = {"hidden_size": D, "num_attention_heads": H, "head_dim": d}
MEMORY = {"positions": "relative", "memory_length": M}
SWITCHHEAD = {"num_experts": E, "num_experts_per_tok": K}
MOA = {"attention": "moa", "num_experts": E, "gating": "softmax"}
GATING = {"attention": "head_gating", "num_experts_per_tok": K}


def attended(keys, *, relative):
    """Content scores, position scores, weighted sum; positions are projected for every distance that occurs."""
    return H * (2 + relative) * T * keys * d


@pytest.mark.parametrize(
    ("kind", "macs"),
    [
        ({"attention": "mha"}, H * 4 * T * d * D + attended(T, relative=False)),
        ({"attention": "mha", "num_key_value_heads": 1}, (2 * H + 2) * T * d * D + attended(T, relative=False)),
        ({"attention": "mha", **MEMORY}, H * (2 * T + 2 * S + S) * d * D + attended(S, relative=True)),
        (
            {"attention": "mha", "memory_length": M},
            H * (2 * T + 2 * S) * d * D + attended(S, relative=False),
        ),
        (
            SWITCHHEAD,
            H * (2 * T + 2 * K * T) * d * D + 2 * H * E * D * T + attended(T, relative=False),
        ),
        (
            SWITCHHEAD | MEMORY,  # the source router and the values' experts see the memory, too
            H * (T + S + K * S + K * T + S) * d * D + H * E * D * (T + S) + attended(S, relative=True),
        ),
        (
            SWITCHHEAD | {"shared_selection": True},
            H * (2 * T + 2 * K * T) * d * D + H * E * D * T + attended(T, relative=False),
        ),
        (
            SWITCHHEAD | {"expert_projections": "q"},
            H * (3 * T + K * T) * d * D + H * E * D * T + attended(T, relative=False),
        ),
        (MOA, (2 * H + 2) * T * d * D + E * D * T + attended(T, relative=False)),
        (MOA | MEMORY, (2 * H * T + 2 * S + S) * d * D + E * D * T + attended(S, relative=True)),
        (GATING, H * 4 * T * d * D + H * D * T + attended(T, relative=False)),
    ],
    ids=str,
)
def test_attention_executes_the_products_of_its_equation(kind, macs):
    config = SwitchHeadConfig(**SHAPE, **kind)
    assert attention_cost(config, chunk_length=T, convention="executed").macs == macs


F = 40
SIGMA_MOE = {
    "feed_forward": "sigma_moe",
    "ffn_num_experts": E,
    "ffn_num_experts_per_tok": K,
    "ffn_expert_size": F,
}


@pytest.mark.parametrize(
    ("kind", "macs", "gates"),
    [
        ({"intermediate_size": F}, 2 * F * D * T, 0),
        ({"intermediate_size": F, "feed_forward": "swiglu"}, 3 * F * D * T, 0),
        (SIGMA_MOE, (2 * K * F * D + E * D) * T, K * F * T),
    ],
    ids=str,
)
def test_feed_forward_executes_the_products_of_its_equation(kind, macs, gates):
    config = SwitchHeadConfig(**SHAPE, **kind)
    assert feed_forward_cost(config, chunk_length=T, convention="executed").macs == macs
    assert feed_forward_cost(config, chunk_length=T).macs == macs + gates


def test_executed_floats_are_what_the_backward_pass_needs():
    """Dense attention without positions on a CPU has to keep its input, q, k, v, the heads' results, and one number for
    each query and head: the fused kernel computes its weights again. It may keep the projections side by side, too."""
    config = SwitchHeadConfig(**SHAPE, attention="mha", positions="none")
    needed = T * D + 3 * T * H * d + T * H * d + T * H
    assert needed <= attention_cost(config, chunk_length=T, convention="executed").floats <= needed + 3 * H * d * D


def test_only_relative_positions_keep_attention_matrices():
    def floats(**positions):
        config = SwitchHeadConfig(**SHAPE, attention="mha", **positions)
        costs = [attention_cost(config, chunk_length=length, convention="executed").floats for length in (64, 128)]
        return costs[1] / costs[0]

    assert floats(positions="none") <= 2
    assert floats(positions="relative") > 2.5


def test_bad_arguments_are_named():
    config = SwitchHeadConfig(**SHAPE)
    with pytest.raises(ValueError, match="unknown convention 'guessed'"):
        feed_forward_cost(config, chunk_length=T, convention="guessed")  # type: ignore[arg-type]
    config.feed_forward = "unheard_of"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="feed_forward 'unheard_of'"):
        feed_forward_cost(config, chunk_length=T)

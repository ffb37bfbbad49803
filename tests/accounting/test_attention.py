import pytest

from switchhead.accounting import attention_cost, key_value_numbers
from switchhead.hf import SwitchHeadConfig

T, M, D, H, d = 16, 32, 24, 3, 6
SHAPE = {"hidden_size": D, "num_attention_heads": H, "head_dim": d}
KINDS = {
    "mha": {"attention": "mha"},
    "switchhead": {"num_experts": 5, "num_experts_per_tok": 2},
    "moa": {"attention": "moa", "num_experts": 5, "gating": "softmax"},
    "head_gating": {"attention": "head_gating", "num_experts_per_tok": 2},
}


def test_dense_cost_is_the_papers_equation():
    config = SwitchHeadConfig(**SHAPE, attention="mha", positions="relative", memory_length=M)
    C = 1 + M // T
    cost = attention_cost(config, chunk_length=T)
    assert cost.macs == H * (4 * T * d * D + 2 * C * T**2 * d + 2 * C * T * d * D)
    assert cost.floats == H * (4 * T * d + 2 * C * T**2 + 2 * C * T * d)


@pytest.mark.parametrize(("projections", "n_routers"), [("vo", 2), ("v", 1), ("qo", 1), ("qkvo", 2), ("kv", 1)])
def test_switchhead_cost_is_the_papers_equation_and_every_router(projections, n_routers):
    E, k, n = 5, 2, len(projections)
    config = SwitchHeadConfig(
        **SHAPE,
        num_experts=E,
        num_experts_per_tok=k,
        expert_projections=projections,
        positions="relative",
        memory_length=M,
    )
    C = 1 + M // T
    cost = attention_cost(config, chunk_length=T)
    equation = H * (
        (4 - n) * T * d * D + n * T * k * d * (D + 1) + 2 * C * T**2 * d + 2 * C * T * d * D
    )  # fmt: skip
    assert cost.macs == equation + n_routers * H * E * D * T
    assert cost.floats == H * (4 * T * d + 2 * C * T**2 + 2 * C * T * d)


@pytest.mark.parametrize("convention", ["consistent", "published"])
def test_moa_cost_is_the_papers_equation_and_its_router(convention):
    E = 7
    config = SwitchHeadConfig(
        **SHAPE, attention="moa", num_experts=E, gating="softmax", positions="relative", memory_length=M
    )
    C = 1 + M // T
    cost = attention_cost(config, chunk_length=T, convention=convention)
    equation = (2 * H + 2) * T * d * D + 2 * H * C * T**2 * d + 2 * C * T * d * D
    scaling, positions = (2 * H * T * d, T) if convention == "published" else (0, C * T)
    assert cost.macs == equation + E * D * T + scaling
    assert cost.floats == (2 * H + 2) * T * d + 2 * H * C * T**2 + 2 * positions * d


def test_head_gating_saves_nothing():
    dense = attention_cost(SwitchHeadConfig(**SHAPE, attention="mha"), chunk_length=T)
    gated = attention_cost(SwitchHeadConfig(**SHAPE, attention="head_gating", num_experts_per_tok=1), chunk_length=T)
    assert gated.macs == dense.macs + T * (H * D + d)  # a router, one gate
    assert gated.floats == dense.floats


def test_shared_selection_saves_one_router():
    two = SwitchHeadConfig(**SHAPE, num_experts=5)
    one = SwitchHeadConfig(**SHAPE, num_experts=5, shared_selection=True)
    saved = attention_cost(two, chunk_length=T).macs - attention_cost(one, chunk_length=T).macs
    assert saved == H * 5 * D * T


@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize("convention", ["consistent", "published", "executed"])
def test_rotary_positions_cost_nothing(attention, convention):
    costs = [
        attention_cost(
            SwitchHeadConfig(**SHAPE, **KINDS[attention], positions=positions), chunk_length=T, convention=convention
        ).macs
        for positions in ("none", "rotary")
    ]
    assert costs[0] == costs[1]


def test_grouped_keys_and_values_are_projected_once_a_group():
    grouped = SwitchHeadConfig(**SHAPE, attention="mha", num_key_value_heads=1)
    full = SwitchHeadConfig(**SHAPE, attention="mha")
    saved = attention_cost(full, chunk_length=T).macs - attention_cost(grouped, chunk_length=T).macs
    assert saved == 2 * (H - 1) * T * d * D


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ({"attention": "mha"}, 2 * H * d),
        ({"attention": "mha", "num_key_value_heads": 1}, 2 * d),
        ({"num_experts": 5}, 2 * H * d),
        ({"attention": "moa", "num_experts": 5, "gating": "softmax"}, 2 * d),
        ({"attention": "head_gating"}, 2 * H * d),
        ({"num_experts": 1, "num_experts_per_tok": 1}, 2 * H * d),
    ],
)
def test_the_cache_holds_one_key_and_one_value_a_head_whatever_the_experts(kind, numbers):
    assert key_value_numbers(SwitchHeadConfig(**SHAPE, **kind)) == numbers


def test_bad_arguments_are_named():
    config = SwitchHeadConfig(**SHAPE)
    with pytest.raises(ValueError, match="unknown convention 'guessed'; choose one of consistent, published, executed"):
        attention_cost(config, chunk_length=T, convention="guessed")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunk_length must be at least 1; got 0"):
        attention_cost(config, chunk_length=0)
    config.attention = "unheard_of"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="attention 'unheard_of'"):
        attention_cost(config, chunk_length=T)

import pytest
import torch

from switchhead.accounting import count_parameters
from switchhead.hf import SwitchHeadConfig, SwitchHeadForCausalLM

SMALL = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "head_dim": 6,
    "num_attention_heads": 4,
}
SIGMA_MOE = {
    "feed_forward": "sigma_moe",
    "ffn_num_experts": 6,
    "ffn_num_experts_per_tok": 2,
    "ffn_expert_size": 10,
}
KINDS = {
    "dense": {"attention": "mha", "positions": "none"},
    "dense rotary, grouped keys": {"attention": "mha", "positions": "rotary", "num_key_value_heads": 2},
    "dense relative": {"attention": "mha", "positions": "relative"},
    "tied embeddings": {"attention": "mha", "tie_word_embeddings": True},
    "switchhead rotary": {"num_experts": 3, "num_experts_per_tok": 2},
    "switchhead relative": {"num_experts": 3, "positions": "relative"},
    "no experts": {"num_experts": 3, "expert_projections": ""},
    "queries": {"num_experts": 3, "expert_projections": "q"},
    "keys and values": {"num_experts": 3, "expert_projections": "kv"},
    "all projections": {"num_experts": 3, "expert_projections": "qkvo"},
    "shared selection": {"num_experts": 3, "shared_selection": True},
    "one expert": {"num_experts": 1, "num_experts_per_tok": 1},
    "one expert, no output gate": {"num_experts": 1, "num_experts_per_tok": 1, "expert_projections": "qkv"},
    "moa rotary": {"attention": "moa", "num_experts": 5, "gating": "softmax"},
    "moa relative": {"attention": "moa", "num_experts": 5, "positions": "relative"},
    "head gating rotary": {"attention": "head_gating", "num_experts_per_tok": 2},
    "head gating relative": {"attention": "head_gating", "num_experts_per_tok": 2, "positions": "relative"},
    "sigma-moe": {"num_experts": 3} | SIGMA_MOE,
    "sigma-moe, dense attention, no biases": {"attention": "mha", "use_bias": False} | SIGMA_MOE,
    "modern": {"norm": "rmsnorm", "qk_norm": True, "feed_forward": "swiglu", "use_bias": False},
    "swiglu with biases": {"feed_forward": "swiglu"},
    "modern moa": {"attention": "moa", "num_experts": 5, "norm": "rmsnorm", "qk_norm": True},
}


def part_of(name: str, parameter: torch.Tensor) -> str:
    """The part that a parameter of the model belongs to, by its name and shape."""
    if "embed_tokens" in name:
        return "embedding"
    if "lm_head" in name:
        return "output"
    if ".feed_forward." in name:
        return "feed_forward"
    if "router" in name:
        return "routers"
    if any(word in name for word in ("position_proj", "_bias", "scale")):
        return "positions"
    if "norm" in name:
        return "norms"
    return "experts" if parameter.ndim == 4 else "projections"


@pytest.mark.parametrize("kind", KINDS)
def test_every_part_is_what_the_model_has(kind):
    config = SwitchHeadConfig(**SMALL | KINDS[kind])
    with torch.device("meta"):
        model = SwitchHeadForCausalLM(config)
    model.tie_weights()
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        part = part_of(name, parameter)
        found[part] = found.get(part, 0) + parameter.numel()
    count = count_parameters(config)
    assert {name: part.total for name, part in count.parts.items() if part.total} == found
    assert count.total == sum(parameter.numel() for parameter in model.parameters())


def test_active_parameters_leave_out_the_experts_that_are_not_chosen():
    config = SwitchHeadConfig(**SMALL, num_experts=5, num_experts_per_tok=2)
    count = count_parameters(config)
    expert = 24 * 6
    assert count.total - count.active == 2 * (2 * 4 * (5 - 2) * expert)  # layers, values and outputs, heads, experts


def test_of_moa_and_head_gating_the_heads_in_use_are_active():
    moa = count_parameters(SwitchHeadConfig(**SMALL, attention="moa", num_experts=5))
    assert moa.parts["experts"].total - moa.parts["experts"].active == 2 * 2 * (5 - 4) * 24 * 6
    gated = count_parameters(SwitchHeadConfig(**SMALL, attention="head_gating", num_experts_per_tok=3))
    assert gated.total - gated.active == 2 * 2 * (4 - 3) * 24 * 6  # layers, queries and outputs


def test_of_sigma_moe_the_chosen_experts_are_active():
    count = count_parameters(SwitchHeadConfig(**SMALL, attention="mha", **SIGMA_MOE))
    assert count.total - count.active == 2 * (6 - 2) * 2 * 10 * 24


def test_dense_models_are_active_as_a_whole():
    count = count_parameters(SwitchHeadConfig(**SMALL, attention="mha"))
    assert count.active == count.total


def test_a_kind_without_a_formula_is_refused():
    for field in ("attention", "feed_forward", "norm"):
        config = SwitchHeadConfig(**SMALL)
        setattr(config, field, "unheard_of")
        with pytest.raises(ValueError, match=rf"{field} 'unheard_of'; known: "):
            count_parameters(config)

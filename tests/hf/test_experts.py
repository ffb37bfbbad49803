"""Other models' experts on our kernels, against transformers' own loop over experts."""

import pytest
import torch
from transformers import GptOssConfig, MixtralConfig, NemotronHConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralForCausalLM
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from switchhead.hf.experts import NAME
from tests.helpers import gradients, relative_error

SIZES = dict(hidden_size=12, intermediate_size=10, num_attention_heads=2, num_key_value_heads=1, head_dim=6)


def mixtral_experts():
    return MixtralExperts(MixtralConfig(**SIZES, num_local_experts=5))


def gpt_oss_experts():  # biases, and gates interleaved with the rest
    return GptOssExperts(GptOssConfig(**SIZES, num_local_experts=5))


def nemotron_experts():  # no gate
    return NemotronHExperts(NemotronHConfig(hidden_size=12, moe_intermediate_size=10, n_routed_experts=5))


@pytest.mark.parametrize("make", [mixtral_experts, gpt_oss_experts, nemotron_experts])
def test_experts_of_other_models_have_the_same_values_and_gradients(make):
    experts = make().double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(9, 12, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(9, 2, dtype=torch.float64, requires_grad=True)
    chosen = torch.stack([torch.randperm(5)[:2] for _ in range(9)])
    results = []
    for implementation in ("eager", NAME):
        experts.config._experts_implementation = implementation
        y = experts(x, chosen, weights)
        results.append((y, *gradients(y, x, weights, *experts.parameters())))
    for expected, found in zip(*results, strict=True):
        assert relative_error(found, expected) < 1e-12


@torch.no_grad()
def test_a_whole_model_can_be_switched():
    sizes = dict(num_hidden_layers=2, num_local_experts=4, vocab_size=50, max_position_embeddings=32)
    model = MixtralForCausalLM(MixtralConfig(**SIZES, **sizes)).eval()
    tokens = torch.randint(50, (2, 7))
    model.set_experts_implementation("eager")
    expected = model(tokens).logits
    model.set_experts_implementation(NAME)
    assert model.config._experts_implementation == NAME
    assert relative_error(model(tokens).logits, expected) < 1e-5


def test_what_the_kernels_do_not_know_is_refused():
    experts = mixtral_experts()
    experts.config._experts_implementation = NAME
    inputs = torch.randn(3, 12), torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1)
    for flag in ("_is_expert_parallel", "has_post_expert_norm"):
        setattr(experts, flag, True)
        with pytest.raises(ValueError, match="use 'grouped_mm' instead"):
            experts(*inputs)
        setattr(experts, flag, False)

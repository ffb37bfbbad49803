import contextlib

import pytest
import torch

from switchhead.hf import SwitchHeadConfig, SwitchHeadForCausalLM
from switchhead.ops.availability import as_on_a_gpu

SIZES = {
    "vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 1, "head_dim": 8, "num_experts": 4, "dropout": 0.3,
    "num_experts_per_tok": 2, "max_position_embeddings": 12,
}  # fmt: skip
KINDS = {
    "rotary": {"positions": "rotary"},
    "relative": {"positions": "relative", "memory_length": 6},
    "many experts": {"positions": "rotary", "num_experts": 5, "num_experts_per_tok": 1},
    "all projections": {"positions": "rotary", "expert_projections": "qkvo"},
    "sigma-MoE": {
        "feed_forward": "sigma_moe",
        "ffn_num_experts": 4,
        "ffn_num_experts_per_tok": 2,
        "ffn_expert_size": 8,
    },
    "dense, relative": {"attention": "mha", "num_experts": None, "num_experts_per_tok": None, "positions": "relative"},
}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_give_the_same_gradients(kind, reentrant, device):
    torch.manual_seed(0)
    model = SwitchHeadForCausalLM(SwitchHeadConfig(**{**SIZES, **KINDS[kind]})).to(device).train()
    tokens = torch.randint(31, (2, 12), device=device)

    def gradients():
        model.zero_grad()
        torch.manual_seed(5)
        model(tokens, labels=tokens).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    with as_on_a_gpu() if device == "cpu" else contextlib.nullcontext():  # kernels, interpreted
        expected = gradients()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        found = gradients()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name

import pytest
import torch

from switchhead.data import ByteVocabulary
from switchhead.hf import SwitchHeadConfig, SwitchHeadForCausalLM


@pytest.fixture
def vocabulary():
    return ByteVocabulary()


@pytest.fixture
def make_model(vocabulary):
    """A small model whose predictions depend strongly on what it has read; float64."""

    def make(**changes):
        sizes = {
            "vocab_size": vocabulary.size,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "head_dim": 6,
            "num_experts": 3,
            "intermediate_size": 24,
            "max_position_embeddings": 8,
            "bos_token_id": vocabulary.beginning,
            "eos_token_id": vocabulary.beginning,
        }
        torch.manual_seed(0)
        model = SwitchHeadForCausalLM(SwitchHeadConfig(**{**sizes, **changes})).double().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" not in name:
                    parameter.mul_(3)
        return model

    return make

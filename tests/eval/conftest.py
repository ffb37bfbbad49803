from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from switchhead.data import ByteVocabulary
from switchhead.eval import LanguageModel
from switchhead.hf import SwitchHeadConfig, SwitchHeadForCausalLM

DATA = Path(__file__).parent / "data"


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


class NextToken(torch.nn.Module):
    """A language model given as a function: tokens so far to a row of log-probabilities of the next."""

    device = torch.device("cpu")

    def __init__(self, size, log_probabilities, max_position_embeddings=64):
        super().__init__()
        self.size, self.log_probabilities = size, log_probabilities
        self.config = SimpleNamespace(max_position_embeddings=max_position_embeddings)

    def forward(self, input_ids):
        rows = [[self.log_probabilities(row[: i + 1]) for i in range(len(row))] for row in input_ids.tolist()]
        return SimpleNamespace(logits=torch.tensor(rows, dtype=torch.float64).view(*input_ids.shape, self.size))


@pytest.fixture
def uniform(vocabulary):
    """Every token is as likely as any other."""
    return NextToken(vocabulary.size, lambda tokens: [0.0] * vocabulary.size)


@pytest.fixture
def memorising(vocabulary):
    """A function: texts to a model that goes on with certainty as they do, wherever only one of them could follow."""

    def make(*texts):
        known = {}
        for text in texts:
            tokens = [vocabulary.beginning, *vocabulary.encode(text).tolist()]
            known |= {tuple(tokens[:i]): tokens[i] for i in range(1, len(tokens))}

        def log_probabilities(tokens):
            following = known.get(tuple(tokens))
            return [0.0 if token == following else -50.0 for token in range(vocabulary.size)]

        return NextToken(vocabulary.size, log_probabilities, max_position_embeddings=4096)

    return make


@pytest.fixture
def language_model(vocabulary):
    """A function: a model to a `LanguageModel` over bytes."""
    return lambda model: LanguageModel(name="model", model=model, vocabulary=vocabulary)

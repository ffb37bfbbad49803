"""Small models whose output depends on everything in front of it."""

import itertools

import torch

from switchhead.hf import SwitchHeadConfig, SwitchHeadForCausalLM

ATTENTIONS = ("switchhead", "mha")
POSITIONS = ("none", "rotary", "relative")
KINDS = tuple(itertools.product(ATTENTIONS, POSITIONS))

SIZES = dict(
    vocab_size=61, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, head_dim=10, intermediate_size=32
)


def small_config(attention: str = "switchhead", positions: str = "rotary", **changes) -> SwitchHeadConfig:
    return SwitchHeadConfig(**SIZES | dict(attention=attention, positions=positions) | changes)


def lively_model(config: SwitchHeadConfig, seed: int = 0) -> SwitchHeadForCausalLM:
    """Weights so large that attention matters and greedy decoding does not repeat one token; float64, evaluating."""
    torch.manual_seed(seed)
    model = SwitchHeadForCausalLM(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            if "norm" not in name:
                parameter.mul_(3.0)
            if name.endswith("_bias"):  # Transformer-XL's, zero at first
                parameter.normal_()
    return model


def random_tokens(*shape: int, seed: int = 1, vocab_size: int = 61) -> torch.Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def greedy_by_full_forward(model: SwitchHeadForCausalLM, tokens: torch.Tensor, n_new: int) -> torch.Tensor:
    """Decode without any cache, and without `generate`."""
    with torch.no_grad():
        for _ in range(n_new):
            following = model(tokens).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, following], dim=1)
    return tokens


def greedy(model: SwitchHeadForCausalLM, tokens: torch.Tensor, n_new: int, **options) -> torch.Tensor:
    return model.generate(tokens, max_new_tokens=n_new, do_sample=False, **options)

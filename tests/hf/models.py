"""Small models whose output depends on everything in front of it."""

import itertools

import torch

from switchhead.hf import SwitchHeadConfig, SwitchHeadForCausalLM

ATTENTIONS = ("switchhead", "mha", "moa", "head_gating")
POSITIONS = ("none", "rotary", "relative")
KINDS = tuple(itertools.product(ATTENTIONS, POSITIONS))

SIZES = dict(
    vocab_size=61, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, head_dim=10, intermediate_size=32
)


# What a kind of attention needs beyond the sizes.
NEEDS = {"moa": dict(num_experts=4, gating="softmax")}
SIGMA_MOE = dict(
    feed_forward="sigma_moe",
    ffn_num_experts=4,
    ffn_num_experts_per_tok=2,
    ffn_expert_size=12,
    intermediate_size=SwitchHeadConfig.intermediate_size,  # without meaning here, so at its default
)
MODERN = dict(norm="rmsnorm", feed_forward="swiglu", qk_norm=True, use_bias=False, tie_word_embeddings=True)
# Models beside the plain ones of KINDS, as changes to `small_config`.
VARIANTS = {
    "switchall": SIGMA_MOE | dict(positions="relative"),
    "sigma-moe with dense attention": SIGMA_MOE | dict(attention="mha"),
    "dynamic k": SIGMA_MOE | dict(router_threshold=0.4, ffn_router_threshold=0.4),
    "moa with all losses": SIGMA_MOE
    | dict(attention="moa", cv_loss_weight=0.1, switch_loss_weight=0.1, router_z_loss_weight=0.1)
    | dict(ffn_entropy_loss_weight=0.1, gating="softmax_chosen"),
    **{f"modern {attention}": MODERN | dict(attention=attention, rotary_fraction=1.0) for attention in ATTENTIONS},
}


def small_config(attention: str = "switchhead", positions: str = "rotary", **changes) -> SwitchHeadConfig:
    return SwitchHeadConfig(
        **SIZES | NEEDS.get(attention, {}) | dict(attention=attention, positions=positions) | changes
    )


def variant_config(name: str, **changes) -> SwitchHeadConfig:
    return small_config(**VARIANTS[name] | changes)


def lively_model(config: SwitchHeadConfig, seed: int = 0) -> SwitchHeadForCausalLM:
    """Weights so large that attention matters and greedy decoding does not repeat one token; float64, evaluating."""
    torch.manual_seed(seed)
    model = SwitchHeadForCausalLM(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            if "norm" not in name:
                parameter.mul_(6.0 if "router" in name else 3.0)
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

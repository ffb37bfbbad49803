import pytest
import torch

from switchhead.hf import SwitchHeadConfig, SwitchHeadForCausalLM

# Published millions; the paper's tables 2, 3, 6, 7 and 8. vocab, d_model, layers, heads, d_head, d_ff.
DENSE = [
    ("relative", 8000, 412, 16, 10, 41, 2053, 47),
    ("relative", 8000, 412, 16, 2, 205, 2053, 47),
    ("relative", 8000, 1024, 18, 16, 64, 4110, 262),
    ("relative", 8000, 1024, 18, 4, 256, 4110, 262),
    ("relative", 8000, 1024, 18, 2, 512, 4110, 262),
    ("relative", 205, 512, 12, 8, 64, 2053, 41),
    ("relative", 205, 512, 12, 2, 256, 2053, 41),
    ("rotary", 8000, 412, 16, 10, 41, 2053, 45),
    ("rotary", 8000, 412, 16, 2, 205, 2053, 45),
    ("rotary", 8000, 1024, 18, 16, 64, 4110, 244),
    ("rotary", 8000, 1024, 18, 2, 512, 4110, 244),
]
# As above, then experts, k, expert projections, shared selection.
SWITCHHEAD = [
    ("relative", 8000, 412, 16, 2, 76, 2080, 5, 2, "vo", False, 47),
    ("relative", 8000, 412, 16, 2, 76, 2080, 5, 3, "vo", False, 47),
    ("relative", 8000, 412, 16, 2, 76, 2080, 5, 3, "vo", True, 47),
    ("relative", 8000, 412, 16, 3, 112, 2080, 5, 3, "vo", False, 63),
    ("relative", 8000, 1024, 18, 2, 132, 4147, 8, 4, "vo", False, 262),
    ("relative", 8000, 1024, 18, 4, 112, 4188, 4, 2, "vo", False, 262),
    ("relative", 8000, 1024, 18, 4, 112, 4188, 4, 2, "vo", True, 262),
    ("relative", 8000, 1024, 18, 6, 168, 4188, 4, 2, "vo", False, 376),
    ("relative", 205, 512, 12, 2, 112, 2088, 4, 2, "vo", False, 41),
    ("rotary", 8000, 412, 16, 2, 64, 2092, 5, 3, "vo", False, 45),
    ("rotary", 8000, 412, 16, 3, 84, 2092, 5, 3, "vo", False, 54),
    ("rotary", 8000, 1024, 18, 4, 100, 4136, 4, 2, "vo", False, 243),
    *(("relative", 8000, 412, 16, 2, 112, 2065, 5, 2, p, False, 47) for p in "qkvo"),
    *(("relative", 8000, 412, 16, 2, 76, 2080, 5, 2, p, False, 47) for p in ("kq", "ko", "qo", "kv", "qv")),
    *(("relative", 8000, 412, 16, 2, 56, 2115, 5, 2, p, False, 47) for p in ("kvo", "qvo", "kqo", "kqv")),
    ("relative", 8000, 412, 16, 2, 48, 2060, 5, 2, "kqvo", False, 47),
]


def parameters(**fields) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in SwitchHeadForCausalLM(SwitchHeadConfig(**fields)).parameters())


def sizes(positions, vocab_size, d_model, n_layers, n_heads, d_head, d_ff) -> dict:
    return dict(
        positions=positions,
        vocab_size=vocab_size,
        hidden_size=d_model,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        head_dim=d_head,
        intermediate_size=d_ff,
    )


@pytest.mark.parametrize("row", DENSE, ids=str)
def test_dense_models_have_the_published_number_of_parameters(row):
    *model, millions = row
    assert round(parameters(attention="mha", **sizes(*model)) / 1e6) == millions


@pytest.mark.parametrize("row", SWITCHHEAD, ids=str)
def test_switchhead_models_have_the_published_number_of_parameters(row):
    *model, n_experts, k, projections, shared, millions = row
    experts = dict(
        num_experts=n_experts, num_experts_per_tok=k, expert_projections=projections, shared_selection=shared
    )
    assert round(parameters(**sizes(*model), **experts) / 1e6) == millions

"""Inputs that make routers choose as wanted: evenly, one expert for most tokens, or as in a trained model.

The layer runs as it is, routers included. Router rows are made orthonormal, and the input's component along them is
replaced, so that the scores are the wanted ones and the rest of the input stays random.
"""

from __future__ import annotations

import pydoc_data.topics

import torch
from torch import Tensor

from switchhead.nn import SwitchHeadAttention

NAMES = ("uniform", "skewed", "trained")
_SHARE = 0.8  # of the tokens that a skewed router sends to its first expert


def steer(layer: SwitchHeadAttention, x: Tensor, scores: Tensor) -> Tensor:
    """x `[N, D]` changed so that the layer's routers give `scores` `[N, 2, H, E]` (destination, source)."""
    routers = (layer.destination_router, layer.source_router)
    weights = [router.weight for router in routers if router is not None]
    with torch.no_grad():
        rows = torch.cat([weight.flatten(0, 1) for weight in weights])  # [2*H*E, D]
        basis = torch.linalg.qr(rows.mT)[0].mT
        for weight, part in zip(weights, basis.chunk(2), strict=True):
            weight.copy_(part.view_as(weight))
        return x + (scores.flatten(1) - x @ basis.mT) @ basis


def wanted_scores(name: str, tokens: int, device: torch.device, *, n_heads: int, n_experts: int, k: int) -> Tensor:
    """Router scores `[N, 2, H, E]` of a kind of routing."""
    scores = torch.randn(tokens, 2, n_heads, n_experts, device=device)
    if name == "uniform":
        return scores
    if name == "skewed":
        first = torch.rand(tokens, 2, n_heads, device=device) < _SHARE
        scores[..., 0] = torch.where(first, scores.amax(-1) + 1.0, scores.amin(-1) - 1.0)
        return scores
    if name == "trained":
        return trained_scores(n_heads, n_experts, k, tokens, device)
    raise ValueError(f"routing {name!r} is unknown; use one of {', '.join(NAMES)}")


def trained_scores(heads: int, experts: int, k: int, tokens: int, device: torch.device, *, steps: int = 300) -> Tensor:
    """Router scores on English text of a small model with these heads and experts, trained on it for a moment."""
    from switchhead.hf import SwitchHeadConfig, SwitchHeadForCausalLM

    length, batch = 256, 32
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    data = torch.tensor(list(text.encode()), device=device)
    config = SwitchHeadConfig(
        vocab_size=256, hidden_size=256, num_hidden_layers=3, num_attention_heads=heads, head_dim=32,
        intermediate_size=512, attention="switchhead", positions="rotary", num_experts=experts,
        num_experts_per_tok=k, max_position_embeddings=length,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model = SwitchHeadForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)

    def windows(count: int) -> Tensor:
        starts = torch.randint(len(data) - length, (count,), generator=generator)
        return torch.stack([data[start : start + length] for start in starts.tolist()])

    for _ in range(steps):
        ids = windows(batch)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    middle = [module for module in model.modules() if isinstance(module, SwitchHeadAttention)][1]
    captured = []

    def capture(router, args, output):
        captured.append(
            torch.einsum("nd,hed->nhe", args[0][:, : router.weight.shape[-1]].float(), router.weight.float())
        )

    routers = (middle.destination_router, middle.source_router)
    handles = [router.register_forward_hook(capture) for router in routers if router is not None]
    with torch.no_grad():
        model(input_ids=windows(-(-tokens // length)))
    for handle in handles:
        handle.remove()
    return torch.stack(captured, dim=1)[:tokens].detach()

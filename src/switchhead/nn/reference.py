"""The SwitchHead layer as the paper writes it: loops over heads, tokens and experts.

A second derivation that shares no code with the layer. Slow, for any dtype, differentiable; the layer is tested
against it.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from switchhead.nn.switchhead import SwitchHeadAttention


def switchhead_reference(
    layer: SwitchHeadAttention,
    x: Float[Tensor, "batch T d_model"],
    *,
    context: Float[Tensor, "batch S d_model"] | None = None,
    memory: Float[Tensor, "batch M d_model"] | None = None,
    key_padding_mask: Bool[Tensor, "batch S"] | None = None,
    softmax_gating: bool = False,
) -> Float[Tensor, "batch T d_model"]:
    """Output of `layer` on x by equations 7-10 of arXiv 2312.07987, token by token (no dropout, no cache)."""
    source = context if context is not None else x if memory is None else torch.cat([memory, x], 1)
    sequences = []
    for b in range(x.shape[0]):
        padded = None if key_padding_mask is None else key_padding_mask[b]
        sequences.append(_one_sequence(layer, x[b], source[b], padded, softmax_gating, context is not None))
    return torch.stack(sequences)


def _one_sequence(layer, x, source, padded, softmax_gating, crossed):
    n_queries, n_keys = len(x), len(source)
    experts = layer.expert_projections
    y = [torch.zeros_like(x[0]) for _ in range(n_queries)]
    for h in range(layer.n_heads):
        destination = [_choose(layer, "destination", token, h, softmax_gating) for token in x]
        origin = [_choose(layer, "source", token, h, softmax_gating) for token in source]

        def project(name, tokens, choices, h=h):
            weight = getattr(layer, f"{name}_proj").weight
            if name not in experts:
                return [weight[h * layer.d_head : (h + 1) * layer.d_head] @ token for token in tokens]
            return [
                sum(gate * (token @ weight[h, e]) for e, gate in chosen)
                for token, chosen in zip(tokens, choices, strict=True)
            ]

        queries = project("q", x, destination)
        keys, values = project("k", source, origin), project("v", source, origin)
        for i in range(n_queries):
            at = n_keys - n_queries + i  # the query's place among the keys
            seen = [
                j for j in range(n_keys) if not (layer.causal and j > at) and not (padded is not None and padded[j])
            ]
            if not seen:
                continue
            first = 0 if crossed else n_keys - n_queries
            scores = torch.stack([_score(layer, h, queries[i], keys[j], first + i, j, j - at) for j in seen])
            weights = torch.exp(scores - torch.logsumexp(scores, 0))
            attended = sum(w * values[j] for w, j in zip(weights, seen, strict=True))
            if "o" in experts:
                y[i] = y[i] + sum(gate * (attended @ layer.o_proj.weight[h, e]) for e, gate in destination[i])
            else:
                y[i] = y[i] + layer.o_proj.weight[:, h * layer.d_head : (h + 1) * layer.d_head] @ attended
    return torch.stack(y)


def _choose(layer, side, token, h, softmax_gating) -> list[tuple[int, Tensor]]:
    """The chosen experts of one token and head with their gates; none where this side has no router."""
    router = layer.destination_router if side == "destination" or layer.shared_selection else layer.source_router
    if router is None:
        return []
    scores = [token @ row for row in router.weight[h]]
    best = sorted(range(len(scores)), key=lambda e: (-scores[e].item(), e))[: layer.k]
    if softmax_gating:
        total = sum(torch.exp(score) for score in scores)
        return [(e, torch.exp(scores[e]) / total) for e in best]
    return [(e, 1 / (1 + torch.exp(-scores[e]))) for e in best]


def _score(layer, h, query, key, query_position, key_position, distance):
    """Scaled score of one query and key; positions rotate both, or add a projected sinusoid of their distance."""
    kind = type(layer.positions).__name__
    score = query @ key
    if kind == "Rotary":
        score = _rotated(layer, query, query_position) @ _rotated(layer, key, key_position)
    elif kind == "Relative":
        channels = range(0, layer.d_model, 2)
        angles = [distance / 10000.0 ** (c / layer.d_model) for c in channels]
        waves = [wave(angle) for angle in angles for wave in (math.sin, math.cos)][: layer.d_model]
        rows = layer.position_proj.weight[h * layer.d_head : (h + 1) * layer.d_head]
        score = score + query @ (rows @ query.new_tensor(waves))
    return score / math.sqrt(layer.d_head)


def _rotated(layer, vector, position):
    half = int(layer.positions.fraction * layer.d_head / 2)
    turned = list(vector)
    for i in range(half):
        angle = position / layer.positions.base ** (i / half)
        a, b = vector[i], vector[i + half]
        turned[i] = a * math.cos(angle) - b * math.sin(angle)
        turned[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return torch.stack(turned)

"""What the language model returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

Memory = tuple[Float[Tensor, "batch M d_model"], ...]


@dataclass
class SwitchHeadModelOutput(BaseModelOutputWithPast):
    """What `SwitchHeadModel` returns.

    The key-value cache is `cache`, or `past_key_values` before transformers 5.24.

    Attributes:
        memory: for each layer the last `config.memory_length` hidden states before it, `[B, M, D]`, without gradient;
            None where the model keeps no memory or used a cache.
        router_logits: with `output_router_logits=True`, scores `[B, T, heads, experts]` of every router for this call's
            tokens, in the order of the layers and in each layer destination before source before feed-forward.
        aux_loss: auxiliary losses, each times its weight in the configuration, summed over layers; in training, where a
            weight is not 0.
        aux_losses: with them, each loss without its weight, the mean of the layers, by its name.
    """

    memory: Memory | None = None
    router_logits: tuple[Tensor, ...] | None = None
    aux_loss: Tensor | None = None
    aux_losses: dict[str, Tensor] | None = None


@dataclass
class SwitchHeadCausalLMOutput(CausalLMOutputWithPast):
    """What `SwitchHeadForCausalLM` returns; fields as in `SwitchHeadModelOutput`.

    `loss` is the cross-entropy plus `aux_loss`, where there is one; with `num_items_in_batch` both are this batch's
    part of a sum. `logits` is None where the loss was computed in chunks.
    """

    memory: Memory | None = None
    router_logits: tuple[Tensor, ...] | None = None
    aux_loss: Tensor | None = None
    aux_losses: dict[str, Tensor] | None = None


def aux_outputs(aux: Sequence[Float[Tensor, " losses"]], weights: dict[str, float]) -> dict[str, Any]:
    """Auxiliary losses of all layers as fields of the output; none where none were asked for."""
    if not aux:
        return {}
    means = dict(zip(weights, torch.stack(list(aux)).mean(0), strict=True))
    return {"aux_loss": sum(len(aux) * weight * means[name] for name, weight in weights.items()), "aux_losses": means}

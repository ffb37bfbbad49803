"""Expert kernels for other models' mixture-of-experts layers, through transformers' experts interface.

Importing `switchhead.hf` registers the name "switchhead": `AutoModelForCausalLM.from_pretrained(...,
experts_implementation="switchhead")`, or `model.set_experts_implementation("switchhead")` later, runs the experts of
Mixtral, OLMoE, GPT-OSS and their like on `switchhead.ops.moe_linear`.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from switchhead.ops import moe_linear
from switchhead.ops.dtypes import at_least_float32
from switchhead.routing import Routing

NAME = "switchhead"


def experts_forward(
    self: Any,
    hidden_states: Float[Tensor, "tokens d_model"],
    top_k_index: Int[Tensor, "tokens k"],
    top_k_weights: Float[Tensor, "tokens k"],
) -> Float[Tensor, "tokens d_model"]:
    """`sum_j w_j act(x U[e_j]) D[e_j]` with the weights of a transformers experts module.

    Args:
        self: the module; its flags (`is_transposed`, `has_gate`, `has_bias`) say how it stores `gate_up_proj` or
            `up_proj`, and `down_proj`.
        hidden_states: tokens.
        top_k_index: experts chosen.
        top_k_weights: their weights.

    Raises:
        ValueError: expert parallelism, or a norm behind each expert.
    """
    if getattr(self, "_is_expert_parallel", False):
        raise ValueError(f"experts_implementation={NAME!r} needs all experts on each device; use 'grouped_mm' instead")
    if getattr(self, "has_post_expert_norm", False):
        raise ValueError(f"experts_implementation={NAME!r} knows no norm behind experts; use 'grouped_mm' instead")
    gates = top_k_weights.to(at_least_float32(top_k_weights.dtype))[:, None]  # [N, 1, K]
    routing = Routing(gates, top_k_index[:, None], self.num_experts)
    up, up_bias = _weight(self, "gate_up_proj" if self.has_gate else "up_proj")
    down, down_bias = _weight(self, "down_proj")
    hidden = moe_linear(hidden_states, up, routing, reduce=None)[:, 0]  # [N, K, d_ff, or twice that]
    if up_bias is not None:
        hidden = hidden + up_bias[top_k_index].to(hidden.dtype)
    hidden = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)
    y = moe_linear(hidden, down, routing.per_slot(), reduce="heads")
    if down_bias is not None:
        y = y + torch.einsum("nk,nkd->nd", gates[:, 0], down_bias[top_k_index].to(gates.dtype)).to(y.dtype)
    return y.to(hidden_states.dtype)


def _weight(module: Any, name: str) -> tuple[Float[Tensor, "1 experts d_in d_out"], Tensor | None]:
    weight = getattr(module, name)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    return (weight if module.is_transposed else weight.mT)[None], bias


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)

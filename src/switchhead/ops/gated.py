"""`moe_linear` by computing every expert: one dense matmul with the gates folded in. Best where k is close to E."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from switchhead.routing import Routing


def moe_linear(
    x: Float[Tensor, "tokens *heads d_in"],
    weight: Float[Tensor, "pools experts d_in d_out"],
    routing: Routing,
    *,
    reduce: str | None,
) -> Tensor:
    """E / k times the arithmetic of the chosen experts, none of the gathers."""
    tokens, heads, k = routing.gates.shape
    if reduce == "heads" and weight.shape[0] == 1 and x.ndim == 3:
        # What an expert of a shared pool adds up to is linear in its input: sum over heads first.
        rows = routing.dense_gates().to(x.dtype).mT @ x  # [N, E, d_in]
        return rows.flatten(1) @ weight.flatten(0, 2)  # [N, E*d_in] @ [E*d_in, d_out]
    if weight.shape[0] != heads:
        weight = weight.expand(heads, *weight.shape[1:])
    if reduce == "heads":
        gates = routing.dense_gates().to(x.dtype)  # [N, H, E]
        rows = x[:, None, None] if x.ndim == 2 else x[:, :, None]
        return (rows * gates[..., None]).flatten(1) @ weight.flatten(0, 2)  # [N, H*E*d_in] @ [H*E*d_in, d_out]
    y = _all_experts(x, weight)  # [N, H, E, d_out]
    if reduce is None:
        chosen = routing.expert_indices.long()[..., None].expand(tokens, heads, k, y.shape[-1])
        return y.gather(2, chosen)  # [N, H, K, d_out]
    return (y * routing.dense_gates()[..., None].to(y.dtype)).sum(2)  # [N, H, d_out]


def _all_experts(x: Tensor, weight: Tensor) -> Tensor:
    heads, experts, d_in, d_out = weight.shape
    if x.ndim == 2:
        y = x @ weight.permute(2, 0, 1, 3).reshape(d_in, heads * experts * d_out)
        return y.unflatten(-1, (heads, experts, d_out))
    y = x.transpose(0, 1) @ weight.transpose(1, 2).reshape(heads, d_in, experts * d_out)  # [H, N, E*d_out]
    return y.transpose(0, 1).unflatten(-1, (experts, d_out))

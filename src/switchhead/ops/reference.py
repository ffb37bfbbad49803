"""The definition of `moe_linear`: gather every chosen expert's matrix, multiply, weight, sum."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from switchhead.ops.dtypes import at_least_float32
from switchhead.routing import Routing


def moe_linear(
    x: Float[Tensor, "tokens *heads d_in"],
    weight: Float[Tensor, "pools experts d_in d_out"],
    routing: Routing,
    *,
    reduce: str | None,
) -> Tensor:
    """`moe_linear` for any device and dtype; materialises one matrix per slot, so it is for small shapes."""
    tokens, heads, _ = routing.gates.shape
    chosen = weight.flatten(0, 1)[routing.groups(shared_pool=weight.shape[0] == 1)]  # [N, H, K, d_in, d_out]
    if x.ndim == 2:
        x = x[:, None]  # [N, 1, d_in]
    rows = x.expand(tokens, heads, x.shape[-1])
    y = torch.einsum("nhi,nhkio->nhko", rows.to(at_least_float32(x.dtype)), chosen.to(at_least_float32(x.dtype)))
    if reduce is None:
        return y.to(x.dtype)  # [N, H, K, d_out]
    weighted = y * routing.gates[..., None].to(y.dtype)
    return weighted.sum(2 if reduce == "k" else (1, 2)).to(x.dtype)

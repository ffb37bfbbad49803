"""What a SwitchHead layer makes of its own tokens: plain projections, routing, and values of the chosen experts."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from switchhead.ops.availability import require_triton, triton_obstacle
from switchhead.ops.dtypes import cast_together, compute_dtype, without_autocast
from switchhead.ops.moe_linear import Backend, moe_linear
from switchhead.ops.router import Gating, route
from switchhead.routing import Routing


def project_inputs(
    x: Float[Tensor, "tokens d_model"],
    plain: Float[Tensor, "plain d_model"],
    routers: Float[Tensor, "routers experts d_model"],
    values: Float[Tensor, "heads experts d_model d"],
    k: int,
    *,
    gating: Gating = "sigmoid",
    dropped: Bool[Tensor, "tokens routers experts"] | None = None,
    backend: Backend = "auto",
) -> tuple[Float[Tensor, "tokens plain"], Float[Tensor, "tokens heads d"], Routing]:
    """`x @ plain^T`, `route(x, routers, k)` and `moe_linear(x, values, ...)` by the last routers.

    On a GPU with sigmoid gates this is one operator: the three have one gradient with respect to x, and adding up
    three of its size costs as much as a projection.

    Args:
        x: tokens.
        plain: rows of the plain projections.
        routers: the last `heads` of them are the values'.
        values: experts of the values.
        k: experts chosen.
        gating: see `route`.
        dropped: see `route`.
        backend: see `moe_linear`.

    Returns:
        The plain projections, the values, and the decisions of all routers.
    """
    dtype = compute_dtype(x, plain, values)
    if backend == "triton":
        require_triton(x.device, dtype)
    fused = backend == "triton" or (backend == "auto" and x.is_cuda and triton_obstacle(x.device, dtype) is None)
    if fused and gating == "sigmoid":
        from switchhead.ops.triton.inputs import project_inputs as run

        with without_autocast(x.device):
            return run(x.to(dtype), plain, routers, values, k, dropped=dropped)
    routing = route(x, routers, k, gating=gating, dropped=dropped)
    heads = values.shape[0]
    own = Routing(routing.gates[:, -heads:], routing.expert_indices[:, -heads:], routing.n_experts)
    return F.linear(*cast_together(x, plain)), moe_linear(x, values, own, reduce="k", backend=backend), routing

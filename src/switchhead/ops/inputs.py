"""What a SwitchHead layer makes of its own tokens: queries and keys, routing, and values of the chosen experts."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from switchhead.ops.availability import is_gpu, require_triton, triton_obstacle
from switchhead.ops.dtypes import cast_together, compute_dtype, without_autocast
from switchhead.ops.moe_linear import Backend, moe_linear
from switchhead.ops.rotary import rotate
from switchhead.ops.router import Gating, route
from switchhead.ops.widths import aligned_width, attention_width, pad, pad_width
from switchhead.routing import Routing

# Backward of the one operator multiplies with all experts; beyond this E / k kernels on the chosen ones should win.
_ONE_OPERATOR_RATIO = 3.0


def project_inputs(
    x: Float[Tensor, "tokens d_model"],
    queries: Float[Tensor, "heads_d d_model"] | None,
    keys: Float[Tensor, "heads_d d_model"],
    routers: Float[Tensor, "routers experts d_model"],
    values: Float[Tensor, "heads experts d_model d"],
    k: int,
    *,
    rotation: tuple[Float[Tensor, "positions half"], Float[Tensor, "positions half"]] | None = None,
    gating: Gating = "sigmoid",
    dropped: Bool[Tensor, "tokens routers experts"] | None = None,
    backend: Backend = "auto",
) -> tuple[
    Float[Tensor, "tokens heads d"] | None,
    Float[Tensor, "tokens heads d"],
    Float[Tensor, "tokens heads d"],
    list[Routing],
]:
    """Rotated queries and keys, `route(x, routers, k)`, and `moe_linear(x, values, ...)` by the last routers.

    On a GPU with sigmoid gates and E / k up to 3 this is one operator: all have one gradient with respect to x, and
    adding up several of its size costs as much as a projection. The operator casts x once, for routers too: inside
    autocast scores are float32 sums of products of the cast x, where `route` alone reads x as it is.

    Args:
        x: tokens.
        queries, keys: plain projections, the rows of a head side by side; tokens of a memory have no queries.
        routers: sides of `heads` routers each; the last side is the values'.
        values: experts of the values.
        k: experts chosen.
        rotation: cosines and sines, see `rotary_table`; token n stands at position n modulo their length.
        gating: see `route`.
        dropped: see `route`.
        backend: see `moe_linear`.

    Returns:
        Queries (None without), keys and values, on a GPU with zeros behind each head up to a width that suits it, and
        the decisions of the routers, a `Routing` for each side.

    Raises:
        ValueError: shapes or k that do not fit, or a backend that cannot run here.
    """
    _check(x, queries, keys, routers, values, k, rotation)
    heads, _, _, d = values.shape
    width = aligned_width(d, x.device)
    dtype = compute_dtype(x, keys, values, *(() if queries is None else (queries,)))
    widest = torch.promote_types(dtype, routers.dtype)
    if backend == "triton":
        require_triton(x.device, widest)
    fused = backend == "triton" or (
        backend == "auto"
        and is_gpu(x.device)
        and values.shape[1] <= _ONE_OPERATOR_RATIO * k
        and triton_obstacle(x.device, widest) is None
    )
    if fused and gating == "sigmoid":
        from switchhead.ops.triton.inputs import project_inputs as run

        if rotation is not None:
            width = attention_width(d, x.device)
        with without_autocast(x.device):
            return run(
                x, queries, keys, routers, values, k, rotation=rotation, dtype=dtype, width=width, dropped=dropped
            )
    routing = route(x, routers, k, gating=gating, dropped=dropped)
    by_side = zip(routing.gates.split(heads, dim=1), routing.expert_indices.split(heads, dim=1), strict=True)
    sides = [Routing(gates, chosen, routing.n_experts) for gates, chosen in by_side]
    x = pad_width(x, aligned_width(x.shape[1], x.device))
    padding = (0, x.shape[1] - values.shape[2], 0, width - d)

    if rotation is not None and rotation[0].shape[0] > 0:
        # A row for each token. Parting tokens by positions instead would keep `torch.export` from dynamic lengths.
        position = torch.arange(x.shape[0], device=x.device) % rotation[0].shape[0]
        rotation = rotation[0][position], rotation[1][position]

    def project(weight: Tensor) -> Tensor:
        weight = pad(weight.unflatten(0, (heads, d)), padding).flatten(0, 1)
        rows = F.linear(*cast_together(x, weight)).unflatten(1, (heads, width))
        return rows if rotation is None else rotate(rows, *rotation)

    values = pad(values, (0, width - d, 0, x.shape[1] - values.shape[2]))
    v = moe_linear(x, values, sides[-1], reduce="k", backend=backend)
    return None if queries is None else project(queries), project(keys), v, sides


def _check(
    x: Tensor,
    queries: Tensor | None,
    keys: Tensor,
    routers: Tensor,
    values: Tensor,
    k: int,
    rotation: tuple[Tensor, Tensor] | None,
) -> None:
    shapes = [tuple(t.shape) for t in (x, keys if queries is None else queries, keys, routers, values)]
    fits = (x.ndim, routers.ndim, values.ndim) == (2, 3, 4)
    if fits:
        heads, experts, d_model, d = values.shape
        fits = x.shape[1] == d_model and shapes[1] == shapes[2] == (heads * d, d_model)
        fits = fits and shapes[3][1:] == (experts, d_model) and routers.shape[0] in (heads, 2 * heads)
    if not fits:
        raise ValueError(
            "project_inputs needs x [N, D], queries and keys [H * d, D], routers [H or 2 * H, E, D] and values "
            "[H, E, D, d]; got {}, {}, {}, {} and {}".format(*shapes)
        )
    if not 1 <= k <= values.shape[1]:
        raise ValueError(f"k={k} experts cannot be chosen out of {values.shape[1]}; use 1 <= k <= {values.shape[1]}")
    if rotation is None:
        return
    cos, sin = rotation
    fits = cos.ndim == 2 and cos.shape == sin.shape and 2 * cos.shape[1] <= values.shape[3]
    if not fits or (cos.shape[0] > 0 and x.shape[0] % cos.shape[0]):
        raise ValueError(
            f"rotation must be cosines and sines [R, half], R a divisor of the {x.shape[0]} tokens and half at most "
            f"{values.shape[3] // 2}; got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )

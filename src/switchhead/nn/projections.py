"""Projections into and out of attention, in widths that kernels handle well.

On a GPU a matmul or attention kernel of an odd width can cost three times that of the next multiple of 8. So tokens,
weights and heads are padded with zeros on the way in (see `switchhead.ops.widths`); no result and no parameter changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from switchhead.nn.linear import Linear
from switchhead.nn.moe_linear import MoELinear
from switchhead.nn.positions import relative_distances, sinusoids
from switchhead.nn.router import Router, stack_routers
from switchhead.ops.dtypes import cast_together, concatenate
from switchhead.ops.inputs import project_inputs
from switchhead.ops.moe_linear import moe_linear
from switchhead.ops.widths import aligned_width, pad, pad_width
from switchhead.routing import Routing

Projection = TypeVar("Projection", bound=nn.Module)


def require(projection: nn.Module, kind: type[Projection]) -> Projection:
    """The projection itself, if it is of the kind that its layer made.

    Layers read the weights of their projections and do not call them, so that several run as one.

    Raises:
        TypeError: something else was put in its place, an adapter for instance, which would have no effect.
    """
    if not isinstance(projection, kind):
        raise TypeError(
            f"{type(projection).__name__} stands in place of a projection of attention, which reads its projections' "
            "weights and does not call them: put what changes one on its weight (torch.nn.utils.parametrize)"
        )
    return projection


def project_heads(
    x: Float[Tensor, "batch T wide"], projections: Sequence[Linear], d_head: int
) -> list[Float[Tensor, "batch heads T d"]]:
    """Several plain projections of the same tokens as one matmul."""
    return _split_heads(F.linear(*cast_together(x, _stack(x, projections, d_head))), projections, d_head)


def project_experts(
    x: Float[Tensor, "tokens *heads wide"], projection: MoELinear, routing: Routing
) -> Float[Tensor, "tokens *heads d"]:
    """An expert projection; x may have padded heads or tokens."""
    projection = require(projection, MoELinear)
    weight, backend = projection.weight, projection.backend
    padding = x.shape[-1] - weight.shape[2]
    d_out = aligned_width(weight.shape[3], x.device) - weight.shape[3]
    if projection.reduce == "heads":
        return moe_linear(x, pad(weight, (0, d_out)), routing, reduce="heads", backend=backend, padding=padding)
    return moe_linear(x, pad(weight, (0, d_out, 0, padding)), routing, reduce=projection.reduce, backend=backend)


def project_all(
    x: Float[Tensor, "batch T d_model"],
    queries: Linear,
    keys: Linear,
    routers: Sequence[Router],
    values: MoELinear,
    rotation: tuple[Tensor, Tensor] | None,
) -> tuple[list[Float[Tensor, "batch heads T d"]], list[Routing]]:
    """Queries and keys, rotated if a table `[T, half]` or `[B, T, half]` is given, values by the last router, routings.

    See `ops.project_inputs`.
    """
    tokens = x.flatten(0, 1)
    weights, dropped = stack_routers(tokens, routers)
    if rotation is not None:
        rotation = (rotation[0].flatten(0, -2), rotation[1].flatten(0, -2))
    q, k, v, sides = project_inputs(
        tokens, queries.weight, keys.weight, weights, values.weight, routers[0].k,
        rotation=rotation, gating=routers[0].gating, dropped=dropped, backend=values.backend,
    )  # fmt: skip
    routings = [router(tokens, side) for router, side in zip(routers, sides, strict=True)]  # past the routers' hooks
    assert q is not None
    return [rows.unflatten(0, x.shape[:2]).transpose(1, 2) for rows in (q, k, v)], routings


def project_memory(
    memory: Float[Tensor, "batch M d_model"], keys: Linear, router: Router, values: MoELinear
) -> list[Float[Tensor, "batch heads M d"]]:
    """Keys and values of a previous chunk, as `project_all` makes them of x."""
    tokens = memory.flatten(0, 1)
    weight, dropped = stack_routers(tokens, [router])
    _, k, v, _ = project_inputs(
        tokens, None, keys.weight, weight, values.weight, router.k,
        gating=router.gating, dropped=dropped, backend=values.backend,
    )  # fmt: skip
    return [rows.unflatten(0, memory.shape[:2]).transpose(1, 2) for rows in (k, v)]


def behind_memory(memory: Sequence[Tensor], rows: Sequence[Tensor]) -> Iterator[Float[Tensor, "batch heads S d"]]:
    """Keys and values of a previous chunk, projected by themselves, in front of those of x."""
    return (concatenate(parts, dim=-2) for parts in zip(memory, rows, strict=True))


def project_output(rows: Float[Tensor, "tokens heads wide"], projection: Linear, d_head: int) -> Tensor:
    """A plain output projection, `[N, d_model]`."""
    projection = require(projection, Linear)
    d_model, padding = projection.out_features, rows.shape[-1] - d_head
    weight = projection.weight.unflatten(1, (-1, d_head))  # [D, H, d]
    weight = pad(weight, (0, padding, 0, 0, 0, aligned_width(d_model, rows.device) - d_model)).flatten(1)
    return F.linear(*cast_together(rows.flatten(1), weight))[:, :d_model]


def project_positions(
    projection: Linear, q: Tensor, k: Tensor, d_head: int, *, causal: bool
) -> Float[Tensor, "heads distances d"]:
    """Relative positions of all distances between the queries and keys, as wide as q.

    The projection is of each head, or a single one that all heads share.
    """
    d_model, heads = projection.in_features, q.shape[1]
    distances = relative_distances(q.shape[-2], k.shape[-2], causal=causal, device=q.device)
    r = projection(sinusoids(distances, d_model, q.dtype)).unflatten(-1, (-1, d_head))  # [R, H or 1, d]
    return pad_width(r.transpose(0, 1).to(q.dtype), q.shape[-1]).expand(heads, -1, -1)


def _stack(x: Tensor, projections: Sequence[Linear], d_head: int) -> Float[Tensor, "heads_d wide"]:
    """Weights of all heads, each padded to an aligned width."""
    weights = concatenate([require(projection, Linear).weight for projection in projections])
    weights = weights.unflatten(0, (-1, d_head))  # [H, d, D]
    padding = (0, x.shape[-1] - weights.shape[-1], 0, aligned_width(d_head, x.device) - d_head)
    return pad(weights, padding).flatten(0, 1)


def _split_heads(rows: Float[Tensor, "batch T heads_d"], projections: Sequence[Linear], d_head: int) -> list[Tensor]:
    """`[B, H, T, d]` of each projection."""
    heads = [projection.out_features // d_head for projection in projections]
    return list(rows.unflatten(-1, (sum(heads), -1)).transpose(1, 2).split(heads, dim=1))

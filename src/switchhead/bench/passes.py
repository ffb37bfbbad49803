"""The six passes of a layer's expert projections and its router, each beside cuBLAS on as much arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from switchhead.bench.layer import LAYERS, LayerConfig
from switchhead.bench.routings import NAMES, wanted_scores
from switchhead.bench.timing import cuda_device, graph_ms
from switchhead.ops.widths import aligned_width

_CACHE_BYTES = 2**28  # more than any L2 cache holds


@dataclass(frozen=True, kw_only=True)
class PassRow:
    """Time of one pass.

    Attributes:
        layer: name in `LAYERS`.
        routing: kind of routing.
        name: of the pass.
        ms: median milliseconds of a CUDA graph's replay with a cold L2 cache; the replay itself takes about 0.0045.
        cublas_ms: the same of one bfloat16 product with the arithmetic of the chosen experts.
    """

    layer: str
    routing: str
    name: str
    ms: float
    cublas_ms: float


def bench_passes(
    layers: Iterable[str] = tuple(LAYERS),
    *,
    routings: Sequence[str] = NAMES,
    tokens: int = 32768,
    repeats: int = 30,
) -> Iterator[PassRow]:
    """Measure, a pass at a time, as `moe_linear` and `route` run it: with its sort, casts and scaled rows.

    Operands are bfloat16, weights float32. Needs a CUDA device.
    """
    device = cuda_device("passes")
    cold = torch.empty(_CACHE_BYTES, dtype=torch.uint8, device=device)

    def time(function: Callable[[], object]) -> float:
        return graph_ms(function, repeats=repeats, between=cold.zero_)

    for layer in layers:
        config = LAYERS[layer]
        left = torch.randn(tokens, aligned_width(config.d_model, device), device=device, dtype=torch.bfloat16)
        right = torch.randn(left.shape[1], config.n_heads * config.k * config.d_head, device=device, dtype=left.dtype)
        cublas_ms = time(lambda left=left, right=right: left @ right)
        for routing in routings:
            scores = wanted_scores(
                routing, tokens, device, n_heads=config.n_heads, n_experts=config.n_experts, k=config.k
            )
            for name, function in expert_passes(config, scores):
                yield PassRow(layer=layer, routing=routing, name=name, ms=time(function), cublas_ms=cublas_ms)


def expert_passes(config: LayerConfig, scores: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    """Names and functions of the passes: values (V), outputs (O), router; scores `[N, 2, H, E]`."""
    from switchhead.ops.triton.grouping import group_rows
    from switchhead.ops.triton.moe_linear import _backward, _forward
    from switchhead.ops.triton.problem import Problem
    from switchhead.ops.triton.router import _route, _route_backward
    from switchhead.ops.triton.tuning import project_tile

    tokens, heads, experts, k, device = len(scores), config.n_heads, config.n_experts, config.k, scores.device
    d_model, d, dtype = aligned_width(config.d_model, device), aligned_width(config.d_head, device), torch.bfloat16
    x, grad_out = (torch.randn(tokens, d_model, device=device, dtype=dtype) for _ in range(2))
    rows, grad_values = (torch.randn(tokens, heads, d, device=device, dtype=dtype) for _ in range(2))
    values = torch.randn(heads, experts, d_model, d, device=device) / d_model**0.5
    outputs = torch.randn(heads, experts, d, d_model, device=device) / d**0.5
    best, indices = scores[:, 1].topk(k, -1)
    gates, indices = best.sigmoid(), indices.int()
    _, kept = _forward(x, values, gates, indices, "k", dtype, True)
    nothing = x.new_empty(0)

    def backward(grad: Tensor, x: Tensor, weight: Tensor, kept: Tensor, reduce: str, *needs: bool):
        return lambda: _backward(grad, x, weight, gates, indices, kept, reduce, dtype, *needs)

    yield "V forward", lambda: _forward(x, values, gates, indices, "k", dtype, True)
    yield "V input and gates", backward(grad_values, x, values, kept, "k", True, False, True)
    yield "V weights", backward(grad_values, x, values, kept, "k", False, True, False)
    yield "O forward", lambda: _forward(rows, outputs, gates, indices, "heads", dtype, False)
    yield "O input and gates", backward(grad_out, rows, outputs, nothing, "heads", True, False, True)
    yield "O weights", backward(grad_out, rows, outputs, nothing, "heads", False, True, False)

    routers = torch.randn(2 * heads, experts, d_model, device=device) / d_model**0.5
    by_sets = Problem.of(x, values, indices).project_rows()

    def route_and_sort() -> None:
        _, chosen, _ = _route(x, routers, k, False, None)
        for side in chosen.split(heads, 1):
            group_rows(side, by_sets, project_tile(dtype, by_sets.slots, d).m)

    yield "router and sort, two sides", route_and_sort
    chosen = _route(x, routers, k, False, None)
    grad_gates = torch.randn_like(chosen[0])
    yield "router backward", lambda: _route_backward(grad_gates, x, routers, *chosen, False, True, True)


def passes_as_table(rows: Sequence[PassRow]) -> str:
    """Markdown: a line for each pass."""
    lines = ["| layer | routing | pass | ms | cuBLAS ms | of cuBLAS |", "|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row.layer} | {row.routing} | {row.name} | {row.ms:.3f} | {row.cublas_ms:.3f} "
            f"| {row.cublas_ms / row.ms:.0%} |"
        )
    return "\n".join(lines)

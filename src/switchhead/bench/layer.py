"""One attention layer, forward and backward: SwitchHead against dense and grouped-query attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from switchhead.bench.routings import NAMES, steer, wanted_scores
from switchhead.bench.timing import Cost, cuda_device, measure
from switchhead.nn import MultiHeadAttention, SwitchHeadAttention


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """A SwitchHead layer and the dense layer it replaces."""

    d_model: int
    dense_heads: int
    dense_d_head: int
    n_heads: int
    d_head: int
    n_experts: int
    k: int
    lengths: tuple[int, ...]

    @property
    def gqa_heads(self) -> int:
        """Query heads that, with 4 key-value heads, give the dense layer's parameters exactly."""
        return 2 * self.dense_heads - 4


LAYERS = {
    "262m": LayerConfig(
        d_model=1024, dense_heads=16, dense_d_head=64, n_heads=4, d_head=112, n_experts=4, k=2,
        lengths=(512, 2048, 8192),
    ),
    "47m": LayerConfig(
        d_model=412, dense_heads=10, dense_d_head=41, n_heads=2, d_head=76, n_experts=5, k=3,
        lengths=(256, 1024, 4096),
    ),
    "262m-h2": LayerConfig(
        d_model=1024, dense_heads=16, dense_d_head=64, n_heads=2, d_head=132, n_experts=8, k=4,
        lengths=(512, 2048, 8192),
    ),
    "1.3b": LayerConfig(
        d_model=2048, dense_heads=16, dense_d_head=128, n_heads=8, d_head=104, n_experts=4, k=2,
        lengths=(2048, 8192, 32768),
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """Costs of one layer at one length; ratios are SwitchHead's over the other's.

    Attributes:
        layer: name in `LAYERS`.
        length: tokens of a sequence.
        dense: cost of dense attention with its fastest SDPA backend, which `dense_backend` names.
        gqa: cost of grouped-query attention with 4 key-value heads and as many parameters.
        switchhead: cost by kind of routing.
    """

    layer: str
    length: int
    dense: Cost
    dense_backend: str
    gqa: Cost
    switchhead: dict[str, Cost]

    def ratio(self, routing: str, *, graph: bool = False, to: str = "dense") -> float:
        """Time of SwitchHead over time of dense (or `to="gqa"`)."""
        field = "graph_ms" if graph else "ms"
        return getattr(self.switchhead[routing], field) / getattr(getattr(self, to), field)


def bench_layer(
    layers: Iterable[str] = tuple(LAYERS),
    *,
    lengths: Sequence[int] | None = None,
    routings: Sequence[str] = NAMES,
    tokens: int = 32768,
    positions: str = "rotary",
    repeats: int = 30,
) -> Iterator[LayerRow]:
    """Measure, a row at a time: causal, bfloat16 autocast over float32 parameters, `torch.compile` on all sides.

    Needs a CUDA device. Rotary positions by default; with relative ones the layers see a memory as long as the
    sequence, as in Transformer-XL's training. All layers pad their widths to multiples of 8.
    """
    device = cuda_device("layer")
    torch._dynamo.config.recompile_limit = 64
    for name in layers:
        config = LAYERS[name]
        scores: dict = {}
        for length in lengths or config.lengths:
            torch.manual_seed(0)
            x = torch.randn(tokens // length, length, config.d_model, device=device).requires_grad_()
            memory = torch.randn_like(x, requires_grad=False) if positions == "relative" else None
            dense = MultiHeadAttention(
                d_model=config.d_model, n_heads=config.dense_heads, d_head=config.dense_d_head, positions=positions
            )
            gqa = MultiHeadAttention(
                d_model=config.d_model, n_heads=config.gqa_heads, n_kv_heads=4, d_head=config.dense_d_head,
                positions=positions,
            )  # fmt: skip
            ours = SwitchHeadAttention(
                d_model=config.d_model, n_heads=config.n_heads, d_head=config.d_head, n_experts=config.n_experts,
                k=config.k, positions=positions,
            )  # fmt: skip
            dense_cost, backend = _best_backend(dense.to(device), x, memory, repeats)
            gqa_cost, _ = _best_backend(gqa.to(device), x, memory, repeats)
            ours = ours.to(device)
            ours.compile(fullgraph=True)
            costs = {}
            for routing in routings:
                if routing not in scores:
                    scores[routing] = wanted_scores(
                        routing, tokens, device, n_heads=config.n_heads, n_experts=config.n_experts, k=config.k
                    )
                steered = steer(ours, x.detach().flatten(0, 1), scores[routing]).view_as(x)
                costs[routing] = measure(ours, steered.requires_grad_(), memory=memory, repeats=repeats)
            yield LayerRow(
                layer=name, length=length, dense=dense_cost, dense_backend=backend, gqa=gqa_cost, switchhead=costs
            )
            torch.compiler.reset()


def _best_backend(layer: nn.Module, x: Tensor, memory: Tensor | None, repeats: int) -> tuple[Cost, str]:
    """The layer compiled with each fused SDPA backend; the fastest."""
    costs = {}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        torch.compiler.reset()
        layer.compile(fullgraph=True)
        with sdpa_kernel(backend):  # one that fails is an error: without it the baseline would be a weak one
            costs[backend.name] = measure(layer, x, memory=memory, repeats=repeats)
    name = min(costs, key=lambda name: costs[name].graph_ms)
    return costs[name], name


def as_table(rows: Sequence[LayerRow]) -> str:
    """Markdown: a line for each row and routing."""
    lines = [
        "| layer | T | routing | dense ms | gqa ms | ours ms | / dense | / gqa | graphs: dense | ours | / dense "
        "| kept MiB / dense | peak / dense |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for routing, cost in row.switchhead.items():
            lines.append(
                f"| {row.layer} | {row.length} | {routing} | {row.dense.ms:.3f} | {row.gqa.ms:.3f} | {cost.ms:.3f} "
                f"| {row.ratio(routing):.2f} | {row.ratio(routing, to='gqa'):.2f} | {row.dense.graph_ms:.3f} "
                f"| {cost.graph_ms:.3f} | {row.ratio(routing, graph=True):.2f} "
                f"| {cost.saved_mib / row.dense.saved_mib:.2f} | {cost.peak_mib / row.dense.peak_mib:.2f} |"
            )
    return "\n".join(lines)

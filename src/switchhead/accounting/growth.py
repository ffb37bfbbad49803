"""How cost grows with the length of the sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from switchhead.accounting.attention import attention_cost
from switchhead.accounting.cost import CONVENTIONS, Convention, Cost
from switchhead.accounting.feed_forward import feed_forward_cost
from switchhead.accounting.model import Device, Dtype, ModelResources, model_resources

if TYPE_CHECKING:
    from switchhead.hf import SwitchHeadConfig


@dataclass(frozen=True, kw_only=True)
class LengthCost:
    """Cost of a model on sequences of one length.

    Attributes:
        chunk_length: tokens of a sequence.
        attention: cost of one attention layer for one sequence in every convention.
        feed_forward: cost of one feed-forward layer, likewise.
        model: cost of the whole model.
    """

    chunk_length: int
    attention: Mapping[Convention, Cost]
    feed_forward: Mapping[Convention, Cost]
    model: ModelResources


def cost_by_length(
    config: SwitchHeadConfig,
    *,
    chunk_length: int,
    lengths: Sequence[int],
    batch_size: int = 1,
    dtype: Dtype = "float32",
    device: Device = "cuda",
) -> list[LengthCost]:
    """Costs at every length; a Transformer-XL's memory grows with it, so that it stays as many chunks.

    Args:
        config: the model.
        chunk_length: tokens of a sequence that `config.memory_length` belongs to.
        lengths: tokens of a sequence instead.
        batch_size: sequences in a step.
        dtype, device: see `model_resources`.

    Raises:
        ValueError: a length or batch size below 1.
    """
    costs = []
    for length in lengths:
        memory_length = config.memory_length * length // chunk_length
        resized = dataclasses.replace(config, memory_length=memory_length)
        attention: dict[Convention, Cost] = {}
        feed_forward: dict[Convention, Cost] = {}
        for name in CONVENTIONS:
            attention[name] = attention_cost(resized, chunk_length=length, convention=name)
            feed_forward[name] = feed_forward_cost(resized, chunk_length=length, convention=name)
        model = model_resources(resized, chunk_length=length, batch_size=batch_size, dtype=dtype, device=device)
        costs.append(LengthCost(chunk_length=length, attention=attention, feed_forward=feed_forward, model=model))
    return costs


def plot_growth(curves: Mapping[str, Sequence[LengthCost]], path: Path) -> None:
    """Draw operations a token, training memory and cache of several models over the length, into an image file."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    lengths = sorted({cost.chunk_length for costs in curves.values() for cost in costs})
    figure = Figure(figsize=(10, 8), layout="constrained")
    axes = figure.subplots(2, 2).flat
    panels = (
        ("attention: MACs a token and layer", "", lambda cost: cost.attention["executed"].macs / cost.chunk_length),
        ("model: forward FLOPs a token", "", lambda cost: cost.model.forward_flops),
        ("training step of a batch: peak memory", "B", lambda cost: cost.model.peak_bytes),
        ("generation: key-value cache", "B", lambda cost: cost.model.cache_bytes * cost.chunk_length),
    )
    for panel, (title, unit, value) in zip(axes, panels, strict=True):
        for name, costs in curves.items():
            panel.plot([cost.chunk_length for cost in costs], [value(cost) for cost in costs], "o-", label=name)
        panel.set(title=title, xlabel="tokens of the sequence")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(lengths, labels=[f"{length:,}" for length in lengths])
        panel.yaxis.set_major_formatter(EngFormatter(unit))
        panel.yaxis.set_minor_formatter(EngFormatter(unit))
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(path, dpi=120)

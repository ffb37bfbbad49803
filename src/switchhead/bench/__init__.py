"""Timings that the documentation quotes, each a command."""

from switchhead.bench.layer import LAYERS, LayerRow, as_table, bench_layer
from switchhead.bench.passes import PassRow, bench_passes, passes_as_table
from switchhead.bench.routings import NAMES
from switchhead.bench.step import StepRow, bench_steps, steps_as_table

__all__ = [
    "LAYERS",
    "NAMES",
    "LayerRow",
    "PassRow",
    "StepRow",
    "as_table",
    "bench_layer",
    "bench_passes",
    "bench_steps",
    "passes_as_table",
    "steps_as_table",
]

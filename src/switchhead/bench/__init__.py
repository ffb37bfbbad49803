"""Timings that the documentation quotes, each a command."""

from switchhead.bench.generate import GenerationCost, GenerationRow, bench_generation, generation_as_table
from switchhead.bench.layer import LAYERS, LayerRow, as_table, bench_layer
from switchhead.bench.passes import PassRow, bench_passes, passes_as_table
from switchhead.bench.routings import NAMES
from switchhead.bench.step import StepRow, bench_steps, steps_as_table

__all__ = [
    "LAYERS",
    "NAMES",
    "GenerationCost",
    "GenerationRow",
    "LayerRow",
    "PassRow",
    "StepRow",
    "as_table",
    "bench_generation",
    "bench_layer",
    "bench_passes",
    "bench_steps",
    "generation_as_table",
    "passes_as_table",
    "steps_as_table",
]

"""Timings that the documentation quotes, each a command."""

from switchhead.bench.layer import LAYERS, LayerRow, as_table, bench_layer
from switchhead.bench.routings import NAMES

__all__ = ["LAYERS", "NAMES", "LayerRow", "as_table", "bench_layer"]

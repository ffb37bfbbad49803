"""Timings that the documentation quotes, each a command."""

from switchhead.bench.layer import LAYERS, LayerRow, bench_layer

__all__ = ["LAYERS", "LayerRow", "bench_layer"]

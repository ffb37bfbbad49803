"""`switchhead bench`."""

from __future__ import annotations

import dataclasses
import sys
from typing import Literal

import tyro

from switchhead.cli.common import Json, UsageError, print_json


def bench(
    what: tyro.conf.Positional[Literal["layer"]],
    /,
    *,
    layers: tuple[str, ...] = (),
    lengths: tuple[int, ...] = (),
    routings: tuple[str, ...] = (),
    positions: Literal["rotary", "none", "relative"] = "rotary",
    as_json: Json = False,
) -> None:
    """Time a layer, forward and backward, against dense and grouped-query attention; needs a CUDA device.

    Args:
        layers: of switchhead.bench.LAYERS; all by default.
        lengths: of sequences; otherwise the layer's own.
        routings: uniform, skewed, trained; all by default.
        positions: of all layers.
    """
    from switchhead.bench import LAYERS, NAMES, as_table, bench_layer

    for given, known in ((layers, LAYERS), (routings, NAMES)):
        if unknown := set(given) - set(known):
            raise UsageError(f"{', '.join(sorted(unknown))} unknown; use {', '.join(known)}")
    rows = []
    measured = bench_layer(layers or LAYERS, lengths=lengths or None, routings=routings or NAMES, positions=positions)
    for row in measured:
        rows.append(row)
        print(as_table([row]).splitlines()[-1], file=sys.stderr, flush=True)
    if as_json:
        print_json([dataclasses.asdict(row) for row in rows])
    else:
        print(as_table(rows))

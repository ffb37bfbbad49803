"""`switchhead demo`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from switchhead.cli.common import Chosen, Device, Json, arguments_of_the_user, print_json


def demo(
    *,
    out: Path = Path("demo-run"),
    seeds: int = 1,
    steps: Chosen[int | None] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Train a small SwitchHead and its dense twins on English, and compare them.

    Takes a few minutes without a GPU. Prints a table and a sample of each model's text, saves a plot of the losses.

    Args:
        out: directory for everything it makes; an earlier demo there is replaced.
        seeds: runs of each model, to tell differences from chance.
        steps: steps of each run; otherwise the recipes'.
    """
    from switchhead.demo import demo, render

    with arguments_of_the_user():
        report = demo(out=out, seeds=seeds, steps=steps, device=device)
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        print(render(report))

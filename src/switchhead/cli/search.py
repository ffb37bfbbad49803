"""`switchhead search` and `switchhead ablate`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from switchhead.cli.common import (
    Chosen,
    Device,
    Json,
    UsageError,
    arguments_of_the_user,
    find_recipe,
    print_json,
    table,
)
from switchhead.cli.training import TrainingSettings

if TYPE_CHECKING:
    from switchhead.search import Report

Settings = Annotated[TrainingSettings, tyro.conf.arg(name="")]
AS_THE_RECIPE = TrainingSettings()


def search(
    dense: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DENSE", help="the recipe to replace")],
    /,
    *,
    data: str,
    out: Path,
    valid: Chosen[str | None] = None,
    tolerance: float = 0.005,
    grain: int = 4,
    resume: bool = False,
    device: Device = "auto",
    settings: Settings = AS_THE_RECIPE,
    as_json: Json = False,
) -> None:
    """Find the heads and experts that replace a dense recipe's heads, by the paper's procedure.

    Trains the dense model, then SwitchHead models of its size: 2 heads and k = 2, a larger k, 4 heads. Stops at the
    first that is as good. Writes every run, report.json, report.md and pareto.png.

    Args:
        data: training text, as for `switchhead train`.
        out: where everything goes.
        valid: validation text; otherwise the prepared directory's own, or the tail of the training text.
        tolerance: as good is a perplexity of at most 1 + tolerance times the dense model's.
        grain: head widths are multiples of it.
        resume: go on with what the directory holds.
    """
    from switchhead.search import search, search_recipes

    if not tolerance >= 0:  # nor what is not a number
        raise UsageError(f"--tolerance {tolerance} must be 0 or more")
    recipe = find_recipe(dense)
    recipe = dataclasses.replace(recipe, training=settings.apply(recipe.training))
    with arguments_of_the_user():
        search_recipes(recipe, grain=grain)
    report = search(
        recipe, data=data, out=out, valid=valid, tolerance=tolerance, grain=grain, resume=resume, device=device
    )
    _show(report, out, as_json=as_json)


def ablate(
    recipe: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE", help="of SwitchHead")],
    /,
    *,
    data: str,
    out: Path,
    valid: Chosen[str | None] = None,
    grain: int = 4,
    resume: bool = False,
    device: Device = "auto",
    settings: Settings = AS_THE_RECIPE,
    as_json: Json = False,
) -> None:
    """Train a SwitchHead recipe with each of the 16 choices of projections that have experts, all of equal size.

    Writes every run, report.json, report.md and pareto.png.

    Args:
        data: training text, as for `switchhead train`.
        out: where everything goes.
        valid: validation text; otherwise the prepared directory's own, or the tail of the training text.
        grain: head widths are multiples of it.
        resume: go on with what the directory holds.
    """
    from switchhead.search import ablate, ablation_recipes

    chosen = find_recipe(recipe)
    chosen = dataclasses.replace(chosen, training=settings.apply(chosen.training))
    with arguments_of_the_user():
        ablation_recipes(chosen, grain=grain)
    report = ablate(chosen, data=data, out=out, valid=valid, grain=grain, resume=resume, device=device)
    _show(report, out, as_json=as_json)


def _show(report: Report, out: Path, *, as_json: bool) -> None:
    from switchhead.search.report import speaks_for_all

    if not speaks_for_all():
        return
    if as_json:
        print_json({**dataclasses.asdict(report), "pareto_front": report.pareto_front})
        return
    rows = [
        (trial.name, f"{trial.parameters:,}", f"{trial.macs:,}", f"{trial.cache_numbers:,}", f"{trial.perplexity:.4f}")
        for trial in report.trials
    ]
    if rows:
        header = ("model", "parameters", "attention MACs", "cache", "perplexity")
        print(table(header, rows, right_aligned=(1, 2, 3, 4)) + "\n")
    if report.finished:
        verdict = "no configuration is as good as dense" if report.chosen is None else f"chosen: {report.chosen}"
        print(f"{verdict}\n{out / 'report.md'} has all of it")
    else:
        print("stopped early; the same command with --resume goes on from here")

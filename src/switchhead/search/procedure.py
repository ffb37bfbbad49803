"""The paper's procedure: how many heads and experts replace a dense model's heads (its section 3)."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from switchhead.accounting import count_parameters, match_parameters
from switchhead.recipes import Recipe
from switchhead.search.report import Report, check_directory, describe, write_report
from switchhead.search.trials import Interrupted, make_trainer


def search_recipes(dense: Recipe, *, grain: int = 4) -> list[Recipe]:
    """SwitchHead models of a dense model's size, in the order in which the paper tries them.

    Heads times experts is the dense model's number of heads, rounded up. First 2 heads and k = 2; then a larger k, half
    of the experts but 3 or 4; then 4 heads and k = 2. Each is as large as the dense model, see `match_parameters`.

    Args:
        dense: the recipe to replace.
        grain: head widths are multiples of it.

    Raises:
        ValueError: the recipe is not dense, has fewer than 4 heads, or is too small for experts.
    """
    heads = dense.model.num_attention_heads
    if dense.model.attention != "mha":
        raise ValueError(f"{dense.name} is not dense: the search starts from a recipe whose attention is mha")
    if heads < 4:
        raise ValueError(f"{dense.name} has {heads} heads; the search replaces 4 or more by heads with experts")
    half, quarter = math.ceil(heads / 2), math.ceil(heads / 4)
    larger = min(4, max(3, math.ceil(half / 2)))
    choices = [(2, half, 2), (2, half, larger), (4, quarter, 2)]
    # With few experts a larger k is all of them or more, and four heads would have a single one.
    return [_sized(dense, *choice, grain=grain) for choice in choices if choice[2] <= choice[1]]


def search(
    dense: Recipe,
    *,
    data: str,
    out: str | Path,
    valid: str | None = None,
    tolerance: float = 0.005,
    grain: int = 4,
    resume: bool = False,
    device: str = "auto",
    progress: bool = True,
) -> Report:
    """Train a dense model, then SwitchHead models of its size until one is as good; write a report.

    `out` holds a run directory for every model, and `report.json`, `report.md` and `pareto.png`, written anew after
    each. A search that was killed goes on where it stood; SIGTERM, or Ctrl-C once, saves the training under way.

    Args:
        dense: the recipe to replace, with the training of all models.
        data: training text, as for `switchhead.train.train`.
        out: where everything goes.
        valid: validation text; default: the tail of the training text.
        tolerance: as good is a perplexity of at most `1 + tolerance` times the dense model's.
        grain: head widths are multiples of it.
        resume: go on with what `out` holds.
        device: as for `train`.
        progress: show it on standard error.

    Raises:
        ValueError: a recipe that cannot be replaced, see `search_recipes`, or a negative tolerance.
        SwitchHeadError: what `train` raises, or `out` holds the report on something else.
    """
    if not tolerance >= 0:
        raise ValueError(f"tolerance is {tolerance}; it must be 0 or more")
    candidates, out = search_recipes(dense, grain=grain), Path(out)
    run = make_trainer(out, data=data, valid=valid, resume=resume, device=device, progress=progress)
    report = describe("search", dense, data=data, valid=valid, reference=dense.name, tolerance=tolerance)
    check_directory(report, out)
    try:
        for recipe in [dense, *candidates]:
            report = dataclasses.replace(report, trials=(*report.trials, run(recipe)))
            trial, limit = report.trials[-1], (1 + tolerance) * report.trials[0].perplexity
            if recipe is not dense and trial.perplexity <= limit:
                report = dataclasses.replace(report, chosen=trial.name)
                break
            write_report(report, out)
        report = dataclasses.replace(report, finished=True)
    except Interrupted:
        pass
    write_report(report, out)
    return report


def _sized(dense: Recipe, n_heads: int, n_experts: int, k: int, *, grain: int) -> Recipe:
    recipe = dense.with_model(
        attention="switchhead",
        num_key_value_heads=None,
        num_attention_heads=n_heads,
        num_experts=n_experts,
        num_experts_per_tok=k,
    )
    model = match_parameters(recipe.model, parameters=count_parameters(dense.model).total, grain=grain)
    name = f"{dense.name}-h{n_heads}-e{n_experts}-k{k}"
    return dataclasses.replace(recipe, model=model, name=name, table=None, note="")

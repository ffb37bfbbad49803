"""The paper's ablation: which of the projections q, k, v, o need experts (its table 6), for any model and text."""

from __future__ import annotations

import dataclasses
from itertools import combinations
from pathlib import Path

from switchhead.accounting import count_parameters, match_parameters
from switchhead.recipes import Recipe, dense_twin
from switchhead.search.report import Report, check_directory, describe, write_report
from switchhead.search.trials import Interrupted, make_trainer

COMBINATIONS = tuple("".join(letters) for count in range(5) for letters in combinations("qkvo", count))


def ablation_recipes(recipe: Recipe, *, grain: int = 4) -> list[Recipe]:
    """The recipe with all 16 choices of expert projections, each as large as its dense twin.

    Experts cost parameters, so heads are the narrower the more projections have them, as in the paper's table; see
    `match_parameters`. A feed-forward of experts stays as it is, and the recipe's own size is the one to match.

    Args:
        recipe: a SwitchHead recipe; its own expert projections do not matter.
        grain: head widths are multiples of it.

    Raises:
        ValueError: the recipe is not of SwitchHead, or too small.
    """
    if recipe.model.attention != "switchhead":
        raise ValueError(f"{recipe.name} has attention {recipe.model.attention!r}; only switchhead's can be ablated")
    target, start = recipe.model, recipe
    if recipe.model.feed_forward != "sigma_moe":
        target = dense_twin(recipe).model
        start = recipe.with_model(intermediate_size=target.intermediate_size)
    parameters = count_parameters(target).total
    recipes = []
    for projections in COMBINATIONS:
        model = start.with_model(expert_projections=projections).model
        model = match_parameters(model, parameters=parameters, grain=grain)
        name = f"{recipe.name}-experts-{projections or 'none'}"
        recipes.append(dataclasses.replace(start, model=model, name=name, table=None, note=""))
    return recipes


def ablate(
    recipe: Recipe,
    *,
    data: str,
    out: str | Path,
    valid: str | None = None,
    grain: int = 4,
    resume: bool = False,
    device: str = "auto",
    progress: bool = True,
) -> Report:
    """Train the recipe with every choice of expert projections, and write a report.

    Directories, resuming and errors are those of `switchhead.search.search`.

    Args:
        recipe: a SwitchHead recipe, with the training of all models.
        data: training text, as for `switchhead.train.train`.
        out: where everything goes.
        valid: validation text; default: the tail of the training text.
        grain: head widths are multiples of it.
        resume: go on with what `out` holds.
        device: as for `train`.
        progress: show it on standard error.
    """
    recipes, out = ablation_recipes(recipe, grain=grain), Path(out)
    run = make_trainer(out, data=data, valid=valid, resume=resume, device=device, progress=progress)
    report = describe("ablation", recipe, data=data, valid=valid)
    check_directory(report, out)
    try:
        for variant in recipes:
            report = dataclasses.replace(report, trials=(*report.trials, run(variant)))
            write_report(report, out)
        best = min(report.trials, key=lambda trial: trial.perplexity)
        report = dataclasses.replace(report, finished=True, chosen=best.name)
    except Interrupted:
        pass
    write_report(report, out)
    return report

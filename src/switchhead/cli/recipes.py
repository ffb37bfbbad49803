"""`switchhead recipes`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from switchhead.cli.common import Json, find_recipe, print_json, table

if TYPE_CHECKING:
    from switchhead.recipes import Recipe


def recipes(
    name: Annotated[
        tyro.conf.Positional[str] | None,
        tyro.conf.arg(metavar="[RECIPE]", help="show this one; otherwise all are listed", help_behavior_hint=""),
    ] = None,
    /,
    *,
    as_json: Json = False,
) -> None:
    """List the recipes, or show one with everything it sets."""
    from switchhead.recipes import get_recipe, recipe_names

    if name is not None:
        _show_recipe(find_recipe(name), as_json=as_json)
        return
    summaries = [_summary(get_recipe(name)) for name in recipe_names()]
    if as_json:
        print_json(summaries)
        return
    rows = [
        (s["name"], f"{s['parameters']:,}", f"{s['active_parameters']:,}", s["table"] or "", s["dataset"])
        for s in summaries
    ]
    print(table(("name", "parameters", "active", "table", "dataset"), rows, right_aligned=(1, 2)))


def _summary(recipe: Recipe) -> dict[str, Any]:
    from switchhead.accounting import count_parameters

    count = count_parameters(recipe.model)
    return {
        "name": recipe.name,
        "parameters": count.total,
        "active_parameters": count.active,
        "table": recipe.table,
        "dataset": recipe.dataset,
        "note": recipe.note,
    }


def _show_recipe(recipe: Recipe, *, as_json: bool) -> None:
    summary = _summary(recipe)
    unread = recipe.model.fields_without_effect
    model = {name: getattr(recipe.model, name) for name in type(recipe.model).__annotations__ if name not in unread}
    training = dataclasses.asdict(recipe.training)
    if as_json:
        print_json({**summary, "model": model, "training": training})
        return
    for title, values in (("", summary), ("model", model), ("training", training)):
        if title:
            print(f"\n{title}")
        width = max(map(len, values))
        for key, value in values.items():
            print(f"  {key:<{width}}  {f'{value:,}' if key.endswith('parameters') else value}")

"""Recipes by name."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable

from switchhead.errors import SwitchHeadError
from switchhead.recipes.base import Recipe

_RECIPES: dict[str, Callable[[], Recipe]] = {}


class UnknownRecipeError(SwitchHeadError):
    """There is no recipe of that name."""


def experiment(*, table: str | None = None) -> Callable[[Callable[[], Recipe]], Callable[[], Recipe]]:
    """Make a function that returns a recipe findable by name.

    The recipe is named after the function (`c4_47m_dense` is `c4-47m-dense`); its note is the function's docstring.

    Args:
        table: table of arXiv 2312.07987 that reports the experiment.
    """

    def decorate(build: Callable[[], Recipe]) -> Callable[[], Recipe]:
        note = " ".join((inspect.getdoc(build) or "").split())
        return functools.wraps(build)(register(build, name=build.__name__.replace("_", "-"), note=note, table=table))

    return decorate


def register(build: Callable[[], Recipe], *, name: str, note: str, table: str | None = None) -> Callable[[], Recipe]:
    """Make a recipe findable by a name of its own; for variants that are made in a row, where `experiment` is not."""

    def named() -> Recipe:
        return dataclasses.replace(build(), name=name, table=table, note=note)

    _RECIPES[name] = named
    return named


def recipe_names() -> list[str]:
    """Names of all recipes: those for a laptop first, then as the paper's tables have them."""
    return list(_RECIPES)


def get_recipe(name: str) -> Recipe:
    """The recipe of a name.

    Raises:
        UnknownRecipeError: there is none; the message has the most similar names.
    """
    if name not in _RECIPES:
        similar = difflib.get_close_matches(name, _RECIPES, n=3)
        hint = f"did you mean {', '.join(similar)}?" if similar else "`switchhead recipes` lists them all"
        raise UnknownRecipeError(f"unknown recipe {name!r}; {hint}")
    return _RECIPES[name]()

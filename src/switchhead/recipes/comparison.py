"""Recipes beside their dense twins, and beside what the paper prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from switchhead.accounting import Convention, Cost, attention_cost, count_parameters
from switchhead.recipes.aligned import ALIGNED
from switchhead.recipes.base import Recipe
from switchhead.recipes.published import PUBLISHED
from switchhead.recipes.registry import get_recipe, recipe_names

_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """Resources of a model of the paper, as this package counts them and as the paper prints them.

    Attributes:
        name: of the recipe.
        table: that reports it.
        dense_twin: the dense model that it is compared with.
        parameters: of the model.
        parameters_printed: None where the paper prints none.
        macs_consistent: of one attention layer for one sequence, see `attention_cost`.
        macs_published: the same as the paper counts.
        macs_printed: the paper's figure; None where it prints none.
        macs_ratio_consistent: `macs_consistent` over the dense twin's.
        macs_ratio_published: `macs_published` over the dense twin's.
        floats_consistent: numbers that the layer holds; likewise the rest.
        floats_published: see above.
        floats_printed: see above.
        floats_ratio_consistent: see above.
        floats_ratio_published: see above.
        meets_paper: whether parameters, and MACs and floats as the paper counts, round to every figure it prints.
    """

    name: str
    table: str | None
    dense_twin: str
    parameters: int
    parameters_printed: str | None
    macs_consistent: int
    macs_published: int
    macs_printed: str | None
    macs_ratio_consistent: float
    macs_ratio_published: float
    floats_consistent: int
    floats_published: int
    floats_printed: str | None
    floats_ratio_consistent: float
    floats_ratio_published: float
    meets_paper: bool


def compare_with_paper() -> list[PaperRow]:
    """Every model of the paper."""
    dense = _dense_recipes()
    return [_row(recipe, _twin(recipe, dense)) for recipe in map(get_recipe, PUBLISHED)]


def dense_twin(recipe: Recipe) -> Recipe:
    """The dense model that a recipe is compared with: of its corpus and size, with all the heads.

    An aligned recipe's is the aligned twin of the original's, whatever width brought each to its size.

    Raises:
        ValueError: there is none among the recipes.
    """
    original = recipe.name.removesuffix(ALIGNED)
    if original != recipe.name:
        return get_recipe(dense_twin(get_recipe(original)).name + ALIGNED)
    return _twin(recipe, _dense_recipes())


def as_printed(number: float, like: str) -> str:
    """A number in the unit and with the decimals of a printed figure such as `"453.4M"`."""
    decimals = len(like[:-1].partition(".")[2])
    return f"{number / _UNITS[like[-1]]:.{decimals}f}{like[-1]}"


def _row(recipe: Recipe, twin: Recipe) -> PaperRow:
    printed = PUBLISHED[recipe.name]
    parameters = count_parameters(recipe.model).total
    consistent, published = _cost(recipe, "consistent"), _cost(recipe, "published")
    twin_consistent, twin_published = _cost(twin, "consistent"), _cost(twin, "published")
    figures = [
        (parameters, printed.parameters),
        (published.macs, printed.macs),
        (published.floats, printed.floats),
    ]
    return PaperRow(
        name=recipe.name,
        table=recipe.table,
        dense_twin=twin.name,
        parameters=parameters,
        parameters_printed=printed.parameters,
        macs_consistent=consistent.macs,
        macs_published=published.macs,
        macs_printed=printed.macs,
        macs_ratio_consistent=consistent.macs / twin_consistent.macs,
        macs_ratio_published=published.macs / twin_published.macs,
        floats_consistent=consistent.floats,
        floats_published=published.floats,
        floats_printed=printed.floats,
        floats_ratio_consistent=consistent.floats / twin_consistent.floats,
        floats_ratio_published=published.floats / twin_published.floats,
        meets_paper=all(as_printed(number, figure) == figure for number, figure in figures if figure),
    )


def _cost(recipe: Recipe, convention: Convention) -> Cost:
    return attention_cost(recipe.model, chunk_length=recipe.training.chunk_length, convention=convention)


def _dense_recipes() -> list[Recipe]:
    recipes = [get_recipe(name) for name in recipe_names() if not name.endswith(ALIGNED)]
    return [
        recipe for recipe in recipes if recipe.model.attention == "mha" and recipe.model.feed_forward != "sigma_moe"
    ]


def _twin(recipe: Recipe, dense: Sequence[Recipe]) -> Recipe:
    family = _family(recipe)
    twins = [candidate for candidate in dense if _family(candidate) == family]
    if not twins:
        raise ValueError(f"there is no dense recipe of the corpus, size and block of {recipe.name}")
    return max(twins, key=lambda twin: (twin.model.num_attention_heads, not twin.model.num_key_value_heads))


def _family(recipe: Recipe) -> tuple[object, ...]:
    model = recipe.model
    return recipe.dataset, model.hidden_size, model.num_hidden_layers, model.positions, model.norm

"""One function for every experiment: `get_recipe("tiny-switchhead")`, or the functions of the modules themselves."""

# The order of these imports is the order of `recipe_names()`; each module registers its recipes.
from switchhead.recipes import tiny, transformer_xl, moa, switchall, rotary, expert_projections  # noqa: F401, I001
from switchhead.recipes import head_gating, aligned, modern  # noqa: F401
from switchhead.recipes.base import Recipe
from switchhead.recipes.comparison import PaperRow, compare_with_paper, dense_twin
from switchhead.recipes.published import PUBLISHED, Published
from switchhead.recipes.registry import UnknownRecipeError, experiment, get_recipe, recipe_names

__all__ = [
    "PUBLISHED",
    "PaperRow",
    "Published",
    "Recipe",
    "UnknownRecipeError",
    "compare_with_paper",
    "dense_twin",
    "experiment",
    "get_recipe",
    "recipe_names",
]

"""One function for every experiment: `get_recipe("tiny-switchhead")`, or the functions of the modules themselves."""

# The order of these imports is the order of `recipe_names()`; each module registers its recipes.
from switchhead.recipes import tiny, transformer_xl, rotary, expert_projections  # noqa: F401, I001
from switchhead.recipes.base import Recipe
from switchhead.recipes.registry import UnknownRecipeError, experiment, get_recipe, recipe_names

__all__ = ["Recipe", "UnknownRecipeError", "experiment", "get_recipe", "recipe_names"]

"""What the pages on accounting and recipes say is what the code does."""

import functools
import re
from pathlib import Path

import pytest

from switchhead.accounting import attention_cost
from switchhead.recipes import compare_with_paper, get_recipe, recipe_names

DOCS = Path(__file__).parents[2] / "docs"


def test_the_values_beside_the_example_are_its_results():
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "accounting.md").read_text(), flags=re.DOTALL)
    names: dict[str, object] = {}
    checked = 0
    for line in code.splitlines():
        expression, _, comment = line.partition("  # ")
        if comment:
            assert eval(expression, names) == pytest.approx(float(comment.split()[0]), rel=1e-3), expression
            checked += 1
        else:
            exec(line, names)
    assert checked == 6


@pytest.mark.parametrize("page", ["accounting.md", "paper.md", "recipes.md"])
def test_commands_name_recipes_that_exist(page):
    text = (DOCS / page).read_text()
    commands = re.findall(r"switchhead (?:recipes|resources|match|search|ablate|train) [^`\n#]*", text)
    named = [word for command in commands for word in command.split()[2:3]]
    assert named
    unknown = {name for name in named if not name.startswith("-") and name not in recipe_names()}
    assert {name for name in unknown if ".py:" not in name} <= {"NAME", "RECIPE", "$recipe"}


def test_the_table_of_costs_beside_dense_is_what_the_conventions_give():
    rows = {row.name: row for row in compare_with_paper()}
    lines = re.findall(r"^\| `(\S+)` \| ([\d. |]+) \|$", (DOCS / "accounting.md").read_text(), flags=re.MULTILINE)
    assert len(lines) == 12
    for name, numbers in lines:
        row = rows[name]
        own, dense = executed_macs(name), executed_macs(row.dense_twin)
        ratios = (
            row.macs_ratio_published,
            row.macs_ratio_consistent,
            own / dense,
            row.floats_ratio_published,
            row.floats_ratio_consistent,
        )
        printed = [float(number) for number in numbers.split(" | ")]
        assert printed == pytest.approx([100 * ratio for ratio in ratios], abs=0.0501), name


@functools.cache
def executed_macs(name):
    recipe = get_recipe(name)
    return attention_cost(recipe.model, chunk_length=recipe.training.chunk_length, convention="executed").macs

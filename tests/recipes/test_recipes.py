import json
from pathlib import Path

import pytest
import torch

import switchhead.recipes
from switchhead.accounting import count_parameters
from switchhead.hf import SwitchHeadForCausalLM
from switchhead.recipes import Recipe, UnknownRecipeError, get_recipe, recipe_names
from switchhead.recipes.registry import experiment
from switchhead.recipes.tiny import tiny_dense

# The experiments as data, for those who have them beside the repository.
EXPERIMENTS = Path(__file__).parents[3] / "shared" / "paper" / "experiments.json"


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_builds(name):
    recipe = get_recipe(name).with_model(num_hidden_layers=1)
    with torch.device("meta"):
        model = SwitchHeadForCausalLM(recipe.model)
    assert sum(p.numel() for p in model.parameters()) == count_parameters(recipe.model).total


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_is_named_after_its_function_and_says_what_it_is(name):
    recipe = get_recipe(name)
    assert recipe.name == name
    assert recipe.note
    modules = [getattr(switchhead.recipes, m) for m in ("tiny", "transformer_xl", "rotary", "expert_projections")]
    assert any(hasattr(module, name.replace("-", "_")) for module in modules)


def test_recipes_of_the_same_name_are_equal_and_independent():
    first, second = get_recipe("tiny-dense"), get_recipe("tiny-dense")
    assert first.training == second.training
    assert first.model.to_dict() == second.model.to_dict()
    assert first.model is not second.model


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-dense-h2"])
def test_tiny_models_have_equal_size_and_training(name):
    switchhead, dense = get_recipe("tiny-switchhead"), get_recipe(name)
    size = count_parameters(switchhead.model).total
    assert abs(count_parameters(dense.model).total - size) / size < 0.005
    assert dense.training == switchhead.training


@pytest.mark.parametrize("name", recipe_names())
def test_models_are_trained_on_the_context_they_state(name):
    recipe = get_recipe(name)
    assert recipe.model.max_position_embeddings == recipe.training.chunk_length
    assert recipe.model.memory_length % recipe.training.chunk_length == 0


def test_unknown_names_are_answered_with_similar_ones():
    with pytest.raises(UnknownRecipeError, match="unknown recipe 'tiny-switchead'; did you mean tiny-switchhead"):
        get_recipe("tiny-switchead")
    with pytest.raises(UnknownRecipeError, match=r"unknown recipe '0'; `switchhead recipes` lists them all"):
        get_recipe("0")


def test_changes_are_checked_like_the_configurations_themselves():
    recipe = get_recipe("tiny-switchhead")
    with pytest.raises(ValueError, match=r"unknown field 'head_dims'; did you mean 'head_dim'"):
        recipe.with_model(head_dims=3)
    with pytest.raises(ValueError, match="num_experts_per_tok=9"):
        recipe.with_model(num_experts_per_tok=9)
    with pytest.raises(ValueError, match="steps is 0"):
        recipe.with_training(steps=0)


def test_changes_leave_the_original_as_it_was():
    recipe = get_recipe("tiny-dense")
    changed = recipe.with_model(num_attention_heads=2).with_training(steps=700).on("elsewhere")
    assert (changed.model.num_attention_heads, changed.training.steps, changed.dataset) == (2, 700, "elsewhere")
    assert recipe.model.num_attention_heads == 8
    assert recipe.training.steps != 700
    assert recipe.dataset != "elsewhere"


def test_a_new_experiment_needs_only_a_function(monkeypatch):
    monkeypatch.setattr("switchhead.recipes.registry._RECIPES", {})

    @experiment(table="12")
    def my_own_idea() -> Recipe:
        """One head."""
        return tiny_dense().with_model(num_attention_heads=1)

    recipe = get_recipe("my-own-idea")
    assert (recipe.name, recipe.table, recipe.note) == ("my-own-idea", "12", "One head.")
    assert recipe.model.num_attention_heads == 1


def as_data(recipe: Recipe) -> dict:
    """A recipe in the words of the data file."""
    model, training = recipe.model, recipe.training
    switchhead_only = model.attention == "switchhead"
    return {
        "name": recipe.name,
        "table": recipe.table,
        "architecture": "dense" if model.attention == "mha" else model.attention,
        "dataset": recipe.dataset,
        "positions": {"relative": "xl", "rotary": "rope"}[model.positions],
        "d_model": model.hidden_size,
        "n_layers": model.num_hidden_layers,
        "n_heads": model.num_attention_heads,
        "d_head": model.head_dim,
        "d_ff": model.intermediate_size,
        "n_experts": model.num_experts,
        "k": model.num_experts_per_tok,
        "expert_projections": model.expert_projections if switchhead_only else None,
        "shared_selection": model.shared_selection,
        "chunk_length": training.chunk_length,
        "context_chunks": 1 + model.memory_length // training.chunk_length,
        "batch_size": training.batch_size,
        "dropout": model.dropout,
        "grad_clip": training.grad_clip,
        "warmup_steps": training.warmup_steps,
    }


@pytest.mark.skipif(not EXPERIMENTS.exists(), reason="the experiments as data are not beside the repository")
def test_recipes_are_the_papers_experiments():
    data = json.loads(EXPERIMENTS.read_text())
    rows = {row["name"]: row for row in data["experiments"] if row["architecture"] in ("dense", "switchhead")}
    recipes = {name: get_recipe(name) for name in recipe_names() if get_recipe(name).table}
    assert recipes.keys() == rows.keys()
    for name, recipe in recipes.items():
        found = as_data(recipe)
        assert found == {key: rows[name].get(key, False) for key in found}
        assert recipe.training.steps == data["steps"]
        assert recipe.training.learning_rate == data["learning_rate"]
        assert recipe.model.vocab_size == (205 if recipe.dataset == "enwik8" else 8000)

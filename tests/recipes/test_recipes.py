import dataclasses
import json
from pathlib import Path

import pytest
import torch

import switchhead.recipes
from switchhead.accounting import count_parameters
from switchhead.hf import SwitchHeadConfig, SwitchHeadForCausalLM
from switchhead.nn import Router
from switchhead.recipes import (
    PUBLISHED,
    Recipe,
    UnknownRecipeError,
    compare_with_paper,
    dense_twin,
    get_recipe,
    recipe_names,
)
from switchhead.recipes.registry import experiment
from switchhead.recipes.tiny import tiny_dense
from switchhead.routing import Routing

# The experiments as data, for those who have them beside the repository.
EXPERIMENTS = Path(__file__).parents[3] / "shared" / "paper" / "experiments.json"


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_builds(name):
    recipe = get_recipe(name).with_model(num_hidden_layers=1)
    with torch.device("meta"):
        model = SwitchHeadForCausalLM(recipe.model)
    model.tie_weights()
    assert sum(p.numel() for p in model.parameters()) == count_parameters(recipe.model).total


def reduced(model: SwitchHeadConfig) -> SwitchHeadConfig:
    """One narrow layer of the same kinds, heads, experts and choices."""
    sizes = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 1, "head_dim": 4, "dropout": 0.0}
    sizes["memory_length"] = 8 if model.memory_length else 0
    if model.feed_forward == "sigma_moe":
        sizes["ffn_expert_size"] = 6
    else:
        sizes["intermediate_size"] = 24
    return dataclasses.replace(model, **sizes)


# Many recipes differ in widths, corpus and length alone: one of each kind takes the step.
DISTINCT = {
    json.dumps(reduced(get_recipe(name).model).to_dict(), sort_keys=True): name for name in recipe_names()[::-1]
}


@pytest.mark.parametrize("name", sorted(DISTINCT.values()))
def test_a_training_step_gives_every_parameter_a_finite_gradient_where_it_was_used(name):
    config = dataclasses.replace(reduced(get_recipe(name).model), max_position_embeddings=8)
    model = SwitchHeadForCausalLM(config).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    chosen: dict[str, set[tuple[int, int]]] = {}
    for path, module in model.named_modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda _, __, routing, path=path: note(chosen, path, routing))
    tokens = torch.randint(config.vocab_size, (2, 8))
    memory = (torch.randn(2, 8, config.hidden_size),) if config.memory_length else None
    loss = model(tokens, shift_labels=tokens, memory=memory).loss
    loss.backward()
    optimizer.step()
    assert torch.isfinite(loss)
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None, path
        assert torch.isfinite(parameter.grad).all(), path
        used = parameter.grad != 0
        assert used.any(), path
        assert torch.isfinite(parameter).all(), path
        assert not torch.equal(parameter, before[path]), path
        if parameter.ndim == 4:  # experts [H or 1, E, d_in, d_out]: some number of every chosen one, none of the rest
            routings = [chosen[router] for router in chosen if router.rpartition(".")[0] == path.rsplit(".", 2)[0]]
            found = {(head, expert) for head, expert in used.flatten(2).any(-1).nonzero().tolist()}
            assert any(found == experts for experts in routings), path


def note(chosen: dict[str, set[tuple[int, int]]], path: str, routing: Routing) -> None:
    """Add the experts that a router chose, by head."""
    for head in range(routing.expert_indices.shape[1]):
        experts = routing.expert_indices[:, head].unique().tolist()
        chosen.setdefault(path, set()).update((head, expert) for expert in experts)


def test_a_recipe_says_what_it_is():
    for name in recipe_names():
        recipe = get_recipe(name)
        assert recipe.name == name
        assert recipe.note, name
        assert recipe.dataset, name


def test_recipes_of_the_paper_are_functions_of_their_names():
    modules = [getattr(switchhead.recipes, m) for m in ("transformer_xl", "moa", "switchall", "rotary")]
    modules.append(switchhead.recipes.expert_projections)
    for name in PUBLISHED:
        assert any(hasattr(module, name.replace("-", "_")) for module in modules), name


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


def test_models_are_trained_on_the_context_they_state():
    for name in recipe_names():
        recipe = get_recipe(name)
        assert recipe.model.max_position_embeddings == recipe.training.chunk_length, name
        assert recipe.model.memory_length % recipe.training.chunk_length == 0, name


@pytest.mark.parametrize("name", PUBLISHED)
def test_aligned_twins_have_widths_for_gpus_and_the_size_of_the_original(name):
    original, aligned = get_recipe(name), get_recipe(f"{name}-aligned")
    model = aligned.model
    widths = [model.hidden_size, model.head_dim]
    widths.append(model.ffn_expert_size if model.feed_forward == "sigma_moe" else model.intermediate_size)
    assert [width % 16 for width in widths] == [0, 0, 0]
    size = count_parameters(original.model).total
    assert abs(count_parameters(model).total - size) <= 0.0025 * size
    same = {"hidden_size": 16, "head_dim": 4, "intermediate_size": 2080, "ffn_expert_size": None}
    if model.feed_forward == "sigma_moe":
        same["ffn_expert_size"] = 128
    assert dataclasses.replace(model, **same).to_dict() == dataclasses.replace(original.model, **same).to_dict()
    assert (aligned.training, aligned.dataset) == (original.training, original.dataset)
    assert aligned.table is None


def test_aligned_feed_forwards_are_multiples_of_64_where_one_is_close_enough_and_say_so():
    for name in PUBLISHED:
        aligned = get_recipe(f"{name}-aligned")
        if aligned.model.feed_forward == "sigma_moe":
            continue
        d_ff, size = aligned.model.intermediate_size, count_parameters(get_recipe(name).model).total
        assert aligned.note.endswith(f"d_ff of {16 if d_ff % 64 else 64}.")
        if d_ff % 64:
            for near in (d_ff // 64 * 64, d_ff // 64 * 64 + 64):
                other = count_parameters(aligned.with_model(intermediate_size=near).model).total
                assert abs(other - size) > 0.0025 * size, name


@pytest.mark.parametrize("size", ["47m", "262m", "1300m"])
def test_modern_models_of_a_size_have_equal_parameters_training_and_block(size):
    dense, *others = (get_recipe(f"modern-{size}-{kind}") for kind in ("dense", "gqa", "switchhead"))
    target = count_parameters(dense.model).total
    assert round(target / 1e6, -2 if size == "1300m" else 0) == int(size[:-1])
    for other in others:
        assert abs(count_parameters(other.model).total - target) <= 0.0025 * target
        assert other.training == dense.training
        assert [other.model.hidden_size % 16, other.model.head_dim % 16, other.model.intermediate_size % 16] == [0] * 3
        block = ("norm", "qk_norm", "use_bias", "feed_forward", "rotary_fraction", "tie_word_embeddings")
        assert [getattr(other.model, field) for field in block] == [getattr(dense.model, field) for field in block]


@pytest.mark.parametrize("corpus", ["wikitext103", "c4", "pes2o"])
@pytest.mark.parametrize("size", ["47m", "262m"])
def test_sigma_moe_under_dense_attention_differs_from_switchall_in_attention_alone(corpus, size):
    switchall, dense = get_recipe(f"{corpus}-{size}-switchall"), get_recipe(f"{corpus}-{size}-sigma-moe")
    fields = [field.name for field in dataclasses.fields(SwitchHeadConfig) if field.name.startswith("ffn_")]
    assert [getattr(dense.model, field) for field in fields] == [getattr(switchall.model, field) for field in fields]
    assert dense.model.attention == "mha"
    assert dense.training == switchall.training


@pytest.mark.parametrize(
    ("name", "dense"),
    [
        ("c4-262m-switchhead-aligned", "c4-262m-dense-aligned"),
        ("wikitext103-47m-switchall-aligned", "wikitext103-47m-dense-aligned"),
        ("c4-54m-switchhead-rope-mac-matched-aligned", "c4-45m-dense-rope-aligned"),
        ("modern-262m-gqa", "modern-262m-dense"),
        ("tiny-dense-h2", "tiny-dense"),
    ],
)
def test_every_model_is_compared_with_the_dense_one_of_its_size(name, dense):
    assert dense_twin(get_recipe(name)).name == dense


def test_every_model_of_the_paper_is_compared_with_the_dense_one_of_its_corpus_and_size():
    twins = {row.name: row.dense_twin for row in compare_with_paper()}
    assert twins.pop("c4-63m-switchhead-mac-matched") == "c4-47m-dense"
    assert twins.pop("c4-376m-switchhead-mac-matched") == "c4-262m-dense"
    assert twins.pop("c4-54m-switchhead-rope-mac-matched") == "c4-45m-dense-rope"
    for name, dense in twins.items():
        corpus, size, *_ = name.split("-")
        assert dense == f"{corpus}-{size}-dense{'-rope' if '-rope' in name else ''}"


def test_every_recipe_has_a_dense_twin_of_its_corpus():
    for name in recipe_names():
        recipe, twin = get_recipe(name), dense_twin(get_recipe(name))
        assert (twin.model.attention, twin.model.feed_forward != "sigma_moe") == ("mha", True), name
        assert (twin.dataset, twin.name.endswith("-aligned")) == (recipe.dataset, name.endswith("-aligned")), name


def test_a_model_without_a_dense_twin_is_refused():
    with pytest.raises(ValueError, match="no dense recipe of the corpus, size and block of tiny-switchhead"):
        dense_twin(get_recipe("tiny-switchhead").with_model(hidden_size=16))


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
    with pytest.raises(ValueError, match=r"unknown field 'learn_rate'; did you mean 'learning_rate'"):
        recipe.with_training(learn_rate=0.1)
    with pytest.raises(ValueError, match=r"unknown field 'lr'; there are steps, batch_size, .*learning_rate"):
        recipe.with_training(lr=0.1)


def test_another_kind_of_attention_comes_with_its_own_gating():
    dense = get_recipe("tiny-dense")
    moa = {"attention": "moa", "num_attention_heads": 2, "num_experts": 4}
    assert dense.with_model(**moa).model.gating == "softmax"
    assert dense.with_model(**moa, gating="sigmoid").model.gating == "sigmoid"
    assert dense.with_model(**moa).with_model(attention="switchhead").model.gating == "sigmoid"


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
    experts = model.feed_forward == "sigma_moe"
    architecture = {"mha": "dense"}.get(model.attention, model.attention)
    switchhead = model.attention == "switchhead"
    found = {
        "name": recipe.name,
        "table": recipe.table,
        "architecture": "switchall" if experts else architecture,
        "dataset": recipe.dataset,
        "positions": {"relative": "xl", "rotary": "rope"}[model.positions],
        "d_model": model.hidden_size,
        "n_layers": model.num_hidden_layers,
        "n_heads": model.num_attention_heads,
        "d_head": model.head_dim,
        "d_ff": None if experts or model.attention == "moa" else model.intermediate_size,
        "n_experts": model.num_experts,
        "k": model.num_attention_heads if model.attention == "moa" else model.num_experts_per_tok,
        "expert_projections": model.expert_projections if switchhead else None,
        "shared_selection": model.shared_selection,
        "expert_norm_init": model.expert_norm_init,
        "attention_expert_dropout": model.expert_dropout,
        "ffn": False,
        "chunk_length": training.chunk_length,
        "context_chunks": 1 + model.memory_length // training.chunk_length,
        "batch_size": training.batch_size,
        "dropout": model.dropout,
        "grad_clip": training.grad_clip,
        "warmup_steps": training.warmup_steps,
    }
    if experts:
        found["ffn"] = {
            "kind": "sigma_moe",
            "n_experts": model.ffn_num_experts,
            "expert_size": model.ffn_expert_size,
            "k": model.ffn_num_experts_per_tok,
            "expert_dropout": model.ffn_expert_dropout,
            "entropy_reg": model.ffn_entropy_loss_weight,
            "dropout": 0.0,  # inside the experts, of which there is none
        }
    return found


@pytest.mark.skipif(not EXPERIMENTS.exists(), reason="the experiments as data are not beside the repository")
def test_recipes_are_the_papers_experiments():
    data = json.loads(EXPERIMENTS.read_text())
    rows = {row["name"]: row for row in data["experiments"]}
    recipes = {name: get_recipe(name) for name in recipe_names() if get_recipe(name).table}
    assert recipes.keys() == rows.keys()
    for name, recipe in recipes.items():
        found = as_data(recipe)
        assert found == {key: rows[name].get(key, False) for key in found}
        assert recipe.training.steps == data["steps"]
        assert recipe.training.learning_rate == data["learning_rate"]
        assert recipe.model.vocab_size == (205 if recipe.dataset == "enwik8" else 8000)

import dataclasses
import json

import pytest

import switchhead.search.trials
from switchhead.accounting import count_parameters
from switchhead.errors import RunError
from switchhead.recipes import get_recipe
from switchhead.search import ablate, ablation_recipes, search, search_recipes
from switchhead.search.report import Report
from switchhead.search.trials import Trial
from switchhead.train import TrainingResult
from switchhead.train import train as real_train


def shapes(recipes):
    fields = ("num_attention_heads", "num_experts", "num_experts_per_tok", "head_dim")
    return [tuple(getattr(recipe.model, field) for field in fields) for recipe in recipes]


def test_candidates_are_the_papers_own_choices_in_its_order():
    assert shapes(search_recipes(get_recipe("wikitext103-47m-dense"))) == [
        (2, 5, 2, 76),  # table 2 on WikiText-103
        (2, 5, 3, 76),  # on C4 and peS2o
        (4, 3, 2, 56),
    ]
    assert shapes(search_recipes(get_recipe("c4-262m-dense"))) == [
        (2, 8, 2, 132),
        (2, 8, 4, 132),  # on WikiText-103
        (4, 4, 2, 112),  # on C4 and peS2o
    ]
    assert shapes(search_recipes(get_recipe("enwik8-41m-dense")))[0] == (2, 4, 2, 112)


@pytest.mark.parametrize("name", ["wikitext103-47m-dense", "c4-262m-dense", "modern-262m-gqa"])
def test_candidates_have_the_size_and_training_of_the_dense_model(name):
    dense = get_recipe(name)
    for recipe in search_recipes(dense):
        size = count_parameters(dense.model).total
        assert abs(count_parameters(recipe.model).total - size) < 0.001 * size
        assert recipe.training == dense.training


def test_only_dense_models_of_some_heads_can_be_replaced():
    with pytest.raises(ValueError, match="tiny-switchhead is not dense"):
        search_recipes(get_recipe("tiny-switchhead"))
    with pytest.raises(ValueError, match="tiny-dense-h2 has 2 heads"):
        search_recipes(get_recipe("tiny-dense-h2"))


def test_an_ablation_has_all_16_choices_with_the_head_widths_of_the_papers_table():
    recipes = ablation_recipes(get_recipe("wikitext103-47m-switchhead"))
    assert len({recipe.model.expert_projections for recipe in recipes}) == len(recipes) == 16
    size = count_parameters(get_recipe("wikitext103-47m-dense").model).total
    for recipe in recipes:
        assert abs(count_parameters(recipe.model).total - size) < 0.001 * size
        if recipe.model.expert_projections:
            letters = {frozenset(name.rpartition("-")[2]): name for name in TABLE_6}
            paper = get_recipe(letters[frozenset(recipe.model.expert_projections)])
            assert recipe.model.head_dim == paper.model.head_dim


LETTERS = ["vo", "o", "kvo", "qvo", "kqvo", "kq", "ko", "qo", "kqo", "v", "kv", "qv", "kqv", "k", "q"]
TABLE_6 = [f"wikitext103-47m-switchhead-experts-{letters}" for letters in LETTERS]


def test_a_feed_forward_of_experts_is_left_as_it_is():
    recipe = get_recipe("c4-47m-switchall")
    for variant in ablation_recipes(recipe):
        assert variant.model.ffn_expert_size == recipe.model.ffn_expert_size
        assert abs(count_parameters(variant.model).total / count_parameters(recipe.model).total - 1) < 0.02


def test_only_switchhead_can_be_ablated():
    with pytest.raises(ValueError, match="tiny-dense has attention 'mha'"):
        ablation_recipes(get_recipe("tiny-dense"))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("How much wood would a woodchuck chuck? " * 100)
    return f"text:{path}"


def short(name):
    """A recipe of two short steps."""
    return get_recipe(name).with_training(
        steps=2, warmup_steps=0, batch_size=2, chunk_length=16, eval_every=1, save_every=1
    )


def train_until(monkeypatch, calls, then):
    """`train` as it is for some calls, then something else once."""
    count = iter(range(100))

    def train(**arguments):
        return then(arguments) if next(count) == calls else real_train(**arguments)

    monkeypatch.setattr(switchhead.search.trials, "train", train)


def killed(arguments):
    raise KeyboardInterrupt


def stopped(arguments):
    """What `train` returns after a signal."""
    return TrainingResult(run=arguments["out"], step=1, finished=False, validation=None, tokens_per_second=None)


QUIET = {"device": "cpu", "progress": False}


def test_a_search_stops_at_the_first_model_as_good_as_dense_and_reports_all(tmp_path, text):
    dense, out = short("tiny-dense").with_model(num_hidden_layers=1), tmp_path / "search"
    report = search(dense, data=text, out=out, tolerance=10, **QUIET)
    assert report.finished
    assert [trial.name for trial in report.trials] == ["tiny-dense", "tiny-dense-h2-e4-k2"]
    assert report.chosen == "tiny-dense-h2-e4-k2"
    written = json.loads((out / "report.json").read_text())
    assert written["trials"] == [dataclasses.asdict(trial) for trial in report.trials]
    assert set(written["pareto_front"]) <= {trial.name for trial in report.trials}
    text = (out / "report.md").read_text()
    assert "The first within 1000 % of tiny-dense's perplexity is tiny-dense-h2-e4-k2." in text
    assert all(f"| {trial.name} |" in text for trial in report.trials)
    assert (out / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "tiny-dense" / "checkpoints" / "step-2").is_dir()


def test_a_killed_search_goes_on_where_it_stood_to_the_same_report(tmp_path, text, monkeypatch, caplog):
    dense, out = short("tiny-dense").with_model(num_hidden_layers=1), tmp_path / "search"
    train_until(monkeypatch, 1, killed)
    with pytest.raises(KeyboardInterrupt):
        search(dense, data=text, out=out, tolerance=0, **QUIET)
    partial = json.loads((out / "report.json").read_text())
    assert (partial["finished"], len(partial["trials"])) == (False, 1)
    assert "Not finished: resume it." in (out / "report.md").read_text()

    with pytest.raises(RunError, match="already holds a run: continue it with --resume"):
        search(dense, data=text, out=out, tolerance=0, **QUIET)
    caplog.clear()
    resumed = search(dense, data=text, out=out, tolerance=0, resume=True, **QUIET)
    assert not caplog.messages  # that the later models have no checkpoint yet is as it should be
    whole = search(dense, data=text, out=tmp_path / "whole", tolerance=0, **QUIET)
    assert resumed == whole
    assert resumed.finished


def test_a_report_on_something_else_is_not_replaced(tmp_path, text, monkeypatch):
    train_until(monkeypatch, 0, stopped)
    search(short("tiny-dense"), data=text, out=tmp_path, **QUIET)
    before = (tmp_path / "report.json").read_bytes()
    with pytest.raises(RunError, match="holds the report on search from tiny-dense; choose another --out"):
        ablate(short("tiny-switchhead"), data=text, out=tmp_path, resume=True, **QUIET)
    assert (tmp_path / "report.json").read_bytes() == before
    (tmp_path / "report.json").write_text("[]")
    with pytest.raises(RunError, match="is no report of a search or an ablation"):
        search(short("tiny-dense"), data=text, out=tmp_path, **QUIET)


def test_a_signal_ends_a_search_with_what_was_tried(tmp_path, text, monkeypatch):
    train_until(monkeypatch, 1, stopped)
    report = search(short("tiny-dense"), data=text, out=tmp_path, tolerance=0, **QUIET)
    assert (report.finished, report.chosen) == (False, None)
    assert [trial.name for trial in report.trials] == ["tiny-dense"]


def test_an_ablation_is_resumed_and_ranks_its_models(tmp_path, text, monkeypatch):
    monkeypatch.setattr(switchhead.search.ablation, "COMBINATIONS", ("", "v", "vo"))
    recipe, out = short("tiny-switchhead"), tmp_path / "ablation"
    train_until(monkeypatch, 1, killed)
    with pytest.raises(KeyboardInterrupt):
        ablate(recipe, data=text, out=out, **QUIET)
    report = ablate(recipe, data=text, out=out, resume=True, **QUIET)
    assert [trial.expert_projections for trial in report.trials] == ["", "v", "vo"]
    assert [(trial.experts, trial.k) for trial in report.trials] == [(None, None), (4, 2), (4, 2)]
    assert report.chosen == min(report.trials, key=lambda trial: trial.perplexity).name
    rows = [line.split()[1] for line in (out / "report.md").read_text().splitlines() if line.startswith("| tiny")]
    assert rows[0] == report.chosen


def trial(name, perplexity, macs):
    numbers = dict.fromkeys((field.name for field in dataclasses.fields(Trial)), 0)
    return Trial(**numbers | {"name": name, "perplexity": perplexity, "macs": macs})


def test_the_pareto_front_has_what_nothing_else_beats():
    trials = (trial("good", 2.0, 50), trial("cheap", 3.0, 10), trial("worse", 3.0, 20), trial("twin", 2.0, 50))
    report = Report(kind="search", recipe="r", data="d", valid=None, steps=1, tokens_per_step=1, seed=0, trials=trials)
    assert report.pareto_front == ("good", "cheap", "twin")


def test_a_negative_tolerance_is_refused(tmp_path):
    with pytest.raises(ValueError, match="tolerance is -1; it must be 0 or more"):
        search(get_recipe("tiny-dense"), data="text:unread", out=tmp_path, tolerance=-1)

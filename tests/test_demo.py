import dataclasses
import json

import pytest

from switchhead import demo as module
from switchhead.demo import PROMPT, ModelResult, demo, render
from switchhead.errors import RunError
from switchhead.eval import evaluate
from switchhead.train import load_run

MODELS = ["tiny-switchhead", "tiny-dense", "tiny-dense-h2"]


@pytest.fixture
def short_text(monkeypatch):
    topics = module._python_topics()
    monkeypatch.setattr(module, "_python_topics", lambda: topics[:2])


@pytest.mark.slow
def test_the_demo_compares_three_models_and_leaves_their_runs(short_text, tmp_path):
    out = tmp_path / "demo"
    report = demo(out=out, steps=2, seeds=2, device="cpu", progress=False)
    assert [model.recipe for model in report.models] == MODELS
    for model in report.models:
        assert len(model.perplexities) == len(model.runs) == 2
        assert model.sample.startswith(PROMPT)
        run = load_run(model.runs[1], device="cpu")
        assert run.step == 2
        assert sum(p.numel() for p in run.model.parameters()) == model.parameters
    shown = render(report)
    for model in report.models:
        assert f"{model.parameters:,}" in shown
        assert model.sample in shown
    assert "Over 2 seeds the largest spread is" in shown
    assert json.loads(json.dumps(dataclasses.asdict(report)))["seeds"] == 2
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    module._start_over(out)  # as the next demo does
    assert [path.name for path in out.iterdir()] == [module.MARKER]


@pytest.mark.slow
def test_the_models_read_the_same_text_in_the_same_order(short_text, tmp_path):
    report = demo(out=tmp_path, steps=1, device="cpu", progress=False)
    runs = [json.loads((tmp_path / model.recipe / "config.json").read_text()) for model in report.models]
    assert runs[0]["data"] == runs[1]["data"] == runs[2]["data"]
    assert runs[0]["training"] == runs[1]["training"] == runs[2]["training"]
    run = load_run(report.models[0].runs[0], device="cpu")
    assert evaluate(run.model, run.vocabulary, f"jsonl:{tmp_path}/text.jsonl#text").bytes == report.text.bytes


def test_the_text_is_english_that_python_brings_along():
    text = "".join(module._python_topics())
    assert len(text) > 300_000
    assert text.count(" the ") > 3_000


def result(recipe, *perplexities):
    return ModelResult(
        recipe=recipe,
        description="",
        parameters=1,
        perplexities=perplexities,
        attention_macs=1,
        attention_floats=1,
        cache_numbers=1,
        tokens_per_second=1.0,
        sample="",
        runs=(),
    )


def test_one_seed_claims_no_ordering():
    assert "no ordering" in module._conclude([result("ours", 4.0), result("other", 9.0)])


def test_only_a_difference_beyond_the_spread_is_an_ordering():
    said = module._conclude([result("ours", 4.0, 4.1), result("near", 4.05, 4.15), result("far", 4.5, 4.6)])
    assert "largest spread is 0.100" in said
    assert "ours and near differ by 0.050, which is no ordering" in said
    assert "ours is 0.500 lower than far" in said


def test_a_directory_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunError, match="holds something that is no demo"):
        demo(out=tmp_path, progress=False)
    assert (tmp_path / "thesis.tex").exists()


def test_no_seeds_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="seeds is 0"):
        demo(out=tmp_path / "demo", seeds=0)

import dataclasses
import math

import pytest
import torch

from switchhead.errors import TrainingError
from switchhead.hf import SwitchHeadForCausalLM
from switchhead.train import load_run, train
from switchhead.train.metrics import read_metrics


def changed(settings, part, **changes):
    return {**settings, part: dataclasses.replace(settings[part], **changes)}


@pytest.fixture
def spoil(monkeypatch):
    """Makes the training step of a number go wrong; holds the weights that it found."""
    forward, found = SwitchHeadForCausalLM.forward, {}

    def prepare(broken, steps):
        calls = 0

        def spoilt(self, *args, **kwargs):
            nonlocal calls
            output = forward(self, *args, **kwargs)
            calls += self.training and torch.is_grad_enabled()
            if self.training and torch.is_grad_enabled() and calls in steps:
                found["model"], found["weights"] = self, [p.detach().clone() for p in self.parameters()]
                if broken == "loss":
                    output.loss = output.loss * math.nan
                else:
                    output.loss.register_hook(lambda gradient: gradient * math.inf)
            return output

        monkeypatch.setattr(SwitchHeadForCausalLM, "forward", spoilt)
        return found

    return prepare


@pytest.mark.parametrize("broken", ["loss", "gradient norm"])
def test_a_number_that_is_not_finite_stops_before_the_weights_are_touched(settings, spoil, broken):
    found = spoil(broken, {4})
    with pytest.raises(TrainingError, match=rf"the {broken} is (nan|inf) at step 4; the weights were left as they are"):
        train(**settings)
    for before, parameter in zip(found["weights"], found["model"].parameters(), strict=True):
        assert torch.equal(before, parameter)
    assert load_run(settings["out"], device="cpu").step == 2
    spoil(broken, {2})  # step 4 once more
    with pytest.raises(
        TrainingError, match=r"the run would come here again: go on .* with --allow-changes and a lower"
    ):
        train(**settings, resume=True)


def test_the_first_module_that_is_not_finite_is_named(settings, monkeypatch):
    step, norm = torch.optim.AdamW.step, torch.nn.LayerNorm.forward
    broken = False

    def then_break(self, *args, **kwargs):
        nonlocal broken
        result = step(self, *args, **kwargs)
        broken = broken or self.state_dict()["state"][0]["step"] == 3
        return result

    def overflow(self, x):
        y = norm(self, x)
        return y * math.inf if broken and self.weight is layer_norms[0].weight else y

    layer_norms = []
    build = SwitchHeadForCausalLM.__init__

    def note(self, *args, **kwargs):
        build(self, *args, **kwargs)
        layer_norms.append(self.model.layers[0].feed_forward_norm)

    monkeypatch.setattr(SwitchHeadForCausalLM, "__init__", note)
    monkeypatch.setattr(torch.optim.AdamW, "step", then_break)
    monkeypatch.setattr(torch.nn.LayerNorm, "forward", overflow)
    with pytest.raises(TrainingError, match=r"output is not finite is model.layers.0.feed_forward_norm\."):
        train(**settings)


def test_a_gradient_that_is_not_finite_names_the_parameter_that_backward_came_to_first(settings, monkeypatch):
    build = SwitchHeadForCausalLM.__init__

    def spoil(self, *args, **kwargs):
        build(self, *args, **kwargs)
        self.model.norm.weight.register_hook(lambda gradient: gradient * math.nan)
        self.model.embed_tokens.weight.register_hook(lambda gradient: gradient * math.nan)

    monkeypatch.setattr(SwitchHeadForCausalLM, "__init__", spoil)
    with pytest.raises(TrainingError, match=r"going back, the gradient of model.norm.weight is the first that"):
        train(**settings)


def test_bad_steps_are_skipped_as_often_as_allowed(settings, spoil, tmp_path, caplog):
    settings = changed(settings, "training", skip_nonfinite=2)
    spoil("loss", {2, 4})
    assert train(**settings).finished
    lines = [line for line in read_metrics(settings["out"] / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines if line.get("skipped")] == [2, 4]
    assert [line["loss"] is None for line in lines] == [False, True, False, True, False, False]
    assert "at step 4; the weights were left as they are (2 of 2 such steps)" in caplog.text
    spoil("gradient norm", {1, 2, 3})
    with pytest.raises(TrainingError, match="the gradient norm is nan at step 3"):
        train(**{**settings, "out": tmp_path / "more"})


def test_skipped_steps_are_counted_across_a_resume(settings, spoil):
    settings = changed(settings, "training", skip_nonfinite=1, save_every=1)
    found = spoil("loss", {2, 4})
    with pytest.raises(TrainingError, match="at step 4"):
        train(**settings)
    assert found["model"].training
    spoil("loss", {1})
    with pytest.raises(TrainingError, match="at step 4"):
        train(**settings, resume=True)

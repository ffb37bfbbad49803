import itertools
import json
import signal
import sys

import pytest
import torch

from switchhead import cli
from switchhead.recipes import registry

TINY = ["--steps", "2", "--warmup-steps", "0", "--batch-size", "2", "--chunk-length", "8", "--device", "cpu"]


@pytest.fixture
def command(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("How much wood would a woodchuck chuck? " * 20)
    return ["train", "tiny-dense", "--data", f"text:{path}", "--out", str(tmp_path / "run"), *TINY]


def test_a_changed_setting_is_named_on_resume_and_taken_when_asked_for(command, capsys):
    assert cli.main(command) == 0
    longer = [*command, "--resume", "--steps", "4"]
    capsys.readouterr()
    assert cli.main(longer) == 1
    assert (
        "training.steps is 2 there and 4 here. Resume it as it was, or with --allow-changes" in capsys.readouterr().err
    )
    assert cli.main([*longer, "--allow-changes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 4


def test_a_run_ends_with_the_validation_texts_scores_and_says_on_resume_that_it_was_finished(command, capsys, tmp_path):
    assert cli.main(command) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first == f"{tmp_path}/run: step 2 of 2"
    assert last.startswith("validation text at step 2: perplexity ")
    assert cli.main([*command, "--resume"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/run: was finished already, at step 2 of 2; nothing was done\n"


@pytest.mark.parametrize(
    ("terminal", "rank", "told"), [(True, None, 1), (True, "0", 1), (True, "1", 0), (False, "0", 0)]
)
def test_who_waits_at_a_terminal_is_told_once_that_libraries_are_loaded(capsys, monkeypatch, terminal, rank, told):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setenv("RANK", rank) if rank else monkeypatch.delenv("RANK", raising=False)
    assert cli.main(["train", "no-such", "--data", "text:unread"]) == 2
    *lines, error = capsys.readouterr().err.splitlines()
    assert lines == ["no-such  loading PyTorch and the text"] * told
    assert error.startswith("switchhead: error: unknown recipe 'no-such'")


@pytest.fixture
def stopped_at_third_step(monkeypatch):
    """SIGTERM in the third step of each training."""
    update, steps = torch.optim.AdamW.step, itertools.count(1)

    def step(optimizer):
        if next(steps) % 3 == 0:
            signal.raise_signal(signal.SIGTERM)
        return update(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)


@pytest.mark.usefixtures("stopped_at_third_step")
def test_a_stopped_run_says_of_which_step_its_last_validation_is(command, capsys, tmp_path):
    command = [*command, "--steps", "6", "--eval-every", "2"]
    assert cli.main(command) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == f"{tmp_path}/run: step 3 of 6"
    assert second.startswith("validation text at step 2: perplexity ")
    assert third == "stopped early; the same command with --resume goes on from here"
    assert cli.main([*command, "--out", str(tmp_path / "again"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["step"], result["validation"]["step"]) == (3, 2)


def test_settings_of_memory_and_precision_reach_the_run(command, tmp_path):
    settings = ["--micro-batch-size", "1", "--loss-chunk-length", "5", "--dtype", "bfloat16", "--mask-documents", "on"]
    assert cli.main([*command, *settings, "--skip-nonfinite", "3", "--usage-every", "1"]) == 0
    training = json.loads((tmp_path / "run/config.json").read_text())["training"]
    assert (training["micro_batch_size"], training["loss_chunk_length"]) == (1, 5)
    assert (training["dtype"], training["mask_documents"], training["skip_nonfinite"]) == ("bfloat16", True, 3)


def test_what_cannot_be_had_is_one_error_and_leaves_nothing(command, capsys, tmp_path):
    assert cli.main([*command, "--parallel", "fsdp"]) == 1
    assert "start it with torchrun, or use ddp" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


OWN = """
from switchhead.recipes import Recipe, experiment
from switchhead.recipes.tiny import tiny_switchhead

@experiment()
def one_expert() -> Recipe:
    return tiny_switchhead().with_model(num_experts_per_tok=1)

@experiment()
def mistyped() -> Recipe:
    return tiny_switchhead().with_model(num_expert=1)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_RECIPES", dict(registry._RECIPES))
    (tmp_path / "own.py").write_text(OWN)


@pytest.mark.usefixtures("own")
def test_a_recipe_of_ones_own_is_trained_by_file_and_name(command, tmp_path):
    assert cli.main(["train", f"{tmp_path}/own.py:one-expert", *command[2:]]) == 0
    run = json.loads((tmp_path / "run/config.json").read_text())
    assert (run["recipe"], run["model"]["num_experts_per_tok"]) == ("one-expert", 1)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own.py:one_expert", "unknown recipe 'one_expert'; did you mean one-expert?"),
        ("own.py:mistyped", "unknown field 'num_expert'; did you mean 'num_experts'?"),
        ("broken.py:one-expert", "broken.py fails with ZeroDivisionError: division by zero"),
        ("absent.py:one-expert", "there is no Python file"),
        ("own.py", "own.py says not which recipe: expected"),
        ("own:one-expert", "there is no Python file"),
    ],
)
def test_a_recipe_file_that_does_not_do_is_one_error_of_usage(tmp_path, capsys, name, message):
    (tmp_path / "broken.py").write_text("1 / 0")
    assert cli.main(["recipes", f"{tmp_path}/{name}"]) == 2
    assert message in capsys.readouterr().err

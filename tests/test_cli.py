import dataclasses
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import switchhead
from switchhead import cli
from switchhead.cli.training import TrainingSettings
from switchhead.errors import SwitchHeadError
from switchhead.hf import SwitchHeadConfig
from switchhead.recipes import get_recipe
from switchhead.train import TrainingConfig

TINY = ["--steps", "3", "--warmup-steps", "0", "--batch-size", "2"]


def failure(capsys, *args):
    """Exit code and the one line on standard error of a command that must fail without a result."""
    code = cli.main(args)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("switchhead: error: ")
    assert captured.err.count("\n") == 1
    return code, captured.err


def printed_json(capsys, *args):
    assert cli.main([*args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("How much wood would a woodchuck chuck? " * 100)
    return f"text:{path}"


@pytest.fixture(scope="module")
def run(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("runs") / "run"
    assert cli.main(["train", "tiny-switchhead", "--data", text, "--out", str(path), *TINY]) == 0
    return str(path)


def test_the_version_is_printed(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"switchhead {switchhead.__version__}\n"


@pytest.mark.parametrize("command", [*([name] for name in cli.COMMANDS if name != "bench"), ["bench", "step"]])
def test_help_names_what_is_done_by_default_and_begins_options_in_lower_case(capsys, command):
    with pytest.raises(SystemExit):
        cli.main([*command, "--help"])
    printed = capsys.readouterr().out
    assert "default: None" not in " ".join(re.sub(r"[│|]", " ", printed).split())
    beginnings = re.findall(r"^\W --\S+.*?\s{2,}(\S+)", printed, flags=re.MULTILINE)
    assert beginnings
    assert [word for word in beginnings if word.istitle()] == []


def test_recipes_are_listed_for_people_and_programs(capsys):
    recipes = printed_json(capsys, "recipes")
    dense = next(recipe for recipe in recipes if recipe["name"] == "wikitext103-47m-dense")
    assert dense["parameters"] == dense["active_parameters"] == 47_260_120
    assert (dense["table"], dense["dataset"]) == ("2", "wikitext103")
    assert cli.main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(recipes)
    assert "47,260,120" in next(line for line in lines if line.startswith("wikitext103-47m-dense "))


def test_one_recipe_is_shown_with_everything_it_sets(capsys):
    shown = printed_json(capsys, "recipes", "c4-47m-switchhead")
    assert shown["name"] == "c4-47m-switchhead"
    assert shown["model"]["num_experts_per_tok"] == 3
    assert shown["training"].keys() == {field.name for field in dataclasses.fields(TrainingConfig)}
    assert cli.main(["recipes", "c4-47m-switchhead"]) == 0
    assert re.search(r"num_experts_per_tok +3\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "unread", "read"),
    [
        (
            "wikitext103-47m-moa-h4",
            {"num_experts_per_tok", "rope_theta"},
            {"gating", "cv_loss_weight"},
        ),
        ("c4-45m-dense-rope", {"gating", "num_experts", "expert_dropout"}, {"num_key_value_heads", "rope_theta"}),
        ("c4-47m-switchall", {"intermediate_size", "rms_norm_eps"}, {"ffn_expert_size", "layer_norm_eps"}),
    ],
)
def test_a_recipe_shows_no_field_that_its_kinds_do_not_read(capsys, name, unread, read):
    model = printed_json(capsys, "recipes", name)["model"]
    assert read <= model.keys()
    assert not unread & model.keys()
    assert SwitchHeadConfig(**model).to_dict() == get_recipe(name).model.to_dict()


def test_a_trained_run_can_be_scored_and_continues_text(capsys, run, text):
    report = printed_json(capsys, "eval", run, "--data", text)
    assert report["step"] == 3
    (result,) = report["results"]
    assert result["examples"] == result["settings"]["bytes"] == 3900
    assert cli.main(["eval", run, "--data", text]) == 0
    assert f"{result['scores']['perplexity']['value']:.4f}" in capsys.readouterr().out

    options = ["--prompt", "How much ", "--max-new-tokens", "5", "--seed", "1"]
    continuation = printed_json(capsys, "generate", run, *options)["continuation"]
    assert cli.main(["generate", run, *options]) == 0
    assert capsys.readouterr().out == f"How much {continuation}\n"


def test_training_says_what_it_came_to(capsys, tmp_path, text):
    command = ["train", "tiny-dense", "--data", text, "--out", str(tmp_path / "run"), *TINY]
    result = printed_json(capsys, *command)
    assert (result["run"], result["step"], result["finished"]) == (str(tmp_path / "run"), 3, True)
    assert result["validation"]["perplexity"] > 1


def test_settings_reach_the_configuration(run):
    with open(f"{run}/config.json") as file:
        config = json.load(file)
    assert config["recipe"] == "tiny-switchhead"
    assert (config["training"]["steps"], config["training"]["batch_size"]) == (3, 2)


def test_every_setting_is_a_field_of_the_configuration():
    settings = {field.name for field in dataclasses.fields(TrainingSettings)}
    assert settings <= {field.name for field in dataclasses.fields(TrainingConfig)}


def test_compile_can_be_switched_both_ways():
    base = TrainingConfig(steps=1, batch_size=1, chunk_length=1)
    on = TrainingSettings(compile="on").apply(base)
    assert on.compile
    assert TrainingSettings().apply(on).compile
    assert not TrainingSettings(compile="off").apply(on).compile


@pytest.mark.parametrize("command", [["recipes"], ["train", "--data", "text:unread"]])
def test_an_unknown_recipe_is_a_usage_error_with_similar_names(capsys, command):
    code, error = failure(capsys, *command, "tiny-switchead")
    assert code == 2
    assert "unknown recipe 'tiny-switchead'; did you mean tiny-switchhead" in error


def test_a_setting_out_of_range_is_a_usage_error_before_anything_is_written(capsys, tmp_path, text):
    out = tmp_path / "run"
    code, error = failure(capsys, "train", "tiny-dense", "--data", text, "--out", str(out), "--batch-size", "0")
    assert code == 2
    assert "batch_size is 0" in error
    assert not out.exists()


def test_a_sampling_option_out_of_range_is_a_usage_error(capsys, run):
    code, error = failure(capsys, "generate", run, "--temperature=-1")
    assert code == 2
    assert "temperature is -1.0" in error


@pytest.mark.parametrize("args", [[], ["dance"], ["train"], ["recipes", "--loud"], ["eval", "run", "--data"]])
def test_arguments_that_cannot_be_read_are_usage_errors(capsys, args):
    with pytest.raises(SystemExit) as exit_:
        cli.main(args)
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err


def test_text_that_cannot_be_read_is_a_failure_that_names_it(capsys, tmp_path):
    code, error = failure(capsys, "train", "tiny-dense", "--data", "text:no-such-file", "--out", str(tmp_path / "run"))
    assert code == 1
    assert "no-such-file" in error


def test_a_directory_that_is_no_run_is_a_failure_that_names_it(capsys, tmp_path):
    code, error = failure(capsys, "generate", str(tmp_path))
    assert code == 1
    assert f"{tmp_path} is not a run directory" in error


def commands_that_raise(monkeypatch, error):
    def break_() -> None:
        raise error

    monkeypatch.setattr(cli, "COMMANDS", {"break": break_, "other": break_})


def test_errors_nobody_expected_name_their_type(capsys, monkeypatch):
    commands_that_raise(monkeypatch, KeyError("lost\nkey"))
    code, error = failure(capsys, "break")
    assert code == 1
    assert "KeyError: 'lost\\nkey' (--debug shows where)" in error


def test_a_missing_package_names_the_command_that_installs_it(capsys, monkeypatch):
    commands_that_raise(monkeypatch, ModuleNotFoundError("No module named 'transformers'", name="transformers"))
    code, error = failure(capsys, "break")
    assert code == 1
    assert "this needs the package 'transformers': pip install 'switchhead[train]'" in error


def test_debug_shows_the_traceback(monkeypatch):
    commands_that_raise(monkeypatch, SwitchHeadError("broken"))
    with pytest.raises(SwitchHeadError, match="broken"):
        cli.main(["break", "--debug"])
    monkeypatch.setenv("SWITCHHEAD_DEBUG", "1")
    with pytest.raises(SwitchHeadError, match="broken"):
        cli.main(["break"])


def test_an_interrupt_ends_the_command_quietly(capsys, monkeypatch):
    commands_that_raise(monkeypatch, KeyboardInterrupt())
    assert cli.main(["break"]) == 130
    assert capsys.readouterr().err == "switchhead: interrupted\n"


@pytest.mark.parametrize("error", [SwitchHeadError("broken"), KeyboardInterrupt()])
def test_a_message_is_written_in_one_piece_so_that_those_of_several_processes_do_not_mix(monkeypatch, error):
    commands_that_raise(monkeypatch, error)
    pieces = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=pieces.append))
    assert cli.main(["break"]) != 0
    (piece,) = pieces
    assert piece.startswith("switchhead: ")
    assert piece.endswith("\n")


def test_a_reader_that_goes_away_causes_no_traceback():
    command = [sys.executable, "-m", "switchhead", "doctor"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""


def test_bench_names_what_it_does_not_know_and_what_it_needs(capsys):
    code, message = failure(capsys, "bench", "layer", "--layers", "9b")
    assert code == 2
    assert "9b unknown; use 262m" in message
    if not torch.cuda.is_available():
        code, message = failure(capsys, "bench", "layer")
        assert code == 1
        assert "CUDA device" in message

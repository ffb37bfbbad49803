import json
import os
import subprocess
import sys

import pytest

from switchhead import cli
from switchhead.search import Report


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("How much wood would a woodchuck chuck? " * 100)
    return f"text:{path}"


SHORT = ["--steps", "1", "--warmup-steps", "0", "--batch-size", "2", "--device", "cpu"]


def test_a_search_is_printed_and_goes_on_with_the_same_command_and_resume(capsys, tmp_path, text):
    command = ["search", "tiny-dense", "--data", text, "--out", str(tmp_path / "out"), *SHORT]
    assert cli.main([*command, "--tolerance", "10"]) == 0
    printed = capsys.readouterr().out
    assert "chosen: tiny-dense-h2-e4-k2" in printed
    assert "report.md" in printed
    assert cli.main([*command, "--tolerance", "10"]) == 1
    assert "--resume" in capsys.readouterr().err
    assert cli.main([*command, "--tolerance", "10", "--resume", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["chosen"] == "tiny-dense-h2-e4-k2"
    assert report["steps"] == 1
    assert len(report["trials"]) == 2


def test_a_search_stopped_in_its_first_training_shows_no_table_without_rows(monkeypatch, capsys, tmp_path, text):
    stopped = Report(kind="search", recipe="tiny-dense", data=text, valid=None, steps=1, tokens_per_step=256, seed=0)
    monkeypatch.setattr("switchhead.search.search", lambda *arguments, **options: stopped)
    assert cli.main(["search", "tiny-dense", "--data", text, "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == "stopped early; the same command with --resume goes on from here\n"


@pytest.mark.slow
def test_several_processes_train_one_model_after_the_other_and_speak_once(tmp_path, text):
    out = tmp_path / "out"
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = ["switchhead", "search", "tiny-dense", "--data", text, "--out", str(out), "--tolerance", "10"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    finished = subprocess.run(
        [sys.executable, *ranks, *command, *SHORT, "--json"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
        check=True,
    )
    report = json.loads(finished.stdout)  # of one process: two would be no JSON
    assert [trial["name"] for trial in report["trials"]] == ["tiny-dense", "tiny-dense-h2-e4-k2"]
    assert json.loads((out / "report.json").read_text()) == report


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["search", "tiny-switchhead"], "tiny-switchhead is not dense"),
        (["search", "tiny-dense", "--tolerance=-1"], "--tolerance -1.0 must be 0 or more"),
        (["search", "tiny-dense", "--tolerance=nan"], "--tolerance nan must be 0 or more"),
        (["ablate", "tiny-dense"], "tiny-dense has attention 'mha'"),
        (["ablate", "tiny-switchhead", "--grain", "0"], "grain must be at least 1; got 0"),
        (["ablate", "tiny-switchhead", "--batch-size", "0"], "batch_size is 0"),
    ],
)
def test_arguments_that_cannot_be_are_usage_errors(capsys, tmp_path, arguments, message):
    assert cli.main([*arguments, "--data", "text:unread", "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

import json
from pathlib import Path

import pytest

from switchhead import cli

DATA = Path(__file__).parent.parent / "eval" / "data"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a run of three steps."""
    directory = tmp_path_factory.mktemp("evaluation")
    (directory / "text.txt").write_text("How much wood would a woodchuck chuck? " * 100)
    command = ["train", "tiny-switchhead", "--data", f"text:{directory}/text.txt", "--out", str(directory / "run")]
    assert cli.main([*command, "--steps", "3", "--warmup-steps", "0", "--batch-size", "2", "--device", "cpu"]) == 0
    return directory / "run"


def test_all_tasks_are_printed_with_errors_and_kept_in_the_run(capsys, run):
    tasks = ["--tasks", "perplexity,lambada,blimp,cbt", "--data", f"jsonl:{DATA}/lambada_test.jsonl#text"]
    command = ["eval", str(run), *tasks, "--task-data", str(DATA), "--limit", "2", "--device", "cpu"]
    assert cli.main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    names = [result["task"] for result in report["results"]]
    assert names == ["perplexity", "lambada_openai", "lambada_standard", "blimp", "cbt"]
    for result in report["results"]:
        assert len(result["data_sha256"]) == 64
        assert result["version"] >= 1
        assert all(score["standard_error"] is not None for score in result["scores"].values())
    file = Path(report.pop("file"))
    assert file.parent == run / "eval"
    assert json.loads(file.read_text()) == report

    assert cli.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    value = report["results"][3]["scores"]["accuracy"]["value"]
    assert any(line.startswith("blimp") and f"{value:.4f}" in line for line in lines)
    assert any("examples were cut on the left" in line for line in lines)
    assert lines[-1].startswith("written to ")
    assert lines[-1] != f"written to {file}"


def test_results_go_where_they_are_asked_to_go_once(capsys, run, tmp_path):
    out = tmp_path / "blimp.json"
    command = ["eval", str(run), "--tasks", "blimp", "--task-data", str(DATA), "--out", str(out), "--device", "cpu"]
    assert cli.main(command) == 0
    kept = out.read_text()
    capsys.readouterr()
    assert cli.main(command) == 1
    output = capsys.readouterr()
    assert "results are not overwritten" in output.err
    assert not output.out  # found out before anything was computed
    assert out.read_text() == kept


def test_results_of_the_tasks_before_a_faulty_line_are_kept(capsys, run, tmp_path):
    (tmp_path / "blimp.jsonl").write_text("no JSON")
    out = tmp_path / "out.json"
    command = ["eval", str(run), "--tasks", "perplexity,blimp", "--data", f"text:{DATA}/cbt_ne.jsonl"]
    assert cli.main([*command, "--task-data", str(tmp_path), "--out", str(out), "--device", "cpu"]) == 1
    assert [result["task"] for result in json.loads(out.read_text())["results"]] == ["perplexity"]
    output = capsys.readouterr()
    assert "perplexity" in output.out
    assert "blimp.jsonl:1 is not JSON" in output.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "blip"], "task 'blip' is unknown"),
        (["--tasks", " cbt, blip"], "task 'blip' is unknown"),
        (["--tasks", ","], "--tasks names no task"),
        ([], "perplexity needs a text"),
        (["--tasks", "blimp", "--limit", "0"], "limit is 0"),
        (["--data", "text:x", "--stride", "0"], "stride is 0"),
    ],
)
def test_arguments_that_cannot_be_meant_are_usage_errors(capsys, run, arguments, message):
    assert cli.main(["eval", str(run), "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err

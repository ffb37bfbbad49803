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
    assert not any("another seed" in line for line in lines)  # that is said of differences
    assert lines[-1].startswith("written to ")
    assert lines[-1] != f"written to {file}"


def test_each_row_says_of_how_many_examples_it_is(capsys, run):
    command = ["eval", str(run), "--tasks", "blimp,cbt", "--task-data", str(DATA), "--limit", "2", "--device", "cpu"]
    assert cli.main(command) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("blimp ", "cbt "))]
    examples = {line.split("  ")[1].strip(): int(line.split()[-1]) for line in lines if line.startswith("blimp")}
    assert examples["accuracy"] == 12  # six paradigms
    assert (examples["accuracy, field morphology"], examples["accuracy, field semantics"]) == (6, 2)
    assert examples["accuracy, term island effects"] == examples["accuracy, paradigm island wh"] == 2
    assert [int(line.split()[-1]) for line in lines if line.startswith("cbt")] == [4, 2, 2]


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


@pytest.fixture(scope="module")
def other(run):
    """The directory of a dense run on the same text."""
    directory = run.parent / "other"
    command = ["train", "tiny-dense", "--data", f"text:{run.parent}/text.txt", "--out", str(directory)]
    assert cli.main([*command, "--steps", "3", "--warmup-steps", "0", "--batch-size", "2", "--device", "cpu"]) == 0
    return directory


def test_several_models_are_compared_with_the_first(capsys, run, other, tmp_path):
    tasks = ["--tasks", "perplexity,blimp", "--data", f"text:{run.parent}/text.txt", "--task-data", str(DATA)]
    command = ["eval", str(run), str(other), *tasks, "--device", "cpu"]
    capsys.readouterr()
    assert cli.main([*command, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["models"]
    assert "differences" not in first
    assert second["compared_with"] == {"model": str(run), "model_sha256": first["model_sha256"], "step": 3}
    for before, after, difference in zip(first["results"], second["results"], second["differences"], strict=True):
        assert before["task"] == after["task"] == difference["task"]
        assert set(difference["scores"]) == set(after["scores"])
        for name, score in difference["scores"].items():
            assert score["value"] == after["scores"][name]["value"] - before["scores"][name]["value"]
            assert score["standard_error"] >= 0
    for report, directory in ((first, run), (second, other)):
        file = Path(report.pop("file"))
        assert file.parent == directory / "eval"
        assert json.loads(file.read_text()) == report

    out = tmp_path / "both.json"
    assert cli.main([*command, "--out", str(out)]) == 0
    assert json.loads(out.read_text()) == {"models": [first, second]}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(str(run))
    assert lines[1].startswith(str(other))
    loss = second["differences"][0]["scores"]["loss"]
    (row,) = (line for line in lines if line.split()[:3] == ["perplexity", "loss", str(other)])
    assert row.split()[5:7] == [f"{loss['value']:.4f}", f"{loss['standard_error']:.4f}"]
    assert sum("not of training: another seed may move a score" in line for line in lines) == 1
    assert lines[-1] == f"written to {out}"


def test_a_model_that_is_missing_is_known_before_any_is_scored(capsys, run, tmp_path):
    missing = str(tmp_path / "missing")
    assert cli.main(["eval", str(run), missing, "--data", f"text:{run.parent}/text.txt", "--device", "cpu"]) == 1
    output = capsys.readouterr()
    assert f"{missing} does not exist" in output.err
    assert not output.out


def test_an_interrupt_keeps_what_the_models_before_have_scored(capsys, run, other, monkeypatch):
    from switchhead.eval import tasks

    real, calls = tasks.TASKS["perplexity"], []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setitem(tasks.TASKS, "perplexity", interrupted)
    command = ["eval", str(run), str(other), "--data", f"text:{run.parent}/text.txt", "--device", "cpu", "--json"]
    assert cli.main(command) == 130
    (report,) = json.loads(capsys.readouterr().out)["models"]
    assert report["model"] == str(run)
    assert Path(report["file"]).exists()


def test_no_model_is_a_usage_error(capsys):
    assert cli.main(["eval", "--tasks", "blimp"]) == 2
    assert "no MODEL is named" in capsys.readouterr().err


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

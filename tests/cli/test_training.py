import json

import pytest

from switchhead import cli

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

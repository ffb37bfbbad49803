import dataclasses
import shutil

import pytest

from switchhead.errors import CheckpointError, RunError
from switchhead.train import load_run, train


def changed(settings, part, **changes):
    return {**settings, part: dataclasses.replace(settings[part], **changes)}


class TestLoading:
    def test_a_directory_without_a_run_is_named(self, tmp_path):
        with pytest.raises(RunError, match=r"is not a run directory: it has no config.json"):
            load_run(tmp_path)

    def test_a_foreign_configuration_is_named(self, tmp_path):
        for content in ("{", "[]", '{"model_type": "gpt2"}'):
            (tmp_path / "config.json").write_text(content)
            with pytest.raises(RunError, match=r"config.json is not the configuration of a run"):
                load_run(tmp_path)

    def test_a_run_without_checkpoint_is_named(self, settings):
        train(**settings)
        shutil.rmtree(settings["out"] / "checkpoints")
        with pytest.raises(RunError, match="has no checkpoint yet"):
            load_run(settings["out"])

    def test_a_foreign_checkpoint_is_passed_over(self, settings, tmp_path, caplog):
        train(**settings)
        train(**changed({**settings, "out": tmp_path / "other"}, "training", steps=4))
        shutil.copytree(tmp_path / "other/checkpoints/step-4", settings["out"] / "checkpoints/step-99")
        assert load_run(settings["out"], device="cpu").step == 6
        assert "step-99 belongs to another run" in caplog.text
        assert "using the previous one, step-6" in caplog.text
        with pytest.raises(CheckpointError, match="step-99 belongs to another run"):
            load_run(settings["out"] / "checkpoints/step-99")

    def test_a_run_with_broken_checkpoints_only_does_not_start_anew(self, settings):
        train(**settings)
        for state in settings["out"].glob("checkpoints/*/state.json"):
            state.write_text(state.read_text()[:50])
        with pytest.raises(CheckpointError, match=r"no usable checkpoint: .*step-6 is broken.*step-4 is broken"):
            train(**settings, resume=True)

    def test_another_runs_vocabulary_is_refused(self, settings):
        train(**settings)
        (settings["out"] / "tokenizer/vocabulary.json").write_text('{"kind": "bytes", "size": 300}')
        with pytest.raises(RunError, match="has 300 tokens, the model 257"):
            load_run(settings["out"])
        with pytest.raises(RunError, match="has 300 tokens, the model 257"):
            train(**settings, resume=True)

"""Runs that are killed, stopped, or short of disk, and what is left of them."""

import contextlib
import dataclasses
import errno
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from switchhead.data import ByteVocabulary, TokenizerVocabulary
from switchhead.data.vocabulary import write_vocabulary
from switchhead.errors import RunError
from switchhead.hf import SwitchHeadConfig
from switchhead.runs import load_run
from switchhead.train import TrainingConfig, train
from switchhead.train.loop import _StopSignal
from switchhead.train.run import create_run
from tests.train.zygote import run

SAVE = "switchhead.train.checkpoint:save_file"


@pytest.fixture(scope="module", params=["rotary", "relative"])
def uninterrupted(request, zygote, tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert zygote.train(out, kind=request.param) == {"status": 0, "step": 8, "finished": True}
    return request.param, losses(out)


def losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    of_the_machine = ("tokens_per_second", "peak_memory_bytes")
    return [{name: value for name, value in line.items() if name not in of_the_machine} for line in lines]


def steps_saved(run):
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-?"))


def kill(call, number, when="before"):
    return {"call": call, "number": number, "when": when, "what": "SIGKILL"}


# os.replace is called for the configuration, the metrics, each checkpoint, and from the third on for the one that goes.
EVERY_MOMENT = [
    kill("os:replace", 1),
    kill("switchhead.data:ByteVocabulary.save", 1),
    kill("os:replace", 2),
    kill("torch.optim:AdamW.step", 1),
    kill("torch.optim:AdamW.step", 4, "after"),
    kill("switchhead.train.metrics:MetricsLog.append", 3, "after"),
    kill("switchhead.train.metrics:json.dumps", 4, "after"),
    *(
        kill("os:fsync", number) for number in range(1, 20)
    ),  # configuration, vocabulary, two checkpoints of three or four files
    *(kill(SAVE, number, "after") for number in range(1, 5)),
    *(kill("os:replace", number, when) for number in (4, 5, 6) for when in ("before", "after")),
    kill("shutil:rmtree", 1),
]


def test_another_process_with_another_hash_seed_gets_the_same_losses(uninterrupted, zygote, tmp_path):
    kind, expected = uninterrupted
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run({"kind": kind, "data": zygote.data, "out": tmp_path, "resume": False})
    finally:
        torch.set_num_threads(threads)
    assert losses(tmp_path) == expected


@pytest.mark.slow
def test_a_run_killed_at_any_moment_resumes_with_the_losses_of_an_uninterrupted_one(zygote, uninterrupted, tmp_path):
    kind, expected = uninterrupted
    killed = 0
    for number, fault in enumerate(EVERY_MOMENT):
        out = tmp_path / str(number)
        killed += zygote.train(out, kind=kind, fault=fault)["status"] == -signal.SIGKILL
        answer = zygote.train(out, kind=kind, resume=True)
        assert answer == {"status": 0, "step": 8, "finished": True}, fault
        assert losses(out) == expected, fault
        assert steps_saved(out)[-2:] == [6, 8], fault
    assert killed == len(EVERY_MOMENT)


@pytest.mark.slow
def test_a_run_killed_at_twenty_random_moments_arrives(zygote, uninterrupted, tmp_path):
    kind, expected = uninterrupted
    started = time.monotonic()
    assert zygote.train(tmp_path / "timed", kind=kind)["finished"]
    duration = time.monotonic() - started
    chance = random.Random(0)
    killed, run = 0, tmp_path / "run"
    for _ in range(20):
        answer = zygote.train(run, kind=kind, resume=True, kill_after=chance.uniform(0, duration))
        killed += answer["status"] == -signal.SIGKILL
        if answer.get("finished"):  # and another one
            assert losses(run) == expected
            shutil.rmtree(run)
    assert killed >= 5
    assert zygote.train(run, kind=kind, resume=True)["finished"]
    assert losses(run) == expected


@pytest.mark.parametrize("what", ["SIGTERM", "SIGTERM twice", "SIGTERM and SIGHUP"])
def test_sigterm_finishes_the_step_saves_and_leaves_with_success(zygote, uninterrupted, tmp_path, what):
    kind, expected = uninterrupted
    fault = {"call": "torch.optim:AdamW.step", "number": 5, "when": "before", "what": what}
    assert zygote.train(tmp_path, kind=kind, fault=fault) == {"status": 0, "step": 5, "finished": False}
    assert steps_saved(tmp_path) == [4, 5]
    assert zygote.train(tmp_path, kind=kind, resume=True)["finished"]
    assert losses(tmp_path) == expected


def test_ctrl_c_says_that_a_second_one_stops_at_once(capfd):
    with _StopSignal(show=True) as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.received
        assert capfd.readouterr().err == "\nfinishing this step, then saving; once more to stop at once\n"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP])
def test_only_ctrl_c_stops_at_once_when_it_follows_another_signal(capfd, first, second):
    before = signal.getsignal(second)
    with _StopSignal(show=True) as stop:
        signal.raise_signal(first)
        assert stop.received
        said = capfd.readouterr().err
        assert ("finishing this step, then saving\n" in said) == (first == signal.SIGTERM)
        assert signal.getsignal(second) != before  # else the next line ends the tests
        signal.raise_signal(second)
        assert capfd.readouterr().err == ""
    assert signal.getsignal(second) == before


def test_a_signal_that_the_process_was_started_to_ignore_stays_ignored():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with _StopSignal(show=True) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.05)
            assert not stop.received
    finally:
        signal.signal(signal.SIGHUP, previous)


@pytest.mark.parametrize("shown_on", ["terminal", "pipe"])
def test_a_run_outlives_whoever_watched_it(settings, monkeypatch, shown_on):
    reading, writing = os.openpty() if shown_on == "terminal" else os.pipe()
    monkeypatch.setattr("switchhead.train.progress.SECONDS_BETWEEN_LINES", 0.0)
    with os.fdopen(writing, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        os.close(reading)
        assert train(**{**settings, "progress": True}).finished
        with pytest.raises(OSError, match=r"Input/output error|Broken pipe"):
            os.write(writing, b"nobody is there")
        monkeypatch.undo()
        with contextlib.suppress(OSError):  # what is left in the buffer
            stream.close()


def test_a_full_disk_leaves_the_previous_checkpoint(zygote, uninterrupted, tmp_path):
    kind, expected = uninterrupted
    fault = {"call": SAVE, "number": 4, "when": "before", "what": "file size limit"}
    answer = zygote.train(tmp_path, kind=kind, fault=fault)
    assert answer["error"].startswith(f"CheckpointError: cannot save checkpoint {tmp_path}/checkpoints/step-4")
    assert answer["error"].endswith("the previous checkpoint step-2 is intact")
    assert os.listdir(tmp_path / "checkpoints") == ["step-2"]
    assert zygote.train(tmp_path, kind=kind, resume=True)["finished"]
    assert losses(tmp_path) == expected


def test_metrics_that_cannot_be_written_end_the_run_with_one_error(zygote, tmp_path):
    fault = {"call": "torch.optim:AdamW.step", "number": 3, "when": "before", "what": "file size limit"}
    assert zygote.train(tmp_path, fault=fault) == {
        "status": 0,
        "error": f"RunError: cannot write the metrics of {tmp_path}: File too large",
    }


def test_a_broken_newest_checkpoint_is_passed_over(zygote, uninterrupted, tmp_path):
    kind, expected = uninterrupted
    zygote.train(tmp_path / "run", kind=kind, fault=kill("torch.optim:AdamW.step", 7))
    newest = tmp_path / "run/checkpoints/step-6"
    content = (newest / "optimizer.safetensors").read_bytes()
    for damage in (content[:-100], content[:-1] + bytes([content[-1] ^ 1]), b"", None):
        run = tmp_path / "damaged"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(tmp_path / "run", run)
        file = run / "checkpoints/step-6/optimizer.safetensors"
        file.unlink() if damage is None else file.write_bytes(damage)
        assert zygote.train(run, kind=kind, resume=True)["finished"]
        assert losses(run) == expected


def test_a_directory_that_becomes_read_only_ends_the_run_with_one_error(zygote, uninterrupted, tmp_path):
    kind, expected = uninterrupted
    fault = {"call": SAVE, "number": 4, "when": "before", "what": "read-only"}
    answer = zygote.train(tmp_path, kind=kind, fault=fault)
    assert answer["error"].startswith(f"CheckpointError: cannot save checkpoint {tmp_path}/checkpoints/step-4")
    assert answer["error"].endswith("Read-only file system; the previous checkpoint step-2 is intact")
    assert zygote.train(tmp_path, kind=kind, resume=True)["finished"]
    assert losses(tmp_path) == expected


@pytest.fixture
def named(monkeypatch):
    """Names that files and directories were given, each of which had to be on the disk by then."""
    flushed, named = set(), []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def version(path):
        status = os.stat(path)
        return status.st_ino, status.st_mtime_ns

    def note(descriptor):
        flushed.add(version(descriptor))
        fsync(descriptor)

    def check(source, target, act):
        if not str(target).endswith(".tmp"):  # else it is about to be removed
            source = Path(source)
            named.append(Path(target).name)
            needed = source.parent.iterdir() if named[-1] == "vocabulary.json" else (source, *source.rglob("*"))
            assert {version(path) for path in needed} <= flushed, named
        act(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "rename", lambda source, target: check(source, target, rename))
    monkeypatch.setattr(os, "replace", lambda source, target: check(source, target, replace))
    return named


def test_what_gets_its_name_is_on_the_disk(settings, named):
    assert train(**settings).finished
    assert named == ["config.json", "vocabulary.json", "metrics.jsonl", "step-2", "step-4", "step-6"]


def test_a_vocabulary_gets_its_name_when_its_other_files_are_on_the_disk(tmp_path, named):
    (tmp_path / "tokenizer.json").write_text("{}")
    write_vocabulary(tmp_path, {"format": 1})
    assert named == ["vocabulary.json"]


def test_the_tokenizer_for_transformers_is_on_the_disk_before_the_vocabulary_says_that_the_run_is_whole(
    tmp_path, monkeypatch
):
    words = Tokenizer(models.WordLevel({"<s>": 0, "wood": 1}, unk_token="<s>"))
    vocabulary = TokenizerVocabulary(PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>"))
    fsync, rename, directory = os.fsync, os.rename, tmp_path.stat().st_ino
    contents, names, whole = set(), set(), {}

    def note(descriptor):
        inode = os.fstat(descriptor).st_ino
        contents.add(inode)
        if inode == directory:
            names.update(os.listdir(descriptor))
        fsync(descriptor)

    def check(source, target):
        whole[Path(target).name] = {name for name in names if (tmp_path / name).stat().st_ino in contents}
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "rename", check)
    create_run(tmp_path, {}, vocabulary)
    assert whole == {"vocabulary.json": {"config.json", "tokenizer.json", "tokenizer_config.json"}}
    assert AutoTokenizer.from_pretrained(tmp_path)("wood").input_ids == [1]


def test_a_read_only_directory_is_refused_before_training(settings, monkeypatch):
    def refuse(*args):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(RunError, match=r"cannot create run directory .*: Read-only file system"):
        train(**settings)


def test_a_tokenizer_that_cannot_be_saved_is_told_in_one_error(settings, monkeypatch):
    def refuse(*args):
        raise Exception("No space left on device (os error 28)")  # as the tokenizers library says it

    monkeypatch.setattr(ByteVocabulary, "save", refuse)
    with pytest.raises(RunError, match=r"cannot save the tokenizer of .*/run: No space left on device"):
        train(**settings)


@pytest.fixture
def first_format(tmp_path, text):
    """A run that the first version wrote: its directory after step 2 of 4, which is never to be written anew."""
    run = tmp_path / "first"
    shutil.copytree(Path(__file__).with_name("format1"), run)
    config = json.loads((run / "config.json").read_text())
    order = {"data": text, "out": run, "device": "cpu", "progress": False, "resume": True}
    names = {name: value for name, value in config["model"].items() if value is not None}
    return run, {**order, "model": SwitchHeadConfig(**names), "training": TrainingConfig(**config["training"])}


def test_a_run_of_the_first_format_loads_and_goes_on_with_its_losses(first_format):
    run, order = first_format
    assert load_run(run, device="cpu").step == 2
    expected = [line["loss"] for line in losses(run) if "loss" in line]
    assert train(**order).finished
    found = [line["loss"] for line in losses(run) if "loss" in line]
    assert found[:2] == expected[:2]
    # What versions since draw of dropout differs; where they drew alike, the losses were those of the file to 1e-4.
    assert found[2:] == pytest.approx([5.885261, 5.906758], rel=1e-4)


def test_without_dropout_a_run_of_the_first_format_goes_on_as_it_would_have_then(first_format):
    # Nothing is drawn: the losses are those of weights, optimizer, memory and place in the text, in every version.
    run, order = first_format
    model = dataclasses.replace(order["model"], dropout=0.0, expert_dropout=0.0)
    assert train(**{**order, "model": model, "allow_changes": True}).finished
    found = [line["loss"] for line in losses(run) if "loss" in line]
    assert found[2:] == pytest.approx([6.110073, 5.794814], rel=1e-5)


def test_nothing_in_a_run_directory_is_a_pickle(first_format):
    run, order = first_format
    train(**order)
    kinds = {path.suffix for path in run.rglob("*") if path.is_file() and "tfevents" not in path.name}
    assert kinds == {".json", ".jsonl", ".safetensors"}

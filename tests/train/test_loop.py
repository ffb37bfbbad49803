import dataclasses
import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from switchhead.errors import CheckpointError, DataError, RunError, TrainingError
from switchhead.eval import evaluate
from switchhead.hf import SwitchHeadForCausalLM
from switchhead.train import load_run, train
from switchhead.train.metrics import read_metrics
from switchhead.train.run import describe_run, lock_run


def changed(settings, part, **changes):
    return {**settings, part: dataclasses.replace(settings[part], **changes)}


def test_training_learns_and_leaves_a_run_directory(settings):
    settings = changed(settings, "training", steps=60, eval_every=30, save_every=30)
    result = train(**settings, recipe="small")
    run = settings["out"]
    lines = read_metrics(run / "metrics.jsonl")
    by_step = [line["loss"] for line in lines if "loss" in line]
    assert len(by_step) == result.step == 60
    assert sum(by_step[-10:]) < 0.8 * sum(by_step[:10])
    assert [line["step"] for line in lines if "validation_loss" in line] == [30, 60]
    assert result.finished
    assert result.validation.loss == lines[-1]["validation_loss"]
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoints", "config.json", "metrics.jsonl", "tensorboard", "tokenizer",
    ]  # fmt: skip
    files = sorted(path.name for path in (run / "checkpoints/step-60").iterdir())
    assert files == ["model.safetensors", "optimizer.safetensors", "state.json"]
    config = json.loads((run / "config.json").read_text())
    assert config["recipe"] == "small"
    assert config["model"]["vocab_size"] == 257
    assert config["training"]["steps"] == 60
    assert config["data"]["training"] == settings["data"]
    assert config["versions"]["torch"] == torch.__version__


def test_a_loaded_run_scores_as_the_training_did(settings, tmp_path):
    valid = tmp_path / "valid.txt"
    valid.write_text("abcab cabc" * 9)
    result = train(**settings, valid=f"text:{valid}")
    run = load_run(settings["out"], device="cpu")
    assert run.step == 6
    score = evaluate(run.model, run.vocabulary, f"text:{valid}")
    assert score.loss == pytest.approx(result.validation.loss, rel=1e-6)
    earlier = load_run(settings["out"] / "checkpoints/step-4", device="cpu")
    assert earlier.step == 4
    assert not torch.equal(earlier.model.lm_head.weight, run.model.lm_head.weight)


def test_the_seed_decides_the_losses_and_training_leaves_none_out(settings, tmp_path):
    def losses(name, **changes):
        out = tmp_path / name
        train(**changed({**settings, "out": out}, "training", **changes))
        return [line["loss"] for line in read_metrics(out / "metrics.jsonl") if "loss" in line]

    first = losses("first")
    assert losses("again") == first
    other = losses("other", seed=1)
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_tied_embeddings_are_saved_once_and_load(settings):
    train(**changed(settings, "model", tie_word_embeddings=True))
    model = load_run(settings["out"], device="cpu").model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_bfloat16_trains_near_float32(settings, tmp_path):
    exact = train(**settings).validation
    half = train(**changed({**settings, "out": tmp_path / "half"}, "training", dtype="bfloat16")).validation
    assert half.loss != exact.loss
    assert half.loss == pytest.approx(exact.loss, rel=1e-2)


def test_progress_says_where_the_run_is(settings, capsys):
    train(**{**settings, "progress": True}, recipe="small")
    shown = capsys.readouterr()
    assert re.search(
        r"small  step 6/6  loss \d\.\d+  [\d,]+ tokens/s  validation perplexity [\d.]+ \(step 6\)  0 s left",
        shown.err,
    )
    assert shown.out == ""


@pytest.mark.parametrize("compile", [False, True])
def test_what_takes_a_while_before_the_first_step_is_told(settings, capsys, compile):
    settings = changed({**settings, "progress": True}, "training", compile=compile)
    expected = ["small  building the model"]
    if compile:
        expected.append("small  compiling: the first step may take a minute or more")
    with torch.compiler.set_stance(force_backend="eager"):
        train(**settings, recipe="small")
        *told, last = capsys.readouterr().err.splitlines()
        assert told == expected
        assert last.startswith("small  step 6/6")
        train(**settings, recipe="small", resume=True)  # a finished run compiles nothing
        assert capsys.readouterr().err.splitlines() == ["small  building the model"]
        train(**{**settings, "progress": False}, recipe="small", resume=True)
        assert capsys.readouterr().err == ""


def test_progress_shows_how_far_a_validation_is(settings, capsys, monkeypatch):
    monkeypatch.setattr("switchhead.train.progress.SECONDS_BETWEEN_LINES", 0.0)
    train(**changed({**settings, "progress": True}, "training", batch_size=1))
    shown = re.findall(r"run  step 3/6  validation (\d+)%", capsys.readouterr().err)
    shares = [int(share) for share in shown]
    assert len(shares) > 2
    assert shares == sorted(set(shares))
    assert shares[-1] == 100


def test_a_limited_validation_scores_the_first_tokens(settings, tmp_path):
    valid = tmp_path / "valid.txt"
    valid.write_text("abcab cabc" * 9)
    limited = changed({**settings, "valid": f"text:{valid}"}, "training", validation_tokens=20)
    score = train(**limited).validation
    assert (score.tokens, score.bytes) == (20, 20)
    valid.write_text("abcab cabc" * 2)
    run = load_run(settings["out"], device="cpu")
    assert score.loss == pytest.approx(evaluate(run.model, run.vocabulary, f"text:{valid}").loss, rel=1e-6)


def test_the_commit_is_recorded_where_there_is_one(settings):
    config = describe_run(recipe=None, model=settings["model"], training=settings["training"], data={})
    repository = Path(describe_run.__code__.co_filename).parents[3] / ".git"
    assert config["commit"] is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", config["commit"])
    assert (config["commit"] is not None) == repository.exists()


@pytest.mark.gpu
def test_a_run_on_a_gpu_resumes(settings, tmp_path):
    settings = changed({**settings, "device": "cuda"}, "training", dtype="bfloat16")
    settings = changed(settings, "model", positions="relative", memory_length=6, dropout=0.1)
    whole = train(**settings)
    shutil.copytree(settings["out"], tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut/checkpoints/step-6")
    resumed = train(**{**settings, "out": tmp_path / "cut"}, resume=True)
    assert resumed.validation.loss == pytest.approx(whole.validation.loss, rel=1e-3)
    assert load_run(tmp_path / "cut").model.device.type == "cuda"


@pytest.mark.slow
def test_a_compiled_model_trains_alike(settings, tmp_path):
    plain = train(**settings).validation
    compiled = train(**changed({**settings, "out": tmp_path / "compiled"}, "training", compile=True)).validation
    assert compiled.loss == pytest.approx(plain.loss, rel=1e-4)
    load_run(tmp_path / "compiled", device="cpu")


def test_weight_decay_shrinks_matrices_and_nothing_else(settings, tmp_path):
    def parameters(name, decay):
        train(**changed({**settings, "out": tmp_path / name}, "training", steps=1, weight_decay=decay))
        return dict(load_run(tmp_path / name, device="cpu").model.named_parameters())

    plain, decayed = parameters("plain", 0.0), parameters("decayed", 5.0)
    for name, value in plain.items():
        assert torch.equal(value, decayed[name]) == (value.ndim < 2), name


@pytest.mark.parametrize("positions", ["rotary", "relative"])
def test_micro_batches_and_a_chunked_loss_compute_the_same_step(settings, tmp_path, positions):
    settings = changed(settings, "model", positions=positions, memory_length=6 * (positions == "relative"))
    expected = [line["loss"] for line in run_and_read(settings)]
    parts = changed({**settings, "out": tmp_path / "parts"}, "training", micro_batch_size=2, loss_chunk_length=5)
    assert [line["loss"] for line in run_and_read(parts)] == pytest.approx(expected, rel=1e-5)
    cut = tmp_path / "cut"
    shutil.copytree(tmp_path / "parts", cut)
    shutil.rmtree(cut / "checkpoints/step-6")
    assert [line["loss"] for line in run_and_read({**parts, "out": cut, "resume": True})] == pytest.approx(
        expected, rel=1e-5
    )


def run_and_read(settings):
    train(**settings)
    return [line for line in read_metrics(settings["out"] / "metrics.jsonl") if "loss" in line]


def test_auxiliary_losses_are_measured_and_not_part_of_the_loss(settings, tmp_path):
    moa = {"attention": "moa", "num_attention_heads": 2, "num_experts": 4, "num_experts_per_tok": None}
    plain = run_and_read(changed(settings, "model", **moa))
    weighted = changed({**settings, "out": tmp_path / "weighted"}, "model", **moa, switch_loss_weight=0.5)
    lines = run_and_read(weighted)
    assert lines[0]["loss"] == pytest.approx(plain[0]["loss"], rel=1e-6)
    assert lines[-1]["loss"] != plain[-1]["loss"]
    assert all({"cv_loss", "switch_loss", "router_z_loss"} == line["auxiliary"].keys() for line in lines)
    assert lines[0]["auxiliary"]["switch_loss"] >= 0.9  # 1 is even use
    assert all("auxiliary" not in line for line in plain)


def test_expert_usage_is_measured_now_and_then_and_changes_nothing(settings, tmp_path):
    settings = changed(settings, "model", dropout=0.1, expert_dropout=0.1)
    often = run_and_read(changed(settings, "training", usage_every=2))
    usage = [line for line in read_metrics(settings["out"] / "metrics.jsonl") if "experts" in line]
    assert [line["step"] for line in usage] == [2, 4, 6]
    assert all(len(line["experts"]) == 2 for line in usage)
    assert usage[0]["experts"]["model.layers.0.attention.source_router"]["average_k"] == 2
    never = run_and_read({**settings, "out": tmp_path / "never"})
    assert [line["loss"] for line in often] == [line["loss"] for line in never]


def test_masked_documents_do_not_see_each_other(settings, tmp_path):
    documents = tmp_path / "text.jsonl"
    documents.write_text("".join(json.dumps({"text": f"{i * 7 % 10}abc"}) + "\n" for i in range(80)))
    settings = {**settings, "data": f"jsonl:{documents}#text"}
    plain = run_and_read(settings)
    masked = run_and_read(changed({**settings, "out": tmp_path / "masked"}, "training", mask_documents=True))
    assert all(a["loss"] != b["loss"] for a, b in zip(plain, masked, strict=True))
    relative = changed({**settings, "out": tmp_path / "no"}, "model", positions="relative")
    with pytest.raises(ValueError, match=r"mask_documents is True; it must be False for models with memory"):
        train(**changed(relative, "training", mask_documents=True))
    assert not (tmp_path / "no").exists()


def test_float16_scales_the_loss_and_passes_over_steps_that_overflow(settings, tmp_path):
    half = changed({**settings, "out": tmp_path / "half"}, "training", dtype="float16")
    lines = run_and_read(half)
    assert [line["loss_scale"] for line in lines if "loss" in line] == [2**16] * 6
    assert load_run(half["out"], device="cpu").step == 6
    state = json.loads((half["out"] / "checkpoints/step-6/state.json").read_text())
    assert state["loss_scale"]["grows"]
    for found, exact in zip(lines, run_and_read(settings), strict=True):
        for name in {"loss", "gradient_norm"} & found.keys():
            assert found[name] == pytest.approx(exact[name], rel=1e-3), name


def test_a_directory_with_a_run_is_not_written_to_without_resume(settings):
    train(**settings)
    before = (settings["out"] / "metrics.jsonl").read_text()
    with pytest.raises(RunError, match=r"already holds a run: continue it with --resume"):
        train(**settings)
    assert (settings["out"] / "metrics.jsonl").read_text() == before


def test_a_directory_with_something_else_is_refused(settings):
    settings["out"].mkdir()
    (settings["out"] / "thesis.tex").write_text("years of work")
    for resume in (False, True):
        with pytest.raises(RunError, match=r"is not empty \(it holds 'thesis.tex'\)"):
            train(**settings, resume=resume)


@pytest.mark.parametrize(
    ("part", "change", "difference"),
    [
        ("model", {"num_experts": 4}, r"model.num_experts is 3 there and 4 here"),
        ("training", {"batch_size": 2}, r"training.batch_size is 3 there and 2 here"),
    ],
)
def test_resuming_with_another_configuration_says_what_differs(settings, part, change, difference):
    train(**settings)
    with pytest.raises(RunError, match=rf"holds a run with another configuration: {difference}\. .*--allow-changes$"):
        train(**changed(settings, part, **change), resume=True)


def test_changes_that_are_asked_for_are_recorded_and_go_on(settings, caplog):
    train(**changed(settings, "training", steps=4))
    config = json.loads((settings["out"] / "config.json").read_text())
    longer = changed(settings, "training", steps=8, learning_rate=1e-3)
    with pytest.raises(RunError, match=r"learning_rate is 0.01 there and 0.001 here; training.steps is 4 there and 8"):
        train(**longer, resume=True)
    assert json.loads((settings["out"] / "config.json").read_text()) == config
    for _ in range(2):  # the second time it is the run's own configuration
        assert train(**longer, resume=True, allow_changes=True).step == 8
    assert "training.steps is 4 there and 8 here" in caplog.text
    config = json.loads((settings["out"] / "config.json").read_text())
    assert config["training"]["steps"] == 8
    assert config["changes"] == [
        ["training.learning_rate is 0.01 there and 0.001 here", "training.steps is 4 there and 8 here"]
    ]
    assert load_run(settings["out"], device="cpu").step == 8


def test_a_run_beyond_the_steps_that_are_asked_for_is_finished(settings):
    train(**settings)
    result = train(**changed(settings, "training", steps=4), resume=True, allow_changes=True)
    assert (result.step, result.finished) == (6, True)


def test_changing_to_float16_starts_with_its_loss_scale(settings):
    train(**changed(settings, "training", steps=4))
    train(**changed(settings, "training", dtype="float16"), resume=True, allow_changes=True)
    lines = [line for line in read_metrics(settings["out"] / "metrics.jsonl") if "loss_scale" in line]
    assert [(line["step"], line["loss_scale"]) for line in lines][:1] == [(5, 2**16)]


def test_memory_that_does_not_suffice_names_what_takes_less(settings, monkeypatch):
    def forward(self, *args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity")

    monkeypatch.setattr(SwitchHeadForCausalLM, "forward", forward)
    with pytest.raises(
        TrainingError, match=r"at step 1 \(CUDA out of memory\): set a smaller micro_batch_size \(now 3\)"
    ):
        train(**settings)


def test_changes_that_the_weights_do_not_allow_are_refused(settings):
    train(**settings)
    with pytest.raises(CheckpointError, match=r"does not fit the model: .*source_router.weight has shape \[2, 3, 16\]"):
        train(**changed(settings, "model", num_experts=4), resume=True, allow_changes=True)


def test_resuming_with_another_text_is_refused_but_with_the_same_text_elsewhere_goes(settings, tmp_path):
    train(**settings)
    copy = tmp_path / "copy.txt"
    shutil.copy(settings["data"].removeprefix("text:"), copy)
    assert train(**{**settings, "data": f"text:{copy}"}, resume=True).finished
    copy.write_text(copy.read_text()[::-1])
    with pytest.raises(RunError, match=r"data\.sha256 is"):
        train(**{**settings, "data": f"text:{copy}"}, resume=True)


def test_a_directory_in_which_another_process_trains_is_refused(settings):
    train(**settings)
    before = (settings["out"] / "metrics.jsonl").read_text()
    with lock_run(settings["out"]), pytest.raises(RunError, match=r"another process trains in .*/run: wait for it"):
        train(**changed(settings, "training", steps=8), resume=True, allow_changes=True)
    assert (settings["out"] / "metrics.jsonl").read_text() == before
    assert train(**settings, resume=True).finished


def test_a_file_system_without_locks_is_told_and_trained_on(settings, monkeypatch, caplog):
    def refuse(*args):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", refuse)
    assert train(**settings).finished
    assert caplog.messages == [
        f"{settings['out']} cannot be locked (Function not implemented): see that no other process writes there"
    ]


@pytest.mark.parametrize("left", ["nothing", "an empty directory", "a run without a checkpoint"])
def test_resuming_where_there_is_no_checkpoint_begins_and_says_so(settings, caplog, left):
    out = settings["out"]
    if left == "an empty directory":
        out.mkdir()
    if left == "a run without a checkpoint":
        train(**settings)
        shutil.rmtree(out / "checkpoints")
    assert train(**settings, resume=True).finished
    assert caplog.messages == [f"there is no checkpoint in {out} to resume from: a new run begins there"]
    caplog.clear()
    assert train(**settings, resume=True).finished
    assert not caplog.messages


def test_resuming_a_finished_run_does_nothing(settings):
    train(**settings)
    before = (settings["out"] / "metrics.jsonl").read_text()
    result = train(**settings, resume=True)
    assert result.step == 6
    assert result.validation is None
    assert (settings["out"] / "metrics.jsonl").read_text() == before


def test_text_shorter_than_a_chunk_is_refused_before_anything_is_written(settings):
    with pytest.raises(DataError, match=r"^text:.*: the training text has \d+ tokens, fewer than one chunk"):
        train(**changed(settings, "training", chunk_length=600))
    assert not settings["out"].exists()


def test_a_device_that_is_not_there_is_named(settings):
    with pytest.raises(RunError, match="device 'cuda:99' cannot be used here"):
        train(**{**settings, "device": "cuda:99"})
    with pytest.raises(RunError, match="device 'toaster' cannot be used here"):
        train(**{**settings, "device": "toaster"})


def test_a_directory_that_cannot_be_made_is_named(settings, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot create run directory .*/file/run: Not a directory"):
        train(**{**settings, "out": tmp_path / "file/run"})

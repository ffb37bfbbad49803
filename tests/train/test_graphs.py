"""Steps that are recorded and replayed, beside the same steps run plainly.

On a GPU they are CUDA graphs. On a CPU a stand-in keeps the rules of one: a replay reads the tensors of the recorded
run and writes into them, and whoever keeps one of them sees it change.
"""

import dataclasses
import math
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from switchhead import cli
from switchhead.data import LaneBatches, WindowBatches
from switchhead.errors import RunError, TrainingError
from switchhead.hf import SwitchHeadConfig
from switchhead.train import TrainingConfig, train
from switchhead.train.graphs import ReplayedPasses, _explained, record_cuda_graph
from switchhead.train.metrics import read_metrics
from switchhead.train.trainer import Trainer

MODEL = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "head_dim": 8, "num_experts": 3,
         "intermediate_size": 24, "max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
TRAINING = {"steps": 8, "batch_size": 3, "chunk_length": 8, "learning_rate": 1e-3, "grad_clip": 1.0}
XL = {"positions": "relative", "memory_length": 16}
MOA = {"attention": "moa", "num_attention_heads": 2, "num_experts": 4, "num_experts_per_tok": None}
SETTINGS = {
    "plain": ({}, {}),
    "dropout": ({"dropout": 0.2, "expert_dropout": 0.1}, {}),
    "dense": ({"attention": "mha", "num_experts": None, "num_experts_per_tok": None, "dropout": 0.2}, {}),
    "memory": ({**XL, "dropout": 0.2}, {}),
    "memory of uneven micro-batches": (XL, {"micro_batch_size": 2}),
    "chunked loss": ({"dropout": 0.2}, {"micro_batch_size": 1, "loss_chunk_length": 5}),
    "auxiliary losses": ({**MOA, "switch_loss_weight": 0.5}, {"micro_batch_size": 1}),
    "bfloat16": ({**XL, "dropout": 0.2}, {"dtype": "bfloat16"}),
    "float16": ({}, {"dtype": "float16"}),
    "documents": ({}, {"mask_documents": True, "micro_batch_size": 2, "dtype": "bfloat16"}),
}


class Recorder:
    """Stands in for `record_cuda_graph`; counts what it is asked to record and to replay."""

    def __init__(self):
        self.recorded = self.replayed = 0

    def __call__(self, run):
        self.recorded += 1
        with torch.random.fork_rng():
            run()  # a warm-up
            outputs = run()

        def repeat():
            self.replayed += 1
            for old, new in zip(tree_leaves(outputs), tree_leaves(run()), strict=True):
                if isinstance(old, torch.Tensor):
                    old.copy_(new)

        return outputs, repeat


def count(monkeypatch, device):
    """A recorder for a device, that counts."""
    if device == "cpu":
        return Recorder()
    recorder, replay = Recorder(), torch.cuda.CUDAGraph.replay

    def counted(run, device):
        recorder.recorded += 1
        return record_cuda_graph(run, device)

    def counted_replay(graph):
        recorder.replayed += 1
        replay(graph)

    monkeypatch.setattr("switchhead.train.trainer.record_cuda_graph", counted)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted_replay)
    return recorder


def make_trainer(device, recorder=None, model=(), training=(), tokens=None):
    """A trainer on random text; its steps are replayed where there is a recorder."""
    model = SwitchHeadConfig(**{**MODEL, **dict(model)})
    training = TrainingConfig(**{**TRAINING, **dict(training)})
    if tokens is None:
        tokens = np.random.default_rng(0).integers(model.vocab_size, size=400, dtype=np.uint32)
    sizes = (tokens, training.batch_size, training.chunk_length)
    beginning = 0 if training.mask_documents else None
    batches = LaneBatches(*sizes) if model.memory_length else WindowBatches(*sizes, seed=0, beginning=beginning)
    replayed = dataclasses.replace(training, cuda_graphs=recorder is not None)
    if device == "cuda":
        return Trainer(model, replayed, batches, torch.device(device))
    trainer = Trainer(model, training, batches, torch.device(device))
    if recorder is not None:
        trainer.training = replayed
        trainer.passes = ReplayedPasses(trainer.passes, trainer.model.parameters(), recorder)
    return trainer


def about(values, device):
    """Equal on a CPU; to what the order of a sum may change on a GPU."""
    return values if device == "cpu" else pytest.approx(values, rel=2e-3, abs=1e-6)


def train_steps(trainer):
    """The trainer after eight steps, and what they measured; one at a time: trainers share the random numbers."""
    steps = [trainer.train_step() for _ in range(8)]
    return trainer, [[s.loss, s.gradient_norm, s.loss_scale, *s.auxiliary_losses.values()] for s in steps]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.mark.parametrize("name", SETTINGS)
def test_replayed_steps_compute_what_plain_steps_do(device, name, monkeypatch):
    recorder = count(monkeypatch, device)
    start = make_trainer(device, None, *SETTINGS[name]).model
    plain, expected = train_steps(make_trainer(device, None, *SETTINGS[name]))
    replayed, found = train_steps(make_trainer(device, recorder, *SETTINGS[name]))
    for step in range(8):
        assert found[step] == about(expected[step], device), step
    assert recorder.recorded >= 1
    assert recorder.replayed >= 4
    names, models = dict(start.named_parameters()), (start, plain.model, replayed.model)
    for parameter, initial, a, b in zip(names, *(model.parameters() for model in models), strict=True):
        # Of the way that the steps went: Adam turns rounding errors of tiny gradients into whole steps.
        assert torch.equal(a, b) if device == "cpu" else (a - b).norm() <= 0.3 * (a - initial).norm(), parameter
    for a, b in zip(tree_leaves(plain.memory), tree_leaves(replayed.memory), strict=True):
        assert a is b is None or ((a - b).norm() <= (0 if device == "cpu" else 0.02 * a.norm()))


def test_memory_that_grows_is_waited_for(device, monkeypatch):
    recorder = count(monkeypatch, device)
    trainer = make_trainer(device, recorder, XL)
    lengths, recorded = [], []
    for _ in range(6):
        trainer.train_step()
        lengths.append(trainer.memory[0][0].shape[1])
        recorded.append(recorder.recorded)
    assert lengths == [8, 16, 16, 16, 16, 16]
    assert recorded == [0, 0, 0, 1, 1, 1]  # of two inputs with a memory of 16 the second
    trainer.memory = [None]
    for _ in range(4):
        trainer.train_step()
    assert (recorder.recorded, recorder.replayed) == (1, 5)  # grown again, the first recording serves


def test_dropout_differs_from_replay_to_replay_and_repeats_from_run_to_run(device, monkeypatch):
    recorder = count(monkeypatch, device)

    def losses(recorder):
        same = {"tokens": np.ones(400, dtype=np.uint32), "training": {"learning_rate": 1e-30}}
        trainer = make_trainer(device, recorder, {"dropout": 0.3}, **same)
        return [trainer.train_step().loss for _ in range(6)]

    found = losses(recorder)
    assert all(abs(a - b) > 1e-6 * a for i, a in enumerate(found) for b in found[:i])
    assert losses(recorder) == about(found, device)
    assert losses(None) == about(found, device)
    assert recorder.recorded == 2


def test_measurements_between_replays_change_nothing(device, monkeypatch):
    recorder = count(monkeypatch, device)
    quiet = make_trainer(device, recorder, {"dropout": 0.2})
    expected = [quiet.train_step().loss for _ in range(6)]
    watched = make_trainer(device, recorder, {"dropout": 0.2})
    found = []
    for _ in range(6):
        found.append(watched.train_step().loss)
        assert len(watched.measure_usage()) == 4
        assert watched.tensors()["model"]
        assert watched.state()["random"]
    assert found == about(expected, device)


def test_numbers_that_are_not_finite_are_found_in_replays(device, monkeypatch):
    recorder = count(monkeypatch, device)
    trainer = make_trainer(device, recorder, {**XL, "dropout": 0.2}, {"skip_nonfinite": 1})
    for _ in range(6):
        trainer.train_step()
    assert recorder.replayed == 3
    weight = trainer.model.model.layers[1].feed_forward_norm.weight
    with torch.no_grad():
        weight.fill_(math.inf)
    assert trainer.train_step().skipped
    assert trainer.memory == [None]
    with pytest.raises(TrainingError, match=r"output is not finite is model\.layers\.1\.feed_forward_norm\."):
        trainer.train_step()


def test_a_float16_gradient_that_overflows_lowers_the_scale_of_replays(device, monkeypatch):
    recorder = count(monkeypatch, device)
    trainer = make_trainer(device, recorder, {}, {"dtype": "float16"})
    for _ in range(4):
        trainer.train_step()
    trainer.loss_scale.scale = 2.0**40
    weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    metrics = trainer.train_step()
    assert metrics.skipped
    assert metrics.loss_scale == 2 * trainer.loss_scale.scale == 2.0**40
    assert all(map(torch.equal, weights, trainer.model.parameters()))
    trainer.loss_scale.scale = 2.0**10
    assert not trainer.train_step().skipped
    assert recorder.recorded == 1


@pytest.mark.gpu
def test_a_replayed_run_validates_saves_and_resumes(settings, tmp_path):
    def changed(out, **changes):
        training = dataclasses.replace(settings["training"], dtype="bfloat16", steps=8, usage_every=2, **changes)
        model = dataclasses.replace(settings["model"], positions="relative", memory_length=6, dropout=0.1)
        return {**settings, "model": model, "training": training, "out": tmp_path / out, "device": "cuda"}

    def losses(out):
        return [line["loss"] for line in read_metrics(tmp_path / out / "metrics.jsonl") if "loss" in line]

    plain, whole = train(**changed("plain")), train(**changed("whole", cuda_graphs=True))
    assert losses("whole") == pytest.approx(losses("plain"), rel=5e-3)
    assert whole.validation.loss == pytest.approx(plain.validation.loss, rel=5e-3)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut/checkpoints/step-8")
    train(**changed("cut", cuda_graphs=True), resume=True)
    assert losses("cut") == pytest.approx(losses("whole"), rel=5e-3)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["dropout", "memory", "chunked loss", "bfloat16", "documents"])
def test_compiled_steps_are_replayed_too(name, monkeypatch):
    model, training = SETTINGS[name]
    recorder = count(monkeypatch, "cuda")
    runs = []
    for recorded in (None, recorder):
        runs.append(train_steps(make_trainer("cuda", recorded, model, {**training, "compile": True}))[1])
        torch.compiler.reset()
    for expected, found in zip(*runs, strict=True):
        assert found == about(expected, "cuda")
    assert recorder.replayed >= 4


WAITS = """
import torch
from switchhead.train.graphs import record_cuda_graph
record_cuda_graph(lambda: torch.ones(1, device="cuda").item(), torch.device("cuda"))
"""


@pytest.mark.gpu
def test_passes_that_wait_for_the_device_cannot_be_recorded():
    # In a process of its own, which the failed capture may leave unfit for others.
    process = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, check=False)
    assert process.returncode != 0
    assert "TrainingError: a training step cannot be recorded as a CUDA graph (" in process.stderr
    assert "set cuda_graphs to False" in process.stderr


def test_a_failed_capture_is_told_by_its_first_error():
    left = RuntimeError("operation failed due to a previous error during capture")  # on leaving it
    left.__context__ = RuntimeError("operation not permitted when stream is capturing\nCompile with TORCH_USE_CUDA_DSA")
    assert re.search(
        r"\(operation not permitted when stream is capturing\): set cuda_graphs to False$", str(_explained(left))
    )
    left.__context__ = torch.OutOfMemoryError("CUDA out of memory")  # whose advice is the training loop's
    assert _explained(left) is left.__context__


def test_outputs_are_kept_and_gradients_are_overwritten():
    weight, recorder = nn.Parameter(torch.ones(2)), Recorder()

    def passes(x, extra):
        (weight * x).sum().backward()
        return {"sum": x.sum(), "extra": extra}

    replayed, kept = ReplayedPasses(passes, [weight], recorder), []
    for number in range(5):
        weight.grad = None
        x = torch.tensor([number, 2.0])
        kept.append(replayed(x, None))
        assert torch.equal(weight.grad, x)
        weight.grad.mul_(7)  # as clipping does
    assert [output["sum"].item() for output in kept] == [2, 3, 4, 5, 6]
    assert all(output["extra"] is None for output in kept)
    assert (recorder.recorded, recorder.replayed) == (1, 4)


def test_other_inputs_run_plainly_until_they_come_twice_in_a_row():
    weight, recorder, calls = nn.Parameter(torch.ones(())), Recorder(), []

    def passes(x, factor):
        calls.append(len(x))
        (weight * x.sum() * factor).backward()
        return x.sum() * factor

    replayed = ReplayedPasses(passes, [weight], recorder)

    def call(length, factor=1.0):
        weight.grad = None
        x = torch.arange(float(length))
        assert replayed(x, factor) == weight.grad == x.sum() * factor
        return recorder.recorded, recorder.replayed

    assert [call(3), call(3), call(3)] == [(0, 0), (1, 1), (1, 2)]
    assert [call(4), call(3), call(4)] == [(1, 2), (1, 3), (1, 3)]
    assert [call(3, 2.0), call(3)] == [(1, 3), (1, 4)]  # a number belongs to what was recorded
    assert [call(4), call(4), call(4)] == [(1, 4), (2, 5), (2, 6)]
    assert call(3) == (2, 6)


def test_documents_without_tokens_keep_the_number_of_boundaries(monkeypatch):
    # Rows of 8 tokens whose number of documents varies: 0 begins one.
    tokens = np.random.default_rng(1).integers(3, size=400, dtype=np.uint32)
    recorder = Recorder()
    trainer = make_trainer("cpu", recorder, {}, {"mask_documents": True, "batch_size": 4}, tokens=tokens)
    numbers_of_boundaries, forward = [], trainer.parallelism.forward

    def watched(**arguments):
        numbers_of_boundaries.append(len(arguments["cu_seqlens"]))
        return forward(**arguments)

    trainer.parallelism.forward = watched
    for _ in range(8):
        trainer.train_step()
    assert set(numbers_of_boundaries) <= {8, 16, 32}
    assert numbers_of_boundaries == sorted(numbers_of_boundaries)
    assert recorder.replayed >= 4


def test_where_steps_cannot_be_recorded_the_setting_is_refused(settings, tmp_path, capsys):
    graphs = dataclasses.replace(settings["training"], cuda_graphs=True)
    with pytest.raises(
        RunError, match=r"^cuda_graphs is True, but training on cpu has no CUDA graphs: set it to False"
    ):
        train(**{**settings, "training": graphs})
    assert not settings["out"].exists()
    command = ["train", "tiny-switchhead", "--data", settings["data"], "--out", str(tmp_path / "run")]
    assert cli.main([*command, "--device", "cpu", "--cuda-graphs", "on", "--chunk-length", "6"]) == 1
    assert "cuda_graphs is True, but training on cpu has no CUDA graphs" in capsys.readouterr().err


def test_ranks_are_not_recorded(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    graphs = TrainingConfig(**TRAINING, cuda_graphs=True)
    with pytest.raises(RunError, match=r"cuda_graphs is True, but steps of torchrun's processes"):
        Trainer(SwitchHeadConfig(**MODEL), graphs, LaneBatches(np.zeros(99), 3, 8), torch.device("cuda"))

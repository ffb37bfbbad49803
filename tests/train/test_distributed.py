"""Several processes train what one does; test_failing_ranks.py has what becomes of them when one fails."""

import json
import os
import subprocess
import sys

import pytest
import torch

from switchhead.runs import choose_device, load_run
from switchhead.train.distributed import _COMPILER, World, shard_dimension
from tests.helpers import relative_error
from tests.train.ranks import EXACT, SHORT, SIGTERM, measured


def weights(run):
    return dict(load_run(run, device="cpu").model.named_parameters())


@pytest.fixture(scope="module", params=["idle", "relative", "dense", "switchall"])
def alone(request, zygote, tmp_path_factory):
    """A run of one process: its kind and directory."""
    out = tmp_path_factory.mktemp("alone") / "run"
    assert zygote.train(out, kind=request.param, model=EXACT, training=SHORT)["finished"]
    return request.param, out


# The batch has three rows: of two ranks one has a row less, of four one has none.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "parallel", "micro_batch_size"), [(2, "ddp", 1), (4, "ddp", None), (2, "fsdp", 1), (4, "fsdp", None)]
)
def test_ranks_compute_what_one_process_does(zygote, alone, tmp_path, ranks, parallel, micro_batch_size):
    kind, expected = alone
    training = {**SHORT, "micro_batch_size": micro_batch_size}
    answers = zygote.train_on_ranks(tmp_path, ranks=ranks, parallel=parallel, kind=kind, model=EXACT, training=training)
    assert answers == [{"status": 0, "step": 3, "finished": True}] * ranks
    for name in ("loss", "gradient_norm", "validation_loss"):
        assert measured(tmp_path, name) == pytest.approx(measured(expected, name), rel=2e-5)
    for usage, other in zip(measured(tmp_path, "experts"), measured(expected, "experts"), strict=True):
        assert {router: values["share"] for router, values in usage.items()} == {
            router: values["share"] for router, values in other.items()
        }


# Windows of 6 tokens: one for three ranks, or four, of which the first has two. Lanes: two, for two ranks or three.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "kind", "ranks", "text"),
    [
        ("fsdp", "rotary", 3, {"validation_tokens": 4}),
        ("ddp", "rotary", 3, {"validation_tokens": 20}),
        ("ddp", "relative", 2, {"validation_fraction": 0.5}),
        ("fsdp", "relative", 3, {"validation_fraction": 0.5}),
    ],
)
def test_a_validation_is_split_over_ranks_and_the_same_every_time(zygote, tmp_path, parallel, kind, ranks, text):
    order = {"kind": kind, "model": EXACT, "training": {**SHORT, "eval_every": 1, **text}}
    zygote.train(tmp_path / "alone", **order)
    for name in ("run", "again"):
        answers = zygote.train_on_ranks(tmp_path / name, ranks=ranks, parallel=parallel, **order)
        assert answers == [{"status": 0, "step": 3, "finished": True}] * ranks
    for name in ("validation_loss", "validation_bits_per_byte"):
        found = measured(tmp_path / "run", name)
        assert found == pytest.approx(measured(tmp_path / "alone", name), rel=2e-5)
        assert found == measured(tmp_path / "again", name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rotary", "relative"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_run_on_some_ranks_goes_on_with_others(zygote, tmp_path, kind, parallel):
    order = {"kind": kind, "model": EXACT, "training": {"steps": 5}}
    assert zygote.train(tmp_path / "alone", **order)["finished"]
    # The step before SIGTERM ends the first part is finished on all ranks, whoever is told to stop.
    answers = zygote.train_on_ranks(tmp_path / "run", ranks=3, parallel=parallel, fault={**SIGTERM, "rank": 1}, **order)
    assert answers == [{"status": 0, "step": 2, "finished": False}] * 3
    other = {"ddp": "fsdp", "fsdp": "ddp"}[parallel]
    answers = zygote.train_on_ranks(tmp_path / "run", ranks=2, parallel=other, resume=True, fault=SIGTERM, **order)
    assert answers == [{"status": 0, "step": 4, "finished": False}] * 2
    assert zygote.train(tmp_path / "run", resume=True, **order) == {"status": 0, "step": 5, "finished": True}
    assert measured(tmp_path / "run", "loss") == pytest.approx(measured(tmp_path / "alone", "loss"), rel=2e-5)
    expected = weights(tmp_path / "alone")
    for name, value in weights(tmp_path / "run").items():
        assert relative_error(value, expected[name]) < 1e-3, name


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_auxiliary_losses_are_those_of_all_tokens(zygote, tmp_path, parallel):
    weights = {"ffn_entropy_loss_weight": 0.5, "ffn_synchronize_entropy": True, **EXACT}
    order = {"kind": "switchall", "model": weights, "training": SHORT}
    zygote.train(tmp_path / "alone", **order)
    answers = zygote.train_on_ranks(tmp_path / "run", ranks=2, parallel=parallel, **order)
    assert answers == [{"status": 0, "step": 3, "finished": True}] * 2
    for name in ("loss", "gradient_norm"):
        assert measured(tmp_path / "run", name) == pytest.approx(measured(tmp_path / "alone", name), rel=2e-5)
    for found, expected in zip(*(measured(tmp_path / name, "auxiliary") for name in ("run", "alone")), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_compiled_ranks_compute_the_same_and_see_the_use_of_experts(zygote, tmp_path, parallel):
    # A validation of 4 x 6 tokens comes before a measurement of 4 x 6 on each rank: code compiled for the one would not
    # call the hooks of the other.
    training = {**SHORT, "batch_size": 8, "eval_every": 1, "validation_tokens": 24, "usage_every": 2}
    zygote.train(tmp_path / "plain", model=EXACT, training=training)
    order = {"parallel": parallel, "model": EXACT, "training": {**training, "compile": True}}
    answers = zygote.train_on_ranks(tmp_path / "run", ranks=2, **order)
    assert answers == [{"status": 0, "step": 3, "finished": True}] * 2
    for name in ("loss", "validation_loss"):
        assert measured(tmp_path / "run", name) == pytest.approx(measured(tmp_path / "plain", name), rel=2e-5)
    for usage, expected in zip(*(measured(tmp_path / name, "experts") for name in ("run", "plain")), strict=True):
        assert {router: values["share"] for router, values in usage.items()} == {
            router: values["share"] for router, values in expected.items()
        }


@pytest.mark.slow
def test_processes_of_torchrun_train_one_run_and_speak_once(zygote, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "switchhead"]
    settings = ["--steps", "2", "--batch-size", "2", "--chunk-length", "8", "--device", "cpu", "--json"]
    command = [*torchrun, "train", "tiny-dense", "--data", zygote.data, "--out", str(tmp_path / "run"), *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert json.loads(done.stdout)["finished"]
    assert done.stderr.count("tiny-dense  building the model\n") == 1
    assert len(measured(tmp_path / "run", "loss")) == 2


@pytest.mark.parametrize(("rows", "size"), [(3, 2), (3, 4), (64, 8), (1, 1), (5, 3)])
def test_shares_of_all_ranks_are_the_batch_in_order(rows, size):
    shares = [World(rank, size).share(rows) for rank in range(size)]
    assert [row for share in shares for row in share] == list(range(rows))
    assert len(shares[0]) - len(shares[-1]) in (0, 1)


@pytest.mark.parametrize(
    ("shape", "ranks", "dimension"),
    [((2, 5, 412, 76), 2, 0), ((2, 5, 412, 76), 4, 2), ((2, 5, 412), 8, 0), ((10, 416), 4, 1), ((412,), 8, 0)],
)
def test_parameters_are_cut_where_they_divide_or_along_the_first_dimension(shape, ranks, dimension):
    assert shard_dimension(shape, ranks) == dimension


def test_fsdp_without_torchrun_is_refused(zygote, tmp_path):
    answer = zygote.train(tmp_path, parallel="fsdp")
    assert answer["error"].startswith("RunError: fsdp shards a model over the processes of torchrun")


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert World(1, 4, local_rank=1).place(torch.device("cuda")) == torch.device("cuda", 1)
    with pytest.raises(Exception, match=r"rank 3 finds 2 GPUs for 4 or more ranks on this host"):
        World(3, 4, local_rank=3).place(torch.device("cuda"))
    assert World(3, 4, local_rank=3).place(choose_device("cpu")) == torch.device("cpu")


def test_the_compiler_knows_its_options():
    assert set(_COMPILER) <= set(torch._inductor.list_options())

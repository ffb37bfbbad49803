"""What becomes of the ranks when one of them fails, or was started otherwise: all end, and the message is told once."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from switchhead.errors import RunError
from switchhead.train import train
from switchhead.train.distributed import fact_of, with_fresh_keys
from tests.train.ranks import EXACT, SHORT, SIGTERM, measured


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_with_a_clear_error_and_fewer_ranks_go_on(zygote, tmp_path):
    order = {"kind": "relative", "model": EXACT}
    fault = {"call": "torch.optim:AdamW.step", "number": 4, "when": "before", "what": "SIGKILL", "rank": 2}
    started = time.monotonic()
    answers = zygote.train_on_ranks(tmp_path, ranks=4, parallel="fsdp", fault=fault, **order)
    assert time.monotonic() - started < 60
    assert answers.pop(2)["status"] == -signal.SIGKILL
    for answer in answers:
        assert answer["error"].startswith("TrainingError: rank ")
        assert "lost another rank" in answer["error"]
        assert answer["error"].endswith("--resume goes on from the last checkpoint, on any number of ranks")
    answers = zygote.train_on_ranks(tmp_path, ranks=2, resume=True, **order)
    assert answers == [{"status": 0, "step": 8, "finished": True}] * 2
    assert len(measured(tmp_path, "loss")) == 8


def test_ranks_meet_under_keys_that_no_group_had_before():
    store = dist.HashStore()
    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            first = pool.submit(with_fresh_keys, store, 0, 3)
            time.sleep(0.2)  # in which it finds tokens of the ranks before
            others = [pool.submit(with_fresh_keys, store, rank, 3) for rank in (1, 2)]
            prefixed = [future.result(timeout=30) for future in (first, *others)]
        for rank, own in enumerate(prefixed):
            assert not own.check([f"address-{rank}"])
        for rank, own in enumerate(prefixed):
            own.set(f"address-{rank}", "here")
        assert all(own.check(["address-0", "address-1", "address-2"]) for own in prefixed)


RECIPE_THAT_DIES_TWICE = """
import os
import signal
import torch
from switchhead.recipes import experiment, get_recipe

step, calls = torch.optim.AdamW.step, 0


def die(self, *args, **kwargs):
    global calls
    calls += 1
    if calls == 3 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] in "01":
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *args, **kwargs)


torch.optim.AdamW.step = die


@experiment()
def mortal():
    return get_recipe("tiny-dense").with_training(steps=8, batch_size=2, chunk_length=8, save_every=1, eval_every=8)
"""


@pytest.mark.slow
def test_ranks_that_torchrun_starts_anew_go_on(zygote, tmp_path):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE_THAT_DIES_TWICE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "--max-restarts", "2", "-m", "switchhead", "train", f"{recipe}:mortal", "--data", zygote.data]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "run"), "--device", "cpu", "--resume", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["finished"]
    assert len(measured(tmp_path / "run", "loss")) == 8
    assert done.stderr.count("there is no checkpoint") == 1


FIRST_FAILED = "RunError: rank 1 stops because rank 0 failed; its message says why"
SECOND_FAILED = "RunError: rank 0 stops because rank 1 failed; its message says why"


def on_rank_1(call, what, number=1):
    return {"call": call, "number": number, "when": "before", "what": what, "rank": 1}


def test_a_failure_of_the_first_rank_ends_the_others(zygote, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    first, second = zygote.train_on_ranks(tmp_path, ranks=2)
    assert "is not empty" in first["error"]
    assert second["error"] == FIRST_FAILED


@pytest.mark.parametrize("file", ["events", "lines"])
def test_metrics_that_the_first_rank_cannot_write_end_the_others(zygote, tmp_path, file):
    call = {"events": "switchhead.train.metrics:_EventFile", "lines": "torch.optim:AdamW.step"}[file]
    what = {"events": "read-only", "lines": "file size limit"}[file]
    fault = {"call": call, "number": 1, "when": "before", "what": what}
    first, second = zygote.train_on_ranks(tmp_path, ranks=2, fault=fault)
    assert first["error"].startswith(f"RunError: cannot write the metrics of {tmp_path}: ")
    assert second["error"] == FIRST_FAILED


@pytest.mark.parametrize("ranks", [[1], [0, 1]])
def test_text_that_some_rank_cannot_read_ends_all_and_is_told_once(zygote, tmp_path, ranks):
    faults = [{**on_rank_1("switchhead.train.loop:open_corpus", "no data"), "rank": rank} for rank in ranks]
    answers = [answer["error"] for answer in zygote.train_on_ranks(tmp_path / "run", ranks=2, faults=faults)]
    expected = ["DataError: no text on this rank", FIRST_FAILED]
    assert answers == (expected if 0 in ranks else [SECOND_FAILED, expected[0]])
    assert not (tmp_path / "run").exists()


def test_text_too_short_for_the_settings_is_told_once(zygote, tmp_path):
    first, second = zygote.train_on_ranks(tmp_path / "run", ranks=2, training={"chunk_length": 600})
    assert first["error"].startswith(f"DataError: {zygote.data}: the training text has ")
    assert second["error"] == FIRST_FAILED


def test_a_rank_says_what_failed_though_the_others_are_gone(zygote, tmp_path):
    faults = [on_rank_1("switchhead.train.loop:open_corpus", what) for what in ("no data", "SIGKILL")]
    faults[0]["rank"] = 0
    first, second = zygote.train_on_ranks(tmp_path / "run", ranks=2, faults=faults)
    assert first["error"] == "DataError: no text on this rank"
    assert second["status"] == -signal.SIGKILL


def test_a_rank_says_what_failed_though_leaving_the_others_fails_too(zygote, tmp_path):
    calls = {
        "switchhead.train.loop:open_corpus": "no data",
        "torch.distributed.distributed_c10d:_abort_process_group": "no memory",
    }
    faults = [on_rank_1(call, what) for call, what in calls.items()]
    answers = zygote.train_on_ranks(tmp_path / "run", ranks=2, faults=faults)
    assert [answer["error"] for answer in answers] == [SECOND_FAILED, "DataError: no text on this rank"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_service_that_one_rank_alone_is_asked_for_is_loaded_by_the_first_or_not_at_all(zygote, tmp_path, rank):
    faults = [{**on_rank_1("switchhead.train.loop:load_service", "no data"), "rank": each} for each in (0, 1)]
    order = {"ranks": 2, "training": SHORT, "faults": faults, "of_rank": {rank: {"tracker": "wandb"}}}
    answers = zygote.train_on_ranks(tmp_path / "run", **order)
    if rank == 0:
        assert [answer["error"] for answer in answers] == ["DataError: no text on this rank", FIRST_FAILED]
    else:
        assert answers == [{"status": 0, "step": 3, "finished": True}] * 2


@pytest.mark.parametrize("environment", [{}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_a_process_group_of_the_caller_is_refused_and_left_alone(settings, monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RunError, match=r"this process is in a process group already"):
            train(**settings)
        assert dist.is_initialized()
        assert not settings["out"].exists()
    finally:
        dist.destroy_process_group()


def test_a_loss_that_is_not_finite_is_told_once(zygote, tmp_path):
    first, second = zygote.train_on_ranks(tmp_path, ranks=2, training={"learning_rate": 1e30})
    assert re.match(r"TrainingError: the loss is (nan|inf) at step \d; .* --allow-changes", first["error"])
    assert second["error"] == FIRST_FAILED


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ({"training": {"batch_size": 5}}, "training.batch_size is 3 on rank 0 and 5 on rank 1"),
        ({"parallel": "fsdp"}, "parallel is 'ddp' on rank 0 and 'fsdp' on rank 1"),
    ],
)
def test_ranks_that_were_started_differently_are_told_where(zygote, tmp_path, difference, message):
    first, second = zygote.train_on_ranks(tmp_path / "run", ranks=2, of_rank={1: difference})
    assert first["error"] == SECOND_FAILED
    assert second["error"].startswith(f"RunError: the ranks do not agree: {message}. Start all with the same command")
    assert not (tmp_path / "run").exists()


def test_ranks_with_another_text_are_told_so(zygote, tmp_path):
    (tmp_path / "other.txt").write_text("another text " * 60)
    other = {"data": f"text:{tmp_path / 'other.txt'}"}
    first, second = zygote.train_on_ranks(tmp_path / "run", ranks=2, of_rank={1: other})
    assert first["error"] == SECOND_FAILED
    assert "data.sha256 is " in second["error"]


def test_the_first_rank_alone_compares_checksums_of_a_checkpoint_and_all_go_on_from_it(zygote, tmp_path):
    order = {"kind": "relative", "model": EXACT, "ranks": 2}
    assert zygote.train_on_ranks(tmp_path, fault=SIGTERM, **order) == [{"status": 0, "step": 2, "finished": False}] * 2
    fault = on_rank_1("switchhead.runs:digest_of", "SIGKILL")
    assert (
        zygote.train_on_ranks(tmp_path, resume=True, fault=fault, **order)
        == [{"status": 0, "step": 8, "finished": True}] * 2
    )


def broken_at(run, step):
    file = run / f"checkpoints/step-{step}/optimizer.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_ranks_pass_over_a_broken_checkpoint_alike_and_fail_where_there_is_no_other(zygote, tmp_path):
    order = {"kind": "rotary", "model": EXACT, "ranks": 2}
    assert zygote.train_on_ranks(tmp_path / "whole", **order)[1]["finished"]
    run = tmp_path / "run"
    fault = {**SIGTERM, "number": 5}
    assert zygote.train_on_ranks(run, fault=fault, **order) == [{"status": 0, "step": 5, "finished": False}] * 2
    broken_at(run, 5)
    answers = zygote.train_on_ranks(run, resume=True, fault={**SIGTERM, "number": 1}, **order)
    assert answers == [{"status": 0, "step": 5, "finished": False}] * 2  # one step after 4
    assert measured(run, "loss") == measured(tmp_path / "whole", "loss")[:5]
    broken_at(run, 5)
    broken_at(run, 4)
    first, second = zygote.train_on_ranks(run, resume=True, **order)
    assert first["error"].startswith("CheckpointError: no usable checkpoint: ")
    assert second["error"] == FIRST_FAILED


def test_a_rank_that_does_not_see_the_run_directory_ends_all(zygote, tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    first, second = zygote.train_on_ranks(run, ranks=2, of_rank={1: {"out": str(elsewhere)}})
    assert first["error"] == SECOND_FAILED
    assert second["error"].startswith(
        f"RunError: rank 1 does not see the run directory that rank 0 writes: {elsewhere} is not a run directory"
    )


def test_a_rank_that_does_not_see_the_checkpoint_ends_all(zygote, tmp_path):
    order = {"kind": "rotary", "model": EXACT, "ranks": 2}
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    zygote.train_on_ranks(run, fault=SIGTERM, **order)
    shutil.copytree(run, elsewhere)
    shutil.rmtree(elsewhere / "checkpoints")
    first, second = zygote.train_on_ranks(run, resume=True, of_rank={1: {"out": str(elsewhere)}}, **order)
    assert first["error"] == SECOND_FAILED
    assert second["error"].startswith(f"CheckpointError: there is no checkpoint {elsewhere}/checkpoints/step-2")


def test_ranks_that_find_other_files_under_the_checkpoint_s_name_are_told_so(zygote, tmp_path):
    order = {"kind": "rotary", "fault": SIGTERM}
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    zygote.train_on_ranks(run, ranks=2, **order)
    zygote.train(elsewhere, **order)  # other dropout
    first, second = zygote.train_on_ranks(
        run, ranks=2, kind="rotary", resume=True, of_rank={1: {"out": str(elsewhere)}}
    )
    assert first["error"] == SECOND_FAILED
    assert second["error"].startswith(
        f"CheckpointError: on rank 1 {elsewhere}/checkpoints/step-2 is another checkpoint than on rank 0: "
    )


@pytest.mark.slow
def test_ranks_wait_longer_for_disks_than_for_a_rank_that_hangs(zygote, tmp_path):
    slow = {"call": "switchhead.train.loop:write_checkpoint", "number": 1, "when": "before", "what": "eight seconds"}
    order = {"model": EXACT, "training": SHORT, "ranks": 2, "timeout": 4}
    assert zygote.train_on_ranks(tmp_path / "run", fault=slow, **order)[1]["finished"]
    hangs = on_rank_1("torch.optim:AdamW.step", "eight seconds", number=2)
    first, _ = zygote.train_on_ranks(tmp_path / "hangs", fault=hangs, **order)
    assert "lost another rank (Timed out waiting" in first["error"]


def test_a_rank_that_fails_alone_says_so_without_waiting_for_the_others(zygote, tmp_path):
    # As over NCCL, where a group is not destroyed before all ranks come to it.
    faults = [
        on_rank_1("torch.optim:AdamW.step", "no memory", number=2),
        on_rank_1("torch.distributed:destroy_process_group", "for ever"),
    ]
    first, second = zygote.train_on_ranks(tmp_path, ranks=2, faults=faults)
    assert second["error"].startswith("TrainingError: the GPU's memory does not suffice at step 2 (CUDA out of memory)")
    assert "lost another rank" in first["error"]


def test_ranks_that_find_no_others_say_where_they_looked(zygote, tmp_path):
    answers = zygote.train_on_ranks(tmp_path, ranks=1, timeout=2, ranks_awaited=2)
    assert answers[0]["error"].startswith("RunError: rank 0 of 2 does not find the other ranks by way of 127.0.0.1:")


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        (
            "[/build/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:4015",
            "Connection closed by peer [127.0.0.1]:4015",
        ),
        (
            "NCCL error in: NCCLUtils.hpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO), NCCL version 2.27.5\n"
            "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
            "Cuda failure 2 'out of memory'",
        ),
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has", "CUDA out of memory"),
    ],
)
def test_of_a_library_s_error_the_fact_is_told(text, fact):
    assert fact_of(RuntimeError(text)) == fact

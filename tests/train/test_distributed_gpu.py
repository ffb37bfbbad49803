"""The processes of torchrun on two GPUs, over NCCL."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from switchhead.train.metrics import read_metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="wants two GPUs"),
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LIMIT = 150  # seconds; a rank that waits for ever must not hold up the rest


def start(out, text, *options, ranks=2, recipe="tiny-switchhead"):
    command = TORCHRUN if ranks > 1 else [sys.executable]
    settings = ["--data", text, "--out", str(out), "--batch-size", "6", "--chunk-length", "32", "--device", "cuda"]
    return subprocess.Popen(
        [*command, "-m", "switchhead", "train", recipe, *settings, "--json", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process):
    """What it wrote to standard output and standard error; it has ended, one way or the other."""
    try:
        return process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun's ranks have sessions of their own: it alone can end them, within 30 s
        pytest.fail(f"did not end within {LIMIT} s: {process.communicate(timeout=60)}")


def train(out, text, *options, ranks=2):
    process = start(out, text, *options, ranks=ranks)
    output, errors = finish(process)
    assert process.returncode == 0, errors
    return json.loads(output)


def losses(out):
    path = out / "metrics.jsonl"
    return [line["loss"] for line in read_metrics(path) if "loss" in line] if path.exists() else []


def wait_for_steps(process, out, number):
    end = time.monotonic() + LIMIT
    while len(losses(out)) < number:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "no steps"
        time.sleep(0.1)


def pid_of_rank(process, rank):
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return next(int(pid) for pid in children if f"RANK={rank}\0" in Path(f"/proc/{pid}/environ").read_text())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [["ddp"], ["fsdp"], ["ddp", "--compile", "on"], ["fsdp", "--compile", "on"]])
def test_two_gpus_compute_what_one_does(text, tmp_path, options, dtype):
    common = ["--steps", "4", "--dtype", dtype, "--micro-batch-size", "2"]
    train(tmp_path / "one", text, *common, ranks=1)
    assert train(tmp_path / "two", text, *common, "--parallel", *options)["finished"]
    tolerance = {"float32": 1e-4, "bfloat16": 5e-3}[dtype]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=tolerance)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_killed_rank_ends_the_job_within_a_minute_and_one_gpu_goes_on(text, tmp_path, parallel):
    process = start(tmp_path / "run", text, "--parallel", parallel, "--steps", "100000", "--save-every", "2")
    wait_for_steps(process, tmp_path / "run", 3)
    os.kill(pid_of_rank(process, 1), signal.SIGKILL)
    killed = time.monotonic()
    _, errors = finish(process)
    seconds = time.monotonic() - killed
    print(f"ended after {seconds:.1f} s:\n{errors}")
    assert seconds < 60
    assert process.returncode != 0
    assert "lost another rank" in errors or "exitcode  : -9" in errors
    steps = len(losses(tmp_path / "run"))
    done = train(tmp_path / "run", text, "--steps", str(steps + 2), "--resume", "--allow-changes", ranks=1)
    assert done["finished"]
    assert len(losses(tmp_path / "run")) == steps + 2


FAILING = """
import os
import torch
from switchhead.hf import SwitchHeadForCausalLM
from switchhead.recipes import experiment, get_recipe

forward, calls = SwitchHeadForCausalLM.forward, 0


def fail(self, *args, **kwargs):
    global calls
    calls += self.training and type(kwargs["input_ids"]) is torch.Tensor  # not the fake one of an estimate
    if calls == 3 and os.environ["RANK"] == "1":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return forward(self, *args, **kwargs)


SwitchHeadForCausalLM.forward = fail


@experiment()
def failing():
    return get_recipe("tiny-switchhead")
"""


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_rank_that_fails_while_another_waits_in_a_kernel_says_so_and_ends_the_job(text, tmp_path, parallel):
    (tmp_path / "recipe.py").write_text(FAILING)
    started = time.monotonic()
    process = start(tmp_path / "run", text, "--parallel", parallel, recipe=f"{tmp_path / 'recipe.py'}:failing")
    _, errors = finish(process)
    print(f"ended after {time.monotonic() - started:.1f} s:\n{errors}")
    assert process.returncode != 0
    assert "error: the GPU's memory does not suffice at step 3 (CUDA out of memory)" in errors
    assert len(losses(tmp_path / "run")) == 2


def test_sigterm_to_torchrun_lets_ranks_finish_their_step_and_save(text, tmp_path):
    process = start(tmp_path / "run", text, "--steps", "100000", "--save-every", "100000")
    wait_for_steps(process, tmp_path / "run", 3)
    process.terminate()
    finish(process)
    steps = len(losses(tmp_path / "run"))
    assert (tmp_path / "run/checkpoints" / f"step-{steps}").is_dir()

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from switchhead.hf import SwitchHeadConfig
from switchhead.train import TrainingConfig

TEXT = "".join(chr(97 + i * i % 23) + " " * (i % 3 == 0) for i in range(400))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return f"text:{path}"


@pytest.fixture
def settings(text, tmp_path):
    """Arguments of `train` for a run of six short steps."""
    model = SwitchHeadConfig(hidden_size=16, num_hidden_layers=1, head_dim=6, num_experts=3, intermediate_size=24)
    training = TrainingConfig(
        steps=6, batch_size=3, chunk_length=6, learning_rate=1e-2, grad_clip=1.0, eval_every=3, save_every=2
    )
    return {
        "model": model,
        "training": training,
        "data": text,
        "out": tmp_path / "run",
        "device": "cpu",
        "progress": False,
    }


class Zygote:
    """Orders trainings in forked children; see `zygote.py`."""

    def __init__(self, process, data):
        self.process, self.data = process, data

    def train(self, out, *, kind="rotary", resume=False, **more):
        """What became of a training in one child."""
        (answer,) = self.train_on_ranks(out, ranks=None, kind=kind, resume=resume, **more)
        return answer

    def train_on_ranks(self, out, *, ranks, kind="rotary", resume=False, **more):
        """What became of a training in several children, by rank."""
        order = {"data": self.data, "out": str(out), "kind": kind, "resume": resume, "ranks": ranks, **more}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="session")
def zygote(tmp_path_factory):
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text(TEXT)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "17",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    process = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("zygote.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    with process:
        yield Zygote(process, f"text:{text}")
        process.stdin.close()

"""A process that trains in forked children, so that tests can kill them without paying for the imports each time.

Reads one JSON object a line: `out`, `kind` (of the model), `resume`, and perhaps `fault`: {"call": a callable's dotted
name, "number": which of its calls, "when": "before" or "after", "what": see `FAULTS`}. Answers with one: the child's
exit status (negative: the signal that killed it) and the message of the error that ended it.
"""

import functools
import importlib
import json
import os
import resource
import signal
import sys

import tensorboard.compat.proto.event_pb2
import tensorboard.summary.writer.record_writer  # noqa: F401 (so that no child has to)
import torch

from switchhead.errors import SwitchHeadError
from switchhead.hf import SwitchHeadConfig
from switchhead.train import TrainingConfig, train

MODELS = {
    "relative": {"positions": "relative", "memory_length": 12},
    "rotary": {"positions": "rotary"},
}
FAULTS = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "file size limit": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64)),
}


def run(order):
    model = SwitchHeadConfig(
        hidden_size=16,
        num_hidden_layers=2,
        head_dim=6,
        num_experts=3,
        intermediate_size=24,
        dropout=0.2,
        expert_dropout=0.1,
        **MODELS[order["kind"]],
    )
    training = TrainingConfig(
        steps=8, batch_size=3, chunk_length=6, learning_rate=1e-2, eval_every=3, save_every=2, keep_checkpoints=2
    )
    result = train(
        model=model,
        training=training,
        data=order["data"],
        out=order["out"],
        resume=order["resume"],
        device="cpu",
        progress=False,
    )
    return {"step": result.step, "finished": result.finished}


def inject(fault):
    module, *path = fault["call"].split(":")
    owner = importlib.import_module(module)
    *parents, name = path[0].split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original, calls = getattr(owner, name), 0

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        now = calls == fault["number"]
        if now and fault["when"] == "before":
            FAULTS[fault["what"]]()
        result = original(*args, **kwargs)
        if now and fault["when"] == "after":
            FAULTS[fault["what"]]()
        return result

    setattr(owner, name, wrapped)


def child(order, answer):
    torch.set_num_threads(1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit then fails as on a full disk
    if fault := order.get("fault"):
        inject(fault)
    try:
        content = run(order)
    except SwitchHeadError as error:
        content = {"error": f"{type(error).__name__}: {error}"}
    os.write(answer, json.dumps(content).encode())


def main():
    for line in sys.stdin:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                child(json.loads(line), writing)
                status = 0
            finally:
                os._exit(status)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            content = pipe.read()
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status), **json.loads(content or "{}")}), flush=True)


if __name__ == "__main__":
    main()

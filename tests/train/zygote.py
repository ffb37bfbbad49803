"""A process that trains in forked children, so that tests can kill them without paying for the imports each time.

Reads one JSON object a line: `out`, `kind` (of the model), `resume`, and perhaps

- `faults`: each {"call": a callable's dotted name, "number": which of its calls, "when": "before" or "after", "what":
  see `FAULTS`, "rank": whose}; `fault`: a single one;
- `of_rank`: orders by rank, which differ from the others';
- `tracker`: see `train`;
- `ranks_awaited`: how many they take themselves for;
- `timeout`: seconds that a rank waits for a hanging one;
- `kill_after`: seconds after which the child is killed;
- `ranks`: how many children train together, and `parallel`: how;
- `model` and `training`: settings other than the usual ones; what is compiled is traced, and then run as it is.

Answers with one for each child: its exit status (negative: the signal that killed it), and what it came to or the
message of the error that ended it.
"""

import errno
import functools
import importlib
import json
import os
import resource
import signal
import socket
import sys
import time
from datetime import timedelta

import tensorboard.compat.proto.event_pb2
import tensorboard.summary.writer.record_writer  # noqa: F401 (so that no child has to)
import torch

from switchhead.errors import DataError, SwitchHeadError
from switchhead.hf import SwitchHeadConfig
from switchhead.train import TrainingConfig, distributed, train

MODELS = {
    "relative": {"positions": "relative", "memory_length": 12},
    "rotary": {"positions": "rotary"},
    "idle": {"num_experts": 16, "num_experts_per_tok": 1},  # more experts than tokens
    "dense": {"attention": "mha", "num_experts": None, "expert_dropout": 0.0},
    "switchall": {
        "feed_forward": "sigma_moe",
        "intermediate_size": 2080,  # as it is where it has no effect
        "ffn_num_experts": 4,
        "ffn_num_experts_per_tok": 2,
        "ffn_expert_size": 6,
    },
}
FAULTS = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGTERM twice": lambda: [os.kill(os.getpid(), signal.SIGTERM) for _ in range(2)],
    "SIGTERM and SIGHUP": lambda: [os.kill(os.getpid(), number) for number in (signal.SIGTERM, signal.SIGHUP)],
    "read-only": lambda: fail(errno.EROFS),
    "no data": lambda: fail_with(DataError("no text on this rank")),
    "no memory": lambda: fail_with(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")),
    "eight seconds": lambda: time.sleep(8),
    "for ever": lambda: time.sleep(1000),
    "file size limit": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64)),
}


def fail(number):
    fail_with(OSError(number, os.strerror(number)))


def fail_with(error):
    raise error


def run(order):
    settings = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "head_dim": 6,
        "num_experts": 3,
        "intermediate_size": 24,
        "dropout": 0.2,
        "expert_dropout": 0.1,
        **MODELS[order["kind"]],
        **order.get("model", {}),
    }
    training = {
        "steps": 8,
        "batch_size": 3,
        "chunk_length": 6,
        "learning_rate": 1e-2,
        "eval_every": 3,
        "save_every": 2,
        "usage_every": 5,
        **order.get("training", {}),
    }
    if training.get("compile"):
        torch.compiler.set_stance(force_backend="eager")
    result = train(
        model=SwitchHeadConfig(**settings),
        training=TrainingConfig(**training),
        data=order["data"],
        out=order["out"],
        resume=order["resume"],
        device="cpu",
        parallel=order.get("parallel", "ddp"),
        tracker=order.get("tracker"),
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


def child(order, rank, port, answer):
    signal.alarm(100)  # one that hangs fails its test, and no other
    torch.set_num_threads(1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit then fails as on a full disk
    if ranks := order.get("ranks"):
        ranks = order.get("ranks_awaited", ranks)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for fault in order.get("faults", [order["fault"]] if "fault" in order else []):
        if fault.get("rank", 0) == rank:
            inject(fault)
    if "timeout" in order:
        distributed.TIMEOUT = timedelta(seconds=order["timeout"])
    order = {**order, **order.get("of_rank", {}).get(str(rank), {})}
    try:
        content = run(order)
    except SwitchHeadError as error:
        content = {"error": f"{type(error).__name__}: {error}"}
    os.write(answer, json.dumps(content).encode())


def fork(order, rank, port):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            child(order, rank, port, writing)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    return pid, reading


def answer_of(pid, reading):
    with os.fdopen(reading) as pipe:
        content = pipe.read()
    _, status = os.waitpid(pid, 0)
    return {"status": os.waitstatus_to_exitcode(status), **json.loads(content or "{}")}


def main():
    for line in sys.stdin:
        order = json.loads(line)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        children = [fork(order, rank, port) for rank in range(order.get("ranks") or 1)]
        if "kill_after" in order:
            time.sleep(order["kill_after"])
            os.kill(children[0][0], signal.SIGKILL)
        print(json.dumps([answer_of(*child) for child in children]), flush=True)


if __name__ == "__main__":
    main()

"""All that a GPU is asked, the most important first, each with a time limit of its own; output appears as it comes.

    python benchmarks/all.py [STEP ...] [--minutes 28] [--task-data DIR --tokenizer DIR]

For a machine that is there for minutes. STEPs by name, otherwise all; BLiMP needs its data and a tokenizer.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
# Every row is compiled for each model, so these are few.
COMPILED = ("--compile", "on", "--lengths", "2048", "--prompts", "8", "--batch-sizes", "1", "64")


class Step(NamedTuple):
    """Commands that run at once, and seconds after which they are ended."""

    name: str
    seconds: float
    commands: Sequence[Sequence[str]]


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def pytest(*arguments: str) -> list[str]:
    return python("-m", "pytest", "-v", "--tb=short", "-p", "no:benchmark", *arguments)  # it warns beside xdist


def switchhead(*arguments: str) -> list[str]:
    return python("-m", "switchhead", *arguments)


def bench_layer(*layers: str, positions: str = "rotary", passes: bool = False) -> list[str]:
    options = ["--positions", positions] if passes else ["--positions", positions, "--no-passes"]
    return switchhead("bench", "layer", "--layers", *layers, "--routings", "uniform", "trained", *options)


def bench_step(recipe: str) -> list[str]:
    return switchhead("bench", "step", recipe, "--compile", "on", "--cuda-graphs", "on")


def bench_generate(recipe: str, *options: str) -> list[str]:
    return switchhead("bench", "generate", recipe, *options)


STEPS = (
    Step("tests of operators", 200, [pytest("-n", "15", "tests/ops", "tests/nn/test_gpu.py")]),
    Step("training step 45M", 150, [bench_step("c4-45m-switchhead-rope-aligned")]),
    Step("layers and passes", 240, [bench_layer("262m", "47m", passes=True)]),
    Step("training step 262M", 200, [bench_step("c4-262m-switchhead-aligned")]),
    Step("prefill and decoding", 200, [bench_generate("c4-244m-switchhead-rope-aligned")]),
    Step("prefill and decoding, compiled", 240, [bench_generate("c4-244m-switchhead-rope-aligned", *COMPILED)]),
    Step("replayed steps", 200, [pytest("-n", "8", "-m", "gpu", "tests/train/test_graphs.py")]),
    Step("host", 60, [python("benchmarks/host.py")]),
    Step("layer 1.3b", 180, [bench_layer("1.3b")]),
    Step("layer 262m-h2", 120, [bench_layer("262m-h2")]),
    Step("memory", 120, [python("benchmarks/memory.py")]),
    Step("layers with relative positions", 150, [bench_layer("262m", "47m", positions="relative")]),
    Step("relative attention", 60, [python("benchmarks/attention/relative.py")]),
    Step("kernels' errors", 240, [python("benchmarks/kernels/check.py", str(part), "6") for part in range(6)]),
    Step(
        "other tests on a GPU", 240, [pytest("-n", "4", "-m", "gpu", "tests", "--ignore", "tests/train/test_graphs.py")]
    ),
    Step("packed documents", 60, [python("benchmarks/attention/packed.py")]),
    Step("widths of heads", 30, [python("benchmarks/attention/widths.py")]),
    Step("structured sparsity", 30, [python("benchmarks/kernels/sparsity.py")]),
)


def run(step: Step, seconds: float) -> str:
    """Run a step; say how it ended."""
    print(f"\n=== {step.name}, at most {seconds:.0f} s", flush=True)
    start = time.monotonic()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    processes = [subprocess.Popen(c, cwd=ROOT, env=environment, start_new_session=True) for c in step.commands]
    codes = []
    for process in processes:
        try:
            codes.append(process.wait(max(start + seconds - time.monotonic(), 0)))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the compiler's workers
            process.wait()
            codes.append(None)
    ended = "time was up" if None in codes else "failed" if any(codes) else "ok"
    return f"{ended}, {time.monotonic() - start:.0f} s"


def run_all(steps: Sequence[Step], seconds: float) -> dict[str, str]:
    """Run steps one after the other while time is left; how each ended."""
    end = time.monotonic() + seconds
    outcomes = {}
    for step in steps:
        left = end - time.monotonic()
        outcomes[step.name] = run(step, min(step.seconds, left)) if left > 0 else "not begun"
        print(f"=== {step.name}: {outcomes[step.name]}", flush=True)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help="; ".join(step.name for step in STEPS))
    parser.add_argument("--minutes", type=float, default=28)
    parser.add_argument("--task-data", help="directory with BLiMP")
    parser.add_argument("--tokenizer", help="directory of a Hugging Face tokenizer")
    options = parser.parse_args()
    steps = STEPS
    if options.task_data and options.tokenizer:
        blimp = ("benchmarks/blimp.py", "--task-data", options.task_data, "--tokenizer", options.tokenizer)
        steps += (Step("BLiMP", 180, [python(*blimp)]),)
    if unknown := set(options.steps) - {step.name for step in steps}:
        parser.error(f"{', '.join(sorted(unknown))} unknown; use {'; '.join(step.name for step in steps)}")
    outcomes = run_all([step for step in steps if step.name in (options.steps or [step.name])], 60 * options.minutes)
    print("\n" + "\n".join(f"{outcome:24} {name}" for name, outcome in outcomes.items()))
    return int(any(not outcome.startswith("ok") for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())

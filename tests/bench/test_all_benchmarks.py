import functools
import importlib.util
import sys
from pathlib import Path

import pytest

from switchhead.bench import LAYERS
from switchhead.cli import COMMANDS, main
from switchhead.recipes import get_recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("all_benchmarks", ROOT / "benchmarks/all.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_step_that_hangs_ends_with_its_limit_and_the_others_run(script, capfd):
    hang, failing = "import time; print('begun'); time.sleep(60)", "raise SystemExit(3)"
    steps = [
        script.Step("hangs", 2, [script.python("-c", hang)]),
        script.Step("two at once", 20, [script.python("-c", "print(1)"), script.python("-c", failing)]),
        script.Step("works", 20, [script.python("-c", "print('done')")]),
    ]
    outcomes = {name: outcome.split(",")[0] for name, outcome in script.run_all(steps, 60).items()}
    assert outcomes == {"hangs": "time was up", "two at once": "failed", "works": "ok"}
    shown = capfd.readouterr().out
    assert shown.index("begun") < shown.index("done")


def test_what_no_time_is_left_for_is_not_begun(script):
    assert script.run_all([script.Step("works", 20, [script.python("-c", "")])], 0) == {"works": "not begun"}


def test_every_step_names_what_exists(script):
    for step in script.STEPS:
        for program, *arguments in step.commands:
            assert program == sys.executable
            for path in arguments:
                assert not path.startswith(("benchmarks/", "tests")) or (ROOT / path).exists(), path
            if "--layers" in arguments:
                named = arguments[arguments.index("--layers") + 1 : arguments.index("--routings")]
                assert set(named) <= set(LAYERS)
            for what in ("step", "generate"):
                if what in arguments:
                    get_recipe(arguments[arguments.index(what) + 1])


def test_every_command_is_understood(script, monkeypatch):
    understood = []
    bench = COMMANDS["bench"]
    monkeypatch.setitem(COMMANDS, "bench", functools.wraps(bench)(lambda *args, **options: understood.append(options)))
    asked = [command[3:] for step in script.STEPS for command in step.commands if command[1:3] == ["-m", "switchhead"]]
    for arguments in asked:
        assert main(arguments) == 0, arguments
    assert len(understood) == len(asked) > 3

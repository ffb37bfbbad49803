"""Ten lengths are compiled at most twice: for the first, and once more for all."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
from tests.ops import count_compilations


@pytest.mark.slow
@pytest.mark.parametrize("case", count_compilations.CASES)
def test_ten_lengths_compile_at_most_twice(case):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-W", "ignore", count_compilations.__file__, case]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) <= 2

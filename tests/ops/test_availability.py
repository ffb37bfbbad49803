import os
import subprocess
import sys

import pytest

from switchhead.ops.availability import STATIC_LAUNCH


def test_who_launches_compiled_kernels_is_the_environments_choice():
    pytest.importorskip("triton")
    assert os.environ[STATIC_LAUNCH] == "1"  # unless it was set before
    read = "import switchhead.ops.triton.operator; from torch._inductor import config; "
    read += "print(config.static_launch_user_defined_triton_kernels)"
    environment = {**os.environ, STATIC_LAUNCH: "0"}
    shown = subprocess.run([sys.executable, "-c", read], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"

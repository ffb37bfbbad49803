"""Interpreter set-up is the same as for the expert kernels."""

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "triton_test_setup", Path(__file__).parents[1] / "triton" / "conftest.py"
)
_setup = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_setup)

device = _setup.device

"""Without a GPU the kernels run in Triton's interpreter, which has to be switched on before they are imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

interpreter = pytest.importorskip("triton.runtime.interpreter")
_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch_lang_tensor_for_numpy(tensor, scope):
    """NumPy 2.4 no longer converts one-element arrays with int(), as Triton 3.6's interpreter does for loop bounds."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_lang_tensor_for_numpy


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"

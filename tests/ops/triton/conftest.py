"""Without a GPU the kernels run in Triton's interpreter (see tests/conftest.py), which needs three corrections."""

import numpy as np
import pytest
import torch

interpreter = pytest.importorskip("triton.runtime.interpreter")
_patch_lang_tensor = interpreter._patch_lang_tensor
_create_dot = interpreter.InterpreterBuilder.create_dot
_cast = interpreter.InterpreterBuilder.cast_impl


def _patch_lang_tensor_for_numpy(tensor, scope):
    """NumPy 2.4 no longer converts one-element arrays with int(), as Triton 3.6's interpreter does for loop bounds."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _create_dot_with_bfloat16(self, a, b, d, *args):
    """The interpreter keeps bfloat16 as its bits, and multiplies the bits; widen them first."""
    a, b = (_widened(operand) for operand in (a, b))
    return _create_dot(self, a, b, d, *args)


def _cast_and_round(self, source, dtype):
    """The interpreter cuts float32 off to bfloat16; a GPU rounds to the nearest."""
    if source.dtype.scalar != interpreter.tl.float32 or dtype.scalar != interpreter.tl.bfloat16:
        return _cast(self, source, dtype)
    rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16).numpy()
    return interpreter.TensorHandle(rounded.view(np.uint16), dtype.scalar)


def _widened(operand):
    if operand.dtype.scalar != interpreter.tl.bfloat16:
        return operand
    bits = operand.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), interpreter.tl.float32)


interpreter._patch_lang_tensor = _patch_lang_tensor_for_numpy
interpreter.InterpreterBuilder.create_dot = _create_dot_with_bfloat16
interpreter.InterpreterBuilder.cast_impl = _cast_and_round


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"

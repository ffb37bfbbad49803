import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # on a GPU deterministic algorithms ask for it
if not torch.cuda.is_available():
    # Kernels run in Triton's interpreter, which has to be chosen before anything imports triton: torch.compile does.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _same_random_numbers_every_run():
    torch.manual_seed(0)


@pytest.fixture
def poisoned_allocations():
    """Uninitialised memory holds NaN, so that reading it cannot go unseen."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

import pytest

from switchhead.hf import SwitchHeadConfig
from switchhead.train import TrainingConfig


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(97 + i * i % 23) + " " * (i % 3 == 0) for i in range(400)))
    return f"text:{path}"


@pytest.fixture
def settings(text, tmp_path):
    """Arguments of `train` for a run of six short steps."""
    model = SwitchHeadConfig(hidden_size=16, num_hidden_layers=1, head_dim=6, num_experts=3, intermediate_size=24)
    training = TrainingConfig(
        steps=6, batch_size=3, chunk_length=6, learning_rate=1e-2, grad_clip=1.0, eval_every=3, save_every=2
    )
    return {
        "model": model,
        "training": training,
        "data": text,
        "out": tmp_path / "run",
        "device": "cpu",
        "progress": False,
    }

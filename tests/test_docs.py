"""What docs/use.md shows is run as it stands there."""

import re
from pathlib import Path

import pytest
import torch

from switchhead.recipes import get_recipe
from switchhead.train import train

USE = Path(__file__).parents[1] / "docs" / "use.md"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_every_block_of_the_guide_runs_and_its_attention_weights_are_the_layers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("novel.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    recipe = get_recipe("tiny-switchhead").with_training(steps=2)
    train(model=recipe.model, training=recipe.training, data="text:novel.txt", out="runs/novel", device="cpu")
    shown = {}
    for block in re.findall(r"^```python\n(.*?)^```", USE.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, str(USE), "exec"), shown)
    assert "'I' [[" in capsys.readouterr().out  # the experts of the first token
    attention, x = shown["block"].attention, shown["block"].attention_norm(shown["output"].hidden_states[0])
    tokens = x.flatten(0, 1)
    values = attention.v_proj(tokens, attention.source_router(tokens)).unflatten(0, x.shape[:2]).transpose(1, 2)
    seen = (shown["weights"] @ values).transpose(1, 2).flatten(0, 1)
    y = attention.o_proj(seen, attention.destination_router(tokens)).unflatten(0, x.shape[:2])
    torch.testing.assert_close(y, attention(x))

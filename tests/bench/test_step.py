import json

import pytest
import torch

from switchhead import cli
from switchhead.bench import bench_steps, steps_as_table
from switchhead.recipes import get_recipe
from switchhead.train.hardware import PEAKS, peak_flops, peak_tokens_per_second

CPU = torch.device("cpu")


def small(name, **training):
    recipe = get_recipe(name).with_model(num_hidden_layers=1, hidden_size=16, intermediate_size=16, head_dim=4)
    return name, recipe.model, recipe.with_training(batch_size=2, chunk_length=8, **training).training


def test_rows_say_what_a_step_of_each_model_costs():
    rows = list(bench_steps([small("tiny-switchhead"), small("tiny-dense")], CPU, steps=2, warmup=1))
    assert [row.name for row in rows] == ["tiny-switchhead", "tiny-dense"]
    for row in rows:
        assert row.tokens_per_second == pytest.approx(16 / row.ms * 1e3)
        assert 0 < row.loader_share < 1
        assert row.utilization is None
        assert row.peak_bytes is None
    assert "| 1.00 |" in steps_as_table(rows).splitlines()[-1]


def test_the_command_compares_a_recipe_with_its_dense_twin(capsys):
    sizes = ["--steps", "1", "--batch-size", "1", "--chunk-length", "8", "--device", "cpu"]
    assert cli.main(["bench", "step", "tiny-switchhead", *sizes, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["tiny-switchhead", "tiny-dense"]
    assert all(row["batch_size"] == 1 and row["chunk_length"] == 8 for row in rows)


def test_the_command_replays_steps_where_there_are_cuda_graphs(capsys):
    command = ["bench", "step", "tiny-switchhead", "--steps", "1", "--batch-size", "1", "--chunk-length", "8"]
    assert cli.main([*command, "--device", "cpu", "--cuda-graphs", "on"]) == 1
    assert "cuda_graphs is True, but training on cpu has no CUDA graphs" in capsys.readouterr().err


@pytest.mark.gpu
def test_replayed_steps_are_measured():
    models = [small(name, dtype="bfloat16", cuda_graphs=True) for name in ("tiny-switchhead", "tiny-dense")]
    rows = list(bench_steps(models, torch.device("cuda"), steps=3))
    assert all(row.ms > 0 and row.peak_bytes for row in rows)


def test_a_recipe_without_a_twin_asks_for_one(capsys):
    assert cli.main(["bench", "step", "tiny-dense"]) == 2
    assert "tiny-dense names no twin: give one with --twin RECIPE" in capsys.readouterr().err


def test_utilization_is_of_the_peak_of_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200 NVL")
    gpu = torch.device("cuda")
    assert peak_flops(gpu, "bfloat16") == PEAKS["H200"][0]
    assert peak_flops(gpu, "float32") == PEAKS["H200"][1]
    assert peak_flops(CPU, "float32") is None
    _, model, _ = small("tiny-dense")
    reachable = peak_tokens_per_second(model, chunk_length=8, device=gpu, dtype="bfloat16")
    # A token costs at least six operations for each parameter of a matrix but the embedding's.
    matrices = model.hidden_size * (4 * model.num_attention_heads * model.head_dim + 2 * 16 + model.vocab_size)
    assert 0.8 * PEAKS["H200"][0] / (6 * matrices) < reachable <= PEAKS["H200"][0] / (6 * matrices)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Abacus 3000")
    assert peak_tokens_per_second(model, chunk_length=8, device=gpu, dtype="bfloat16") is None

import json

import pytest
import torch

from switchhead import bench, cli
from switchhead.bench import LayerRow, PassRow, passes_as_table
from switchhead.bench.layer import LayerConfig
from switchhead.bench.passes import expert_passes
from switchhead.bench.timing import Cost
from tests.ops.triton.conftest import device  # noqa: F401  (and the interpreter's corrections)

ROW = PassRow(layer="262m", routing="uniform", name="V forward", ms=0.125, cublas_ms=0.1)


def test_every_pass_runs_and_computes_what_its_name_says(device):  # noqa: F811
    config = LayerConfig(
        d_model=16, dense_heads=2, dense_d_head=8, n_heads=2, d_head=8, n_experts=4, k=2, lengths=(20,)
    )
    scores = torch.randn(20, 2, 2, 4, device=device)
    shapes = {name: [tuple(t.shape) for t in function() or ()] for name, function in expert_passes(config, scores)}
    assert shapes == {
        "V forward": [(20, 2, 8), (20, 2, 2, 8)],
        "V input and gates": [(20, 16), (0,), (20, 2, 2)],
        "V weights": [(0,), (2, 4, 16, 8), (0,)],
        "O forward": [(20, 16), (0,)],
        "O input and gates": [(20, 2, 8), (0,), (20, 2, 2)],
        "O weights": [(0,), (2, 4, 8, 16), (0,)],
        "router and sort, two sides": [],
        "router backward": [(20, 16), (4, 4, 16)],
    }


def test_the_table_gives_each_pass_as_a_share_of_cublas():
    assert passes_as_table([ROW]).splitlines()[-1] == "| 262m | uniform | V forward | 0.125 | 0.100 | 80% |"


def test_bench_layer_prints_the_passes_below_its_table(monkeypatch, capsys):
    cost = Cost(2.0, 1.0, 8.0, 16.0)
    row = LayerRow(
        layer="262m",
        length=512,
        dense=cost,
        dense_backend="CUDNN_ATTENTION",
        gqa=cost,
        switchhead={"uniform": cost, "trained": cost},
    )
    monkeypatch.setattr(bench, "bench_layer", lambda layers, **options: iter([row]))
    monkeypatch.setattr(bench, "bench_passes", lambda layers, **options: iter([ROW]))
    assert cli.main(["bench", "layer"]) == 0
    shown = capsys.readouterr()
    table, passes = shown.out.split("\n\n")
    assert table == bench.as_table([row])
    assert passes.strip() == passes_as_table([ROW])
    # As soon as it is measured: every line but the heads.
    assert shown.err.splitlines() == table.splitlines()[2:] + passes.strip().splitlines()[2:]
    assert cli.main(["bench", "layer", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passes"][0]["ms"] == 0.125
    assert cli.main(["bench", "layer", "--no-passes"]) == 0
    assert "V forward" not in capsys.readouterr().out


def test_help_of_bench_layer_names_what_can_be_timed_and_left_out(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "layer", "--help"])
    words = capsys.readouterr().out.replace(",", " ").replace(";", " ").split()
    assert {*bench.LAYERS, *bench.NAMES} <= set(words)
    assert "leave" in words[words.index("--no-passes") + 1 :][:1]

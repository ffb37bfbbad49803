import dataclasses
import json
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from switchhead import cli
from switchhead.bench import GenerationRow, bench_generation, generation_as_table
from switchhead.bench import generate as module
from switchhead.bench.timing import alternating_ms
from switchhead.recipes import get_recipe

CPU = torch.device("cpu")


def small(name, **changes):
    sizes = dict(num_hidden_layers=1, hidden_size=16, intermediate_size=16, vocab_size=31)
    return get_recipe(name).with_model(**sizes | changes).model


def bench(device=CPU, *, dtype=None, **options):
    sizes = dict(lengths=(8,), prompts=(2,), batch_sizes=(1, 3), repeats=2) | options
    return bench_generation(small("tiny-switchhead"), small("tiny-dense"), device, dtype=dtype, **sizes)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_rows_say_what_each_phase_costs_both_models(dtype):
    rows = list(bench(dtype=dtype))
    assert [(row.phase, row.launch, row.batch_size, row.length) for row in rows] == [
        ("prefill", "host", 2, 8),
        ("decode", "host", 1, 8),
        ("decode", "host", 3, 8),
    ]
    for row in rows:
        assert row.failure is None
        assert row.ratio == row.ours.ms / row.twin.ms > 0
        assert row.ours.peak_bytes is row.twin.peak_bytes is None
        slots = 8 if row.phase == "prefill" else 64
        for cost, name in ((row.ours, "tiny-switchhead"), (row.twin, "tiny-dense")):
            config = small(name)
            numbers = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
            assert cost.cache_bytes == row.batch_size * slots * numbers * (2 if dtype else 4)


def test_a_step_decodes_behind_the_filled_cache_and_can_be_repeated():
    model = module.SwitchHeadForCausalLM(small("tiny-switchhead")).eval()
    with torch.no_grad():
        run = module._Decoding(model, 2, 20, module._choose)
        run.prepare()
        assert run.cache.get_seq_length() == 20
        for _ in range(module.TOKENS):
            run.step()
        assert run.cache.get_seq_length() == 20 + module.TOKENS <= run.cache.layers[0].keys.shape[2]
        run.prepare()
        assert run.cache.get_seq_length() == 20


def test_a_row_that_fails_says_why_and_the_others_follow(monkeypatch):
    run = module._Decoding.step

    def fails(self):
        if len(self.tokens) == 1:
            try:
                raise torch.OutOfMemoryError("no room\nfor all this")
            finally:
                raise RuntimeError("capture ended | badly")
        run(self)

    monkeypatch.setattr(module._Decoding, "step", fails)
    rows = list(bench())
    assert [row.failure is None for row in rows] == [True, False, True]
    assert rows[1].failure == "in ours: RuntimeError: capture ended | badly; after OutOfMemoryError: no room"
    assert rows[1].ratio is None
    header, _, *lines = generation_as_table(rows).splitlines()
    assert "| twin ms | ours ms |" in header
    assert len({line.count("|") for line in (header, *lines)}) == 1
    assert "capture ended / badly" in lines[1]


def test_steps_are_timed_by_turns_each_after_its_own_preparation():
    calls = []
    steps = [lambda: calls.append("step a"), lambda: calls.append("step b")]
    prepares = [lambda: calls.append("prepare a"), lambda: calls.append("prepare b")]
    found = alternating_ms(steps, prepares, CPU, repeats=2)
    assert len(found) == 2
    assert calls == ["prepare a", "step a", "prepare b", "step b"] * 2


def test_relative_positions_are_refused():
    config = small("tiny-switchhead", positions="relative")
    with pytest.raises(ValueError, match="relative positions; use recipes with rotary ones"):
        bench_generation(config, config, CPU)


SIZES = ["--lengths", "4", "--prompts", "1", "--batch-sizes", "1", "--repeats", "1", "--device", "cpu"]


def test_the_command_compares_a_recipe_with_its_dense_twin(capsys):
    assert cli.main(["bench", "generate", "tiny-switchhead", *SIZES]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ours: tiny-switchhead, twin: tiny-dense"
    assert [line[: len("| prefill")] for line in lines[4:]] == ["| prefill", "| decode "]


def test_the_command_prints_json(capsys):
    assert cli.main(["bench", "generate", "tiny-switchhead", *SIZES, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["phase"], row["launch"]) for row in rows] == [("prefill", "host"), ("decode", "host")]
    assert all(row["ours"]["ms"] > 0 and row["ours"]["cache_bytes"] < row["twin"]["cache_bytes"] for row in rows)


def test_the_command_fails_where_a_row_failed(monkeypatch, capsys):
    row = GenerationRow(phase="decode", launch="graph", batch_size=1, length=4, failure="RuntimeError: no")
    monkeypatch.setattr("switchhead.bench.bench_generation", lambda *_, **__: iter([row, dataclasses.replace(row)]))
    assert cli.main(["bench", "generate", "tiny-switchhead", *SIZES]) == 1
    shown = capsys.readouterr()
    assert shown.out.count("RuntimeError: no") == 2
    assert "2 of 2 rows failed" in shown.err


def test_numbers_below_one_are_refused(capsys):
    assert cli.main(["bench", "generate", "tiny-switchhead", "--lengths", "8", "0"]) == 2
    assert "--lengths 8 0: every number must be at least 1" in capsys.readouterr().err


def test_each_model_is_compiled_once_a_row_without_graph_breaks(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    counters.clear()
    assert [row.failure for row in bench(batch_sizes=(2,), compile=True)] == [None] * 2
    assert counters["stats"]["unique_graphs"] == 2 * 2


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
def test_decoding_is_replayed_on_a_gpu(compile):
    rows = list(bench(torch.device("cuda"), batch_sizes=(1, 20), compile=compile))
    assert [row.failure for row in rows] == [None] * 5
    assert [row.launch for row in rows] == ["host", "host", "graph", "host", "graph"]
    assert all(row.ours.peak_bytes > row.ours.cache_bytes for row in rows)

import json

import pytest

from switchhead.train.metrics import MetricsLog, read_metrics


@pytest.fixture
def paths(tmp_path):
    return tmp_path / "metrics.jsonl", tmp_path / "tensorboard"


def test_every_line_is_on_file_at_once(paths):
    with MetricsLog(*paths, step=0) as log:
        log.append(1, {"loss": 2.5})
        assert paths[0].read_text() == '{"step": 1, "loss": 2.5}\n'


def test_going_on_drops_what_lies_beyond_the_checkpoint_and_a_line_cut_short(paths):
    with MetricsLog(*paths, step=0) as log:
        for step in range(1, 6):
            log.append(step, {"loss": float(step)})
    with paths[0].open("a") as file:
        file.write('{"step": 6, "lo')
    with MetricsLog(*paths, step=3) as log:
        log.append(4, {"loss": 40.0})
    assert [(line["step"], line["loss"]) for line in read_metrics(paths[0])] == [
        (1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "end", ["\0" * 40, "\0" * 40 + "\n", '{"step": 4, "loss"\n\xff\n', "12\n", "null\n", '"step"\n', '{"ste": 4}\n']
)
def test_what_a_machine_without_power_left_at_the_end_is_dropped(paths, caplog, end):
    with MetricsLog(*paths, step=0) as log:
        for step in range(1, 4):
            log.append(step, {"loss": float(step)})
    with paths[0].open("a", encoding="latin-1") as file:
        file.write(end)
    with MetricsLog(*paths, step=2) as log:
        log.append(3, {"loss": 30.0})
    assert [line["loss"] for line in read_metrics(paths[0])] == [1.0, 2.0, 30.0]
    assert not caplog.messages


def test_broken_lines_among_others_are_left_out_with_a_warning(paths, caplog):
    paths[0].write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    assert [line["step"] for line in read_metrics(paths[0])] == [1, 3]
    assert caplog.messages == [f"{paths[0]}: lines that cannot be read are left out: 2"]


def test_infinity_is_written_as_json(paths):
    with MetricsLog(*paths, step=0) as log:
        log.append(1, {"perplexity": float("inf")})
    assert json.loads(paths[0].read_text()) == {"step": 1, "perplexity": None}


def test_tensorboard_gets_the_same_numbers(paths):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsLog(*paths, step=0) as log:
        log.append(1, {"loss": 2.5})
        log.append(2, {"loss": 1.5})
    events = EventAccumulator(str(paths[1]))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.5), (2, 1.5)]


def test_nested_numbers_are_on_the_line_as_they_are_and_flat_in_tensorboard(paths):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    usage = {"experts": {"router": {"entropy": 0.5, "share": [[1.0, 0.0]], "mean_gate": float("nan")}}}
    with MetricsLog(*paths, step=0) as log:
        log.append(1, usage)
    line = json.loads(paths[0].read_text())
    assert line["experts"]["router"] == {"entropy": 0.5, "share": [[1.0, 0.0]], "mean_gate": None}
    events = EventAccumulator(str(paths[1]))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["experts/router/entropy", "experts/router/mean_gate"]

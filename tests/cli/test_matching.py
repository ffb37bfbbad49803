import json

import pytest

from switchhead import cli


def matched(capsys, *args):
    assert cli.main(["match", *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_equal_parameters_stand_beside_the_papers_choice_and_its_deviation(capsys):
    ours, paper = matched(capsys, "enwik8-41m-dense", "--heads", "2", "--experts", "4", "--k", "2")
    assert paper["name"] == "enwik8-41m-switchhead"
    assert (ours["head_dim"], paper["head_dim"], paper["intermediate_size"]) == (112, 112, 2088)
    assert abs(ours["parameter_deviation"]) < 0.001
    assert round(100 * paper["parameter_deviation"], 2) == -0.18


def test_equal_cost_is_shown_in_every_convention(capsys):
    rows = matched(capsys, "c4-262m-dense", "--heads", "6", "--experts", "4", "--k", "2", "--by", "macs")
    widths = {row["name"]: row["head_dim"] for row in rows}
    assert widths["matched MACs, published"] == widths["c4-376m-switchhead-mac-matched"] == 168
    assert widths["matched MACs, consistent"] < 168
    for row in rows[:3]:
        convention = row["name"].rpartition(" ")[2]
        assert 0.95 < row[f"macs_ratio_{convention}"] <= 1
    assert rows[-1]["macs_ratio_consistent"] == pytest.approx(1.186, abs=0.001)


def test_several_numbers_of_heads_give_several_models(capsys):
    rows = matched(capsys, "tiny-dense", "--heads", "2", "4", "--experts", "2", "--k", "1", "--grain", "2")
    assert [row["heads"] for row in rows] == [2, 4]
    assert cli.main(["match", "tiny-dense", "--heads", "2", "--experts", "4", "--k", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("tiny-dense ")
    assert lines[2].startswith("matched parameters ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny-switchhead", "--heads", "2", "--experts", "4", "--k", "2"], "tiny-switchhead is not dense"),
        (["tiny-dense", "--heads", "--experts", "4", "--k", "2"], "--heads needs a number"),
        (["tiny-dense", "--heads", "2", "--experts", "4", "--k", "5"], "num_experts_per_tok=5"),
        (["tiny-dense", "--heads", "99", "--experts", "9", "--k", "2"], "choose fewer heads"),
        (
            ["tiny-dense", "--heads", "2", "--experts", "4", "--k", "2", "--convention", "published"],
            "--convention has no effect on parameters",
        ),
    ],
)
def test_arguments_that_cannot_be_are_usage_errors(capsys, arguments, message):
    assert cli.main(["match", *arguments]) == 2
    assert message in capsys.readouterr().err

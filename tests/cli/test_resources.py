import json

import pytest

from switchhead import cli


def printed(capsys, *args):
    assert cli.main(args) == 0
    return capsys.readouterr().out


def usage_error(capsys, *args):
    assert cli.main(args) == 2
    return capsys.readouterr().err


def test_every_model_of_the_paper_is_listed_with_plain_numbers(capsys):
    rows = json.loads(printed(capsys, "resources", "--paper", "--json"))
    assert len(rows) == 64
    row = next(row for row in rows if row["name"] == "wikitext103-47m-switchhead")
    assert row["macs_published"] == 170_364_928
    assert row["macs_consistent"] == 202_428_416
    assert row["floats_published"] == 757_760
    assert row["floats_consistent"] == 835_584


def test_every_row_of_the_paper_is_marked(capsys):
    lines = printed(capsys, "resources", "--paper").splitlines()
    assert [line.split()[-1] for line in lines[2:66]].count("yes") == 60
    assert "60 of 64 models meet every printed figure" in lines[-2]


def test_a_recipe_is_counted_at_every_length_beside_its_dense_twin(capsys, tmp_path):
    plot = tmp_path / "growth.png"
    arguments = ["resources", "tiny-switchhead", "--lengths", "32,64", "--batch-size", "2", "--plot", str(plot)]
    counted = json.loads(printed(capsys, *arguments, "--json"))
    assert (counted["name"], counted["dense_twin"]) == ("tiny-switchhead", "tiny-dense")
    assert counted["parameters"] == sum(part["total"] for part in counted["parts"].values()) == 857_377
    short, long = counted["lengths"]
    assert [short["chunk_length"], long["chunk_length"], short["batch_size"]] == [32, 64, 2]
    assert long["macs_consistent"] > 2 * short["macs_consistent"]
    assert long["forward_flops"] > short["forward_flops"]
    assert short["cache_bytes"] == 4 * 4 * 2 * 2 * 24  # layers, float32, keys and values, heads, width
    assert plot.read_bytes().startswith(b"\x89PNG")

    text = printed(capsys, "resources", "tiny-dense", "--lengths", "32", "--dtype", "bfloat16")
    assert "857,345" in text
    assert "peak are those of a GPU" in text
    assert "peak are those of a CPU" in printed(capsys, "resources", "tiny-dense", "--lengths", "8", "--device", "cpu")
    assert text.count("tiny-dense") == 3  # a dense model is its own twin


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a recipe"),
        (["tiny-dense", "--paper"], "leave out the recipe, or --paper"),
        (["tiny-dens"], "did you mean tiny-dense"),
        (["tiny-dense", "--lengths", "1k"], "--lengths '1k' is not a list of numbers like 256,1024"),
        (["tiny-dense", "--lengths", "0"], "chunk_length must be at least 1; got 0"),
        (["tiny-dense", "--batch-size", "0"], "batch_size must be at least 1; got 0"),
        (["tiny-dense", "--plot", "nowhere/growth.png"], "there is no directory nowhere"),
        (["tiny-dense", "--lengths", "8", "--plot", "growth.words"], "Format 'words' is not supported"),
    ],
)
def test_arguments_that_cannot_be_are_usage_errors(capsys, arguments, message):
    assert message in usage_error(capsys, "resources", *arguments)


@pytest.mark.parametrize(
    "option", ["--lengths 64", "--batch-size 2", "--dtype float16", "--device cpu", "--plot growth.png"]
)
def test_the_papers_models_are_counted_as_the_paper_does_whatever_option_there_is(capsys, option):
    message = "--paper counts each model as the paper does: it goes with --json alone"
    assert message in usage_error(capsys, "resources", "--paper", *option.split())

import json

import pytest

from switchhead import cli


@pytest.fixture
def source(tmp_path):
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"t": f"document {i}"}) + "\n" for i in range(1000)))
    return f"jsonl:{tmp_path}/text.jsonl#t"


def test_text_is_prepared_and_a_model_trains_on_it(source, tmp_path, capsys):
    out = str(tmp_path / "data")
    options = ["--tokenizer", "bytes", "--held-out", "0.1", "--shuffle", "0", "--processes", "1"]
    assert cli.main(["prepare", source, "--out", out, *options]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[0] == f"{out}: 257 token ids"
    assert captured.out.splitlines()[1].split() == ["split", "documents", "tokens", "bytes"]
    assert "encoding train  file 1/1" in captured.err
    assert cli.main(["prepare", source, "--out", out, *options, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["tokenizer"]["size"] == 257
    assert sum(split["documents"] for split in printed["splits"].values()) == 1000
    steps = ["--steps", "2", "--warmup-steps", "0", "--batch-size", "2"]
    assert cli.main(["train", "tiny-switchhead", "--data", out, "--out", str(tmp_path / "run"), *steps]) == 0
    assert "step 2 of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--held-out", "0.1", "--valid", "text:x"], 2, "held_out and valid exclude each other"),
        (["--processes", "0"], 2, "processes is 0; it must be at least 1"),
        (["--tokenizer", "/no/such/place"], 1, "cannot load tokenizer '/no/such/place'"),
        (["--vocab-size", "90000"], 1, "cannot train a tokenizer of 90000 pieces on this text"),
    ],
)
def test_what_cannot_be_done_is_one_line(source, tmp_path, capsys, options, code, message):
    assert cli.main(["prepare", source, "--out", str(tmp_path / "out"), *options]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith(f"switchhead: error: {message}")

import json
from pydoc_data.topics import topics

import pytest
from transformers import AutoTokenizer

from switchhead import cli
from switchhead.data import load_vocabulary


@pytest.fixture
def source(tmp_path):
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"t": f"document {i}"}) + "\n" for i in range(1000)))
    return f"jsonl:{tmp_path}/text.jsonl#t"


def test_text_is_prepared_and_a_model_trains_on_it(tmp_path, capsys):
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"t": text}) + "\n" for text in topics.values()))
    source, out, run = f"jsonl:{tmp_path}/text.jsonl#t", str(tmp_path / "data"), str(tmp_path / "run")
    options = ["--vocab-size", "400", "--held-out", "0.02", "--shuffle", "0", "--processes", "1"]
    assert cli.main(["prepare", source, "--out", out, *options]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[0] == f"{out}: 400 token ids"
    assert captured.out.splitlines()[1].split() == ["split", "documents", "tokens", "bytes"]
    assert "encoding train  file 1/1" in captured.err
    assert cli.main(["prepare", source, "--out", out, *options, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["tokenizer"]["size"] == 400
    assert sum(split["documents"] for split in printed["splits"].values()) == len(topics)
    train = ["train", "tiny-switchhead", "--data", out, "--out", run, "--warmup-steps", "0", "--batch-size", "2"]
    assert cli.main([*train, "--steps", "2"]) == 0
    assert "step 2 of 2" in capsys.readouterr().out
    assert cli.main(["eval", run, "--data", out, "--json"]) == 0
    (scored,) = json.loads(capsys.readouterr().out)["results"]
    assert scored["settings"]["bytes"] == printed["splits"]["validation"]["bytes"]
    assert cli.main(["generate", run, "--prompt", "It was", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("It was")
    ours = load_vocabulary(tmp_path / "data/tokenizer")
    theirs = AutoTokenizer.from_pretrained(run)
    assert theirs("The with statement").input_ids == [1, *ours.encode("The with statement").tolist()]


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

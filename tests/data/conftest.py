import json

import pytest

from tests.data.corpora import DOCUMENTS


@pytest.fixture
def small_chunks(monkeypatch):
    """Documents reach the tokenizer in several parts."""
    monkeypatch.setattr("switchhead.data.encoding.CHUNK", 5000)


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory):
    """The documents in three files."""
    directory = tmp_path_factory.mktemp("source")
    for number in range(3):
        lines = [json.dumps({"text": text}) + "\n" for text in DOCUMENTS[number::3]]
        (directory / f"{number}.jsonl").write_text("".join(lines))
    return f"jsonl:{directory}/*.jsonl#text"

import json

import pytest

from switchhead.data import read_documents
from switchhead.errors import DataError


def test_a_text_file_is_one_document(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("naïve\r\ntext\n".encode())
    assert list(read_documents(f"text:{path}")) == ["naïve\r\ntext\n"]


def test_jsonl_gives_a_document_per_line_in_the_order_of_file_names(tmp_path):
    for name, texts in (("b.jsonl", ["three"]), ("a.jsonl", ["one", "", "two"])):
        (tmp_path / name).write_text("".join(json.dumps({"body": t, "id": 1}) + "\n" for t in texts) + "\n")
    assert list(read_documents(f"jsonl:{tmp_path}/*.jsonl#body")) == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("novel.txt", "cannot read data 'novel.txt': expected text:FILE or jsonl:GLOB#field"),
        ("csv:x", "expected text:FILE"),
        ("text:", "expected text:FILE"),
        ("text:{dir}/absent", "cannot read text file '{dir}/absent': No such file"),
        ("text:{dir}", "cannot read text file '{dir}': Is a directory"),
        ("text:{dir}/empty", "text:{dir}/empty holds no text"),
        ("text:{dir}/latin", r"latin' is not UTF-8 \(byte 3 is 0xe9\)"),
        ("jsonl:{dir}/list.jsonl", "names no field"),
        ("jsonl:{dir}/*.none#text", "no file matches"),
        ("jsonl:{dir}/list.jsonl#text", r"list.jsonl:1 has no text field 'text' \(it has: not an object, list\)"),
        ("jsonl:{dir}/number.jsonl#text", r"number.jsonl:2 has no text field 'text' \(it has: body, text\)"),
        ("jsonl:{dir}/cut.jsonl#text", "cut.jsonl:1 is not JSON"),
        ("jsonl:{dir}/blank.jsonl#text", "holds no text"),
    ],
)
def test_unusable_data_is_one_error_that_names_the_place(tmp_path, spec, message):
    (tmp_path / "empty").write_text("")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "number.jsonl").write_text('{"text": "a"}\n{"text": 1, "body": 2}\n')
    (tmp_path / "cut.jsonl").write_text('{"text": "a\n')
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=message.format(dir=tmp_path)):
        list(read_documents(spec.format(dir=tmp_path)))

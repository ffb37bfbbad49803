import gzip
import json
import lzma

import pytest
import zstandard

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


def test_files_of_a_text_glob_are_documents_in_the_order_of_their_names(tmp_path):
    for name, text in (("b.txt", "two"), ("a.txt", "one"), ("c.md", "three")):
        (tmp_path / name).write_text(text)
    assert list(read_documents(f"text:{tmp_path}/*.txt")) == ["one", "two"]


def test_a_name_with_glob_characters_is_found(tmp_path):
    (tmp_path / "a[1].txt").write_text("one")
    assert list(read_documents(f"text:{tmp_path}/a[1].txt")) == ["one"]


LINES = "".join(json.dumps({"text": f"document {i} " + "long " * 5000}) + "\n" for i in range(40)).encode()
PACK = {"gz": gzip.compress, "xz": lzma.compress, "zst": zstandard.compress}


@pytest.mark.parametrize("ending", PACK)
def test_compressed_lines_are_read_as_if_they_were_not(tmp_path, ending):
    half = LINES.index(b"\n", len(LINES) // 2) + 1
    # Streams in a row, as parallel compressors write them.
    (tmp_path / f"a.jsonl.{ending}").write_bytes(PACK[ending](LINES[:half]) + PACK[ending](LINES[half:]))
    (tmp_path / "a.jsonl").write_bytes(LINES)
    packed, plain = (list(read_documents(f"jsonl:{tmp_path}/{n}#text")) for n in (f"*.{ending}", "a.jsonl"))
    assert len(plain) == 40
    assert packed == plain


def test_a_long_zstandard_window_is_read(tmp_path):
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)  # beyond what is read by default
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "a.jsonl.zst").write_bytes(packer.compress(LINES) + packer.flush())
    assert len(list(read_documents(f"jsonl:{tmp_path}/a.jsonl.zst#text"))) == 40


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("damage", ["cut off", "changed", "something else"])
def test_damaged_compression_is_an_error_that_names_the_file(tmp_path, ending, damage):
    raw = bytearray(PACK[ending](LINES))
    if damage == "changed":
        raw[len(raw) // 2] ^= 0xFF
    content = {"cut off": raw[:-20], "changed": raw, "something else": b"plain text, surely\n" * 10}[damage]
    (tmp_path / f"a.jsonl.{ending}").write_bytes(content)
    with pytest.raises(DataError, match=rf"a.jsonl.{ending}' is damaged or cut off"):
        list(read_documents(f"jsonl:{tmp_path}/a.jsonl.{ending}#text"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("novel.txt", r"cannot read data 'novel.txt': expected text:FILE\|GLOB, jsonl:GLOB#field or parquet:"),
        ("{dir}/empty", "; did you mean text:{dir}/empty\\?"),
        ("csv:x", "expected text:FILE"),
        ("text:", "expected text:FILE"),
        ("text:{dir}/absent", "no file matches '{dir}/absent'"),
        ("text:{dir}", "cannot read text file '{dir}': Is a directory"),
        ("text:{dir}/empty", "text:{dir}/empty holds no text"),
        ("text:{dir}/latin", r"latin' is not UTF-8 \(byte 3 is 0xe9\)"),
        ("jsonl:{dir}/list.jsonl", "names no field"),
        ("jsonl:{dir}/*.none#text", "no file matches"),
        ("jsonl:{dir}/list.jsonl#text", "list.jsonl:1 is no JSON object but a list"),
        ("jsonl:{dir}/number.jsonl#text", "number.jsonl:2: field 'text' is no text but 1"),
        ("jsonl:{dir}/number.jsonl#body", r"number.jsonl:1 has no field 'body' \(it has: text\)"),
        ("jsonl:{dir}/null.jsonl#text", "null.jsonl:1: field 'text' is no text but null"),
        ("jsonl:{dir}/deep.jsonl#text", "deep.jsonl:1 is not JSON that can be read"),
        ("jsonl:{dir}/digits.jsonl#text", "digits.jsonl:1 is not JSON that can be read"),
        ("jsonl:{dir}/cut.jsonl#text", "cut.jsonl:1 is not JSON"),
        ("jsonl:{dir}/blank.jsonl#text", "holds no text"),
        ("jsonl:{dir}/latin.jsonl#text", "latin.jsonl:1 is not UTF-8"),
        ("jsonl:{dir}/directory.zst#text", "cannot read '{dir}/directory.zst': Is a directory"),
        ("jsonl:{dir}/half.jsonl#text", "half.jsonl:1: field 'text' has half a surrogate pair"),
    ],
)
def test_unusable_data_is_one_error_that_names_the_place(tmp_path, spec, message):
    (tmp_path / "empty").write_text("")
    (tmp_path / "directory.zst").mkdir()
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "number.jsonl").write_text('{"text": "a"}\n{"text": 1, "body": 2}\n')
    (tmp_path / "null.jsonl").write_text('{"text": null}\n')
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    (tmp_path / "digits.jsonl").write_text('{"text": "a", "n": ' + "9" * 5000 + "}")
    (tmp_path / "cut.jsonl").write_text('{"text": "a\n')
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
    (tmp_path / "half.jsonl").write_text(r'{"text": "\ud83d"}')
    with pytest.raises(DataError, match=message.format(dir=tmp_path)):
        list(read_documents(spec.format(dir=tmp_path)))

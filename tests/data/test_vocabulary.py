import json

import numpy as np
import pytest

from switchhead.data import ByteSubsetVocabulary, ByteVocabulary, load_tokens, load_vocabulary, split_tail
from switchhead.errors import DataError, RunError

VOCABULARY = ByteVocabulary()


@pytest.mark.parametrize("text", ["", "plain\x00", "naïve ☃ 🂡", "\ufeff\r\n"])
def test_decoding_gives_back_the_encoded_text(text):
    tokens = VOCABULARY.encode(text)
    assert VOCABULARY.decode([VOCABULARY.beginning, *tokens.tolist()]) == text
    assert VOCABULARY.count_bytes(tokens) == len(text.encode())


def test_half_a_character_decodes_to_a_replacement():
    assert VOCABULARY.decode("é".encode()[:1]) == "\ufffd"


def test_documents_stand_behind_beginning_tokens(tmp_path):
    path = tmp_path / "two.jsonl"
    path.write_text('{"t": "ab"}\n{"t": "c"}\n')
    tokens = load_tokens(f"jsonl:{path}#t", VOCABULARY)
    assert tokens.tolist() == [256, 97, 98, 256, 99]
    assert VOCABULARY.count_bytes(tokens) == 3


def test_the_tail_is_set_aside_behind_a_beginning_token():
    tokens = np.arange(100, dtype=np.uint16)
    head, tail = split_tail(tokens, 0.05, VOCABULARY)
    assert head.tolist() == list(range(95))
    assert tail.tolist() == [256, 95, 96, 97, 98, 99]


def test_a_text_too_short_to_split_is_refused():
    with pytest.raises(DataError, match="2 tokens cannot be split"):
        split_tail(np.array([256, 1], dtype=np.uint16), 0.05, VOCABULARY)


def test_a_saved_vocabulary_loads(tmp_path):
    VOCABULARY.save(tmp_path / "tokenizer")
    loaded = load_vocabulary(tmp_path / "tokenizer", size=257)
    assert loaded.encode("abc").tolist() == [97, 98, 99]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read vocabulary .*No such file"),
        ('{"kind": "by', "not a vocabulary"),
        ("[]", "not a vocabulary"),
        (json.dumps({"kind": "words", "size": 257}), "unknown kind 'words'"),
        (json.dumps({"kind": "byte subset", "size": 257, "bytes": [1, 1]}), "does not list the bytes"),
        (json.dumps({"kind": "bytes", "size": 300}), "has 300 tokens, the model 257: it belongs to another run"),
    ],
)
def test_a_vocabulary_that_is_not_the_models_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "vocabulary.json").write_text(content)
    with pytest.raises(RunError, match=message):
        load_vocabulary(tmp_path, size=257)


def test_words_end_at_white_space_and_with_documents():
    tokens = np.concatenate([[256], VOCABULARY.encode("one  two\nthree"), [256], VOCABULARY.encode("four")])
    assert VOCABULARY.count_words(tokens) == 4


def test_a_byte_subset_reads_its_own_bytes_and_has_no_beginning(tmp_path):
    vocabulary = ByteSubsetVocabulary(b"\nabc \xc3\xa9")
    vocabulary.save(tmp_path / "tokenizer")
    loaded = load_vocabulary(tmp_path / "tokenizer", size=7)
    tokens = loaded.encode("é cab\na")
    assert tokens.tolist() == [5, 6, 4, 3, 1, 2, 0, 1]
    assert loaded.decode(tokens.tolist()) == "é cab\na"
    assert (loaded.count_bytes(tokens), loaded.count_words(tokens)) == (8, 3)
    assert loaded.beginning is None
    assert loaded.fingerprint == vocabulary.fingerprint != VOCABULARY.fingerprint
    with pytest.raises(DataError, match=r"byte 0x64 of this text \(at 1\) is not among the 7 bytes"):
        loaded.encode("ad")


def test_documents_of_a_vocabulary_without_beginning_follow_each_other(tmp_path):
    path = tmp_path / "two.jsonl"
    path.write_text('{"t": "ab"}\n{"t": "c"}\n')
    assert load_tokens(f"jsonl:{path}#t", ByteSubsetVocabulary(b"abc")).tolist() == [0, 1, 2]

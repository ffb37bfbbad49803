import json

import numpy as np
import pytest

from switchhead.data import ByteVocabulary, load_tokens, load_vocabulary, split_tail
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
        (json.dumps({"kind": "bytes", "size": 300}), "has 300 tokens, the model 257: it belongs to another run"),
    ],
)
def test_a_vocabulary_that_is_not_the_models_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "vocabulary.json").write_text(content)
    with pytest.raises(RunError, match=message):
        load_vocabulary(tmp_path, size=257)

import hashlib

import pytest

from switchhead.data import open_corpus
from switchhead.errors import DataError


def test_the_tail_of_a_text_is_held_out_and_both_are_identified(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghij" * 10)
    corpus = open_corpus(f"text:{tmp_path}/a.txt", validation_fraction=0.1)
    text = ("abcdefghij" * 10).encode()
    assert corpus.training.tolist() == [256, *text[:90]]
    assert corpus.validation.tolist() == [256, *text[90:]]
    digest = hashlib.sha256(corpus.training.tobytes() + corpus.validation.tobytes()).hexdigest()
    assert corpus.description == {"training_tokens": 91, "validation_tokens": 11, "sha256": digest}


def test_given_validation_text_leaves_the_training_text_whole(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "b.txt").write_text("de")
    corpus = open_corpus(f"text:{tmp_path}/a.txt", f"text:{tmp_path}/b.txt", validation_fraction=0.1)
    assert corpus.training.tolist() == [256, *b"abc"]
    assert corpus.validation.tolist() == [256, *b"de"]


def test_the_identity_is_the_texts_and_not_the_places(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("some text")
    a, b = (open_corpus(f"text:{tmp_path}/{name}", validation_fraction=0.2) for name in ("a.txt", "b.txt"))
    assert a.description == b.description
    assert open_corpus(f"text:{tmp_path}/a.txt", validation_fraction=0.4).description != a.description


def test_unreadable_text_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no file matches"):
        open_corpus(f"text:{tmp_path}/none", validation_fraction=0.1)
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DataError, match="2 tokens cannot be split"):
        open_corpus(f"text:{tmp_path}/a.txt", validation_fraction=0.1)

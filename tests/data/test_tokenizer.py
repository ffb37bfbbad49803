from pydoc_data.topics import topics

import numpy as np
import pytest
from huggingface_hub import HfApi
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from switchhead.data import TokenizerVocabulary, load_tokenizer, load_vocabulary
from switchhead.data.bpe import to_hugging_face, train_bpe, train_sentencepiece
from switchhead.data.tokenizer import _WordEncoder
from switchhead.data.vocabulary import dtype_of
from switchhead.errors import DataError, RunError

DOCUMENTS = [topics[name] for name in sorted(topics)]  # English, code and tables: Python's own reference
TEXTS = {
    "words": "How much wood would a woodchuck chuck?",
    "runs of spaces": "  two    four \t tab\t\t \n\n   \n end  ",
    "line ends": "\n\r\n\rone\n\ntwo\u2028three\x85",
    "unicode": "naïve ☃ 🂡 Ελληνικά 漢字 e\u0301 \u200f \ufeff",
    "controls": "nul\x00 escape\x1b delete\x7f",
    "names of special tokens": "<s> <unk></s> <0x41> <|endoftext|>",
    "digits": "1 22 333 4.5e-6 x86_64",
    "nothing": "",
}


@pytest.fixture(scope="module")
def model():
    return train_sentencepiece(DOCUMENTS, 1000)


@pytest.fixture(scope="module")
def vocabulary(model):
    return TokenizerVocabulary(to_hugging_face(model))


@pytest.fixture(scope="module")
def byte_level():
    """A tokenizer of GPT-2's kind: byte-level, one token for beginning and end."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    backend.train_from_iterator(DOCUMENTS, trainer)
    return TokenizerVocabulary(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>"))


def test_ids_are_those_of_sentencepiece(model, vocabulary):
    reference = SentencePieceProcessor(model_proto=model)
    for text in [*DOCUMENTS, *TEXTS.values()]:
        assert vocabulary.encode(text).tolist() == reference.encode(text)
    assert vocabulary.size == reference.get_piece_size() == 1000


def test_encoding_word_by_word_changes_no_id(vocabulary):
    assert isinstance(vocabulary._encode, _WordEncoder)
    for text in [*DOCUMENTS, *TEXTS.values()]:
        whole = vocabulary._backend.encode(text, add_special_tokens=False).ids
        assert vocabulary.encode(text).tolist() == whole


@pytest.mark.parametrize("kind", ["vocabulary", "byte_level"])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_decoding_gives_back_the_encoded_text(kind, text, request):
    vocabulary = request.getfixturevalue(kind)
    tokens = vocabulary.encode(text)
    assert vocabulary.beginning not in tokens
    ids = [vocabulary.beginning, *tokens.tolist()]
    assert vocabulary.decode(ids) == text
    assert vocabulary.count_bytes(np.array(ids, dtype=tokens.dtype)) == len(text.encode())
    assert vocabulary.count_words(np.array(ids + ids, dtype=tokens.dtype)) == 2 * len(text.split())


def test_sentencepieces_own_space_comes_back_as_a_space(vocabulary):
    assert vocabulary.decode(vocabulary.encode("a\u2581b").tolist()) == "a b"


def test_digits_stand_alone(vocabulary):
    pieces = [vocabulary.decode([index]) for index in range(vocabulary.size)]
    assert not [piece for piece in pieces if any(c.isdigit() for c in piece) and len(piece.strip()) > 1]
    assert len(vocabulary.encode("1234567")) == 7


def test_a_continuation_keeps_the_space_that_it_begins_with(vocabulary):
    tokens = vocabulary.encode("one two").tolist()
    cut = next(n for n in range(len(tokens)) if vocabulary.decode(tokens[:n]) == "one")
    assert vocabulary.decode(tokens[cut:]) == " two"


def test_the_tokenizer_depends_on_the_words_alone(vocabulary):
    assert train_bpe(reversed(DOCUMENTS), 1000).fingerprint == vocabulary.fingerprint
    assert train_bpe(DOCUMENTS[:40], 1000).fingerprint != vocabulary.fingerprint


@pytest.mark.parametrize(
    ("texts", "size", "message"),
    [
        (["short text"], 1000, r"1000 pieces on this text: Vocabulary size too high .* value <= \d+"),
        (DOCUMENTS, 300, "300 pieces on this text: Vocabulary size is smaller than required_chars"),
        ([" \n\t"], 1000, "there is no text to train a tokenizer on"),
    ],
)
def test_text_that_does_not_make_such_a_tokenizer_is_an_error(texts, size, message):
    with pytest.raises(DataError, match=message):
        train_bpe(texts, size)


@pytest.mark.parametrize("kind", ["vocabulary", "byte_level"])
def test_a_saved_tokenizer_is_the_same_for_us_and_for_hugging_face(kind, request, tmp_path):
    vocabulary = request.getfixturevalue(kind)
    vocabulary.save(tmp_path / "tokenizer")
    loaded = load_vocabulary(tmp_path / "tokenizer", size=vocabulary.size)
    assert (loaded.fingerprint, loaded.beginning) == (vocabulary.fingerprint, vocabulary.beginning)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert theirs.eos_token_id == vocabulary.beginning
    for text in DOCUMENTS[:20]:
        ids = vocabulary.encode(text).tolist()
        assert loaded.encode(text).tolist() == ids
        assert theirs(text, add_special_tokens=False).input_ids == ids
        assert theirs.decode(ids) == text
    assert (
        load_tokenizer(tmp_path / "tokenizer").encode(DOCUMENTS[0]).tolist() == vocabulary.encode(DOCUMENTS[0]).tolist()
    )


def test_hugging_face_puts_the_beginning_token_in_front(vocabulary, tmp_path):
    vocabulary.save(tmp_path / "tokenizer")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert theirs("some text").input_ids == [theirs.bos_token_id, *vocabulary.encode("some text").tolist()]


def test_a_tokenizer_that_changes_text_is_counted_by_what_it_gives_back():
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "[B]": 1, "one": 2, "two": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", bos_token="[B]")
    vocabulary = TokenizerVocabulary(tokenizer)
    tokens = np.array([1, 2, 3, 1, 2], dtype=np.uint16)
    assert vocabulary.encode("one  two").tolist() == [2, 3]
    assert vocabulary.count_bytes(tokens) == len("one two") + len("one")
    assert vocabulary.count_words(tokens) == 3


def test_truncation_and_padding_of_the_tokenizer_do_not_apply():
    tokenizer = to_hugging_face(train_sentencepiece(DOCUMENTS, 600))
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=8)
    text = DOCUMENTS[0]
    assert TokenizerVocabulary(tokenizer).decode(TokenizerVocabulary(tokenizer).encode(text).tolist()) == text


def test_a_tokenizer_without_beginning_is_refused():
    with pytest.raises(DataError, match="neither a bos_token nor an eos_token"):
        TokenizerVocabulary(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}))))


def test_a_slow_tokenizer_is_refused():
    with pytest.raises(DataError, match="object is no fast tokenizer"):
        TokenizerVocabulary(object())


def test_a_missing_tokenizer_is_one_error(tmp_path):
    with pytest.raises(DataError, match=f"cannot load tokenizer '{tmp_path}'"):
        load_tokenizer(tmp_path)


def test_a_name_on_the_hub_without_a_network_is_one_error_at_once(monkeypatch):
    def model_info(self, name, *, timeout):
        raise ConnectionError("no network\nat all")

    def from_pretrained(name):
        pytest.fail("asks the hub again, for half a minute")

    monkeypatch.setattr(HfApi, "model_info", model_info)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    with pytest.raises(
        DataError, match=r"cannot load tokenizer 'nobody/nothing': no directory .* on the hub: no network$"
    ):
        load_tokenizer("nobody/nothing")


def test_a_tokenizer_that_was_changed_or_lost_is_refused(vocabulary, tmp_path):
    vocabulary.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace('"the"', '"teh"'))
    with pytest.raises(RunError, match=r"tokenizer.json is not the tokenizer that was saved there"):
        load_vocabulary(tmp_path)
    file.unlink()
    with pytest.raises(RunError, match=r"cannot read tokenizer .*tokenizer.json: No such file"):
        load_vocabulary(tmp_path)


def test_ids_beyond_sixteen_bits_take_thirty_two(byte_level):
    class Large:
        size = (1 << 16) + 1

    assert dtype_of(byte_level) == byte_level.encode("text").dtype == np.uint16
    assert dtype_of(Large()) == np.uint32

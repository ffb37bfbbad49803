"""Training on prepared directories: the right text by the right tokenizer, or one error."""

import dataclasses
import json
import re
import shutil
from pydoc_data.topics import topics

import pytest

from switchhead.data.prepare import Settings, prepare
from switchhead.errors import DataError, RunError
from switchhead.runs import load_run
from switchhead.train import train


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """The same text as bytes and as pieces of two tokenizers."""
    path = tmp_path_factory.mktemp("corpora")
    paragraphs = [paragraph for name in sorted(topics)[:12] for paragraph in topics[name].split("\n\n")]
    (path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in paragraphs))
    source = f"jsonl:{path / 'text.jsonl'}#text"
    for name, tokenizer in (("pieces", {"vocab_size": 420}), ("others", {"vocab_size": 400})):
        prepare(Settings(source=source, held_out=0.1, **tokenizer), path / name)
    prepare(Settings(source=source, held_out=0.1, tokenizer="bytes"), path / "bytes")
    (path / "other.jsonl").write_text("".join(json.dumps({"text": text[::-1]}) + "\n" for text in paragraphs))
    prepare(Settings(source=f"jsonl:{path / 'other.jsonl'}#text", held_out=0.1, vocab_size=420), path / "as many")
    return path


def test_a_run_takes_the_vocabulary_of_its_corpus(settings, corpora):
    assert train(**{**settings, "data": str(corpora / "pieces")}).finished
    run = load_run(settings["out"], device="cpu")
    assert run.model.config.vocab_size == run.vocabulary.size == 420
    described = json.loads((settings["out"] / "config.json").read_text())["data"]
    assert described["tokenizer"] == run.vocabulary.fingerprint
    assert described["documents"] > 50


def test_masked_documents_are_those_of_the_corpus(settings, corpora):
    training = dataclasses.replace(settings["training"], mask_documents=True, micro_batch_size=1)
    assert train(**{**settings, "training": training, "data": str(corpora / "pieces")}).finished


def test_text_of_another_tokenizer_is_refused(settings, corpora):
    settings = {**settings, "data": str(corpora / "pieces")}
    with pytest.raises(DataError, match=r"others was tokenized with another tokenizer than the model's"):
        train(**settings, valid=str(corpora / "others"))


@pytest.mark.parametrize("other", ["others", "bytes", "as many"])
def test_a_run_does_not_go_on_with_text_of_another_tokenizer_whatever_is_allowed(settings, corpora, other):
    train(**{**settings, "data": str(corpora / "pieces")})
    before = (settings["out"] / "config.json").read_text()
    tokenizer = re.escape(str(settings["out"] / "tokenizer"))
    for allowed in (False, True):
        with pytest.raises(RunError, match=rf"of another tokenizer than this text's: .* {tokenizer}, or start"):
            train(**{**settings, "data": str(corpora / other)}, resume=True, allow_changes=allowed)
    assert (settings["out"] / "config.json").read_text() == before


def test_a_run_of_bytes_does_not_go_on_with_pieces(settings, corpora):
    train(**settings)
    with pytest.raises(RunError, match=r"of another tokenizer than this text's: .* --tokenizer bytes, or start"):
        train(**{**settings, "data": str(corpora / "pieces")}, resume=True, allow_changes=True)


def test_a_damaged_shard_is_named_before_training(settings, corpora, tmp_path):
    shutil.copytree(corpora / "bytes", tmp_path / "damaged")
    (shard,) = (tmp_path / "damaged").glob("train-*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match=rf"{shard.name}"):
        train(**{**settings, "data": str(tmp_path / "damaged")})
    assert not settings["out"].exists()

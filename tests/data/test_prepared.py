import json

import numpy as np
import pytest

from switchhead.data import load_tokens, open_corpus, open_prepared
from switchhead.data.prepare import prepare
from switchhead.data.tokens import join_documents
from switchhead.errors import DataError
from tests.data.corpora import BYTES, IN_ORDER, settings

pytestmark = pytest.mark.usefixtures("small_chunks")


class TestCorpus:
    def test_a_directory_is_training_text_with_its_own_vocabulary(self, jsonl, tmp_path):
        prepared = prepare(settings(jsonl, tokenizer=None, vocab_size=400, held_out=0.1), tmp_path / "out")
        corpus = open_corpus(str(tmp_path / "out"), validation_fraction=0.5)
        assert corpus.vocabulary.size == 400
        assert np.array_equal(corpus.training[:], prepared.tokens("train")[:])
        assert np.array_equal(corpus.validation[:], prepared.tokens("validation")[:])
        assert corpus.validation[:1] == corpus.vocabulary.beginning
        assert corpus.description == {
            "training_tokens": prepared.splits["train"]["tokens"],
            "validation_tokens": prepared.splits["validation"]["tokens"],
            "sha256": corpus.description["sha256"],
            "documents": prepared.splits["train"]["documents"],
            "tokenizer": corpus.vocabulary.fingerprint,
        }

    def test_without_validation_the_tail_is_held_out(self, jsonl, tmp_path):
        prepare(settings(jsonl), tmp_path / "out")
        corpus = open_corpus(str(tmp_path / "out"), validation_fraction=0.1)
        whole = join_documents(IN_ORDER, BYTES)
        cut = len(corpus.training)
        assert len(corpus.validation) == 1 + round(len(whole) / 10)
        assert np.array_equal(corpus.training[:], whole[:cut])
        assert np.array_equal(corpus.validation[1:], whole[cut:])

    def test_other_validation_text_is_read_with_the_directorys_vocabulary(self, jsonl, tmp_path):
        prepare(settings(jsonl, tokenizer=None, vocab_size=400), tmp_path / "out")
        (tmp_path / "valid.txt").write_text("some other text")
        corpus = open_corpus(str(tmp_path / "out"), f"text:{tmp_path}/valid.txt", validation_fraction=0.1)
        assert corpus.vocabulary.decode(corpus.validation[:].tolist()) == "some other text"

    def test_the_identity_changes_with_the_text_and_not_with_the_place(self, jsonl, tmp_path):
        out = tmp_path / "out"
        prepare(settings(jsonl), out)
        first = open_corpus(str(out), validation_fraction=0.1).description
        out.rename(tmp_path / "moved")
        assert open_corpus(str(tmp_path / "moved"), validation_fraction=0.1).description == first
        prepare(settings(jsonl, shuffle=0), tmp_path / "shuffled")
        assert open_corpus(str(tmp_path / "shuffled"), validation_fraction=0.1).description != first

    def test_a_split_is_scored_by_name(self, jsonl, tmp_path):
        (tmp_path / "test.txt").write_text("text for test")
        prepare(settings(jsonl, held_out=0.1, test=f"text:{tmp_path}/test.txt"), tmp_path / "out")
        assert BYTES.decode(load_tokens(f"{tmp_path}/out#test", BYTES)[:].tolist()) == "text for test"
        validation = load_tokens(f"{tmp_path}/out#validation", BYTES)
        assert np.array_equal(load_tokens(f"{tmp_path}/out", BYTES)[:], validation[:])
        with pytest.raises(DataError, match=r"has no split 'tests' \(it has: test, train, validation\); eval takes"):
            load_tokens(f"{tmp_path}/out#tests", BYTES)

    def test_another_tokenizer_than_the_models_is_refused(self, jsonl, tmp_path):
        prepare(settings(jsonl, tokenizer=None, vocab_size=400, held_out=0.1), tmp_path / "out")
        with pytest.raises(DataError, match="out was tokenized with another tokenizer than the model's"):
            load_tokens(f"{tmp_path}/out", BYTES)


class TestDamage:
    @pytest.fixture
    def out(self, jsonl, tmp_path):
        prepare(settings(jsonl, tokenizer=None, vocab_size=400, held_out=0.1), tmp_path / "out")
        return tmp_path / "out"

    @pytest.mark.parametrize("file", ["train-00001.safetensors", "validation-00000.safetensors"])
    def test_a_changed_shard_is_named(self, out, file):
        content = bytearray((out / file).read_bytes())
        content[-11] ^= 4
        (out / file).write_bytes(content)
        with pytest.raises(DataError, match=f"shard .*{file} is damaged, its checksum"):
            open_corpus(str(out), validation_fraction=0.1)
        assert open_corpus(str(out), validation_fraction=0.1, verify=False).vocabulary.size == 400

    def test_a_shard_that_is_cut_off_or_lost_is_named(self, out):
        file = out / "train-00001.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(DataError, match=r"train-00001.safetensors has \d+ bytes instead of \d+"):
            open_corpus(str(out), validation_fraction=0.1, verify=False)
        file.unlink()
        with pytest.raises(DataError, match=r"cannot read shard .*train-00001.safetensors: No such file"):
            open_corpus(str(out), validation_fraction=0.1, verify=False)

    def test_a_tokenizer_that_the_tokens_were_not_made_with_is_refused(self, out):
        BYTES.save(out / "tokenizer")
        with pytest.raises(DataError, match=r"out/tokenizer is not the tokenizer that the tokens of .*out were made"):
            open_corpus(str(out), validation_fraction=0.1)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("{", "manifest.json is not the manifest of a prepared directory"),
            ("[]", "manifest.json is not the manifest of a prepared directory"),
            ('{"format": 2}', "manifest.json has format 2; this version reads 1"),
            ('{"format": 1}', "manifest.json is damaged: it lacks 'settings'"),
            (None, "out is not a prepared directory: it has no manifest.json"),
        ],
    )
    def test_a_bad_manifest_is_one_error(self, out, content, message):
        (out / "manifest.json").unlink()
        if content is not None:
            (out / "manifest.json").write_text(content)
        with pytest.raises(DataError, match=message):
            open_prepared(out)

    def test_an_unfinished_directory_is_refused(self, out):
        manifest = json.loads((out / "manifest.json").read_text())
        (out / "manifest.json").write_text(json.dumps({**manifest, "complete": False}))
        with pytest.raises(DataError, match=r"out is not finished: run its `switchhead prepare` again"):
            open_prepared(out)

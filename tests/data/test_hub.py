"""Sources of the hub, in copies that have its repositories' layouts: the code that reads them is the same."""

import gzip
import hashlib
import io
import json
import urllib.error
import urllib.request
import zipfile

import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
import pytest
from huggingface_hub.hf_api import DatasetInfo
from pyarrow import parquet

from switchhead.data import enwik8, load_vocabulary, open_corpus
from switchhead.data.hub import REPOSITORIES, open_repository
from switchhead.data.prepare import Settings, open_source, prepare
from switchhead.data.sources import read_documents
from switchhead.errors import DataError


def write_gz(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("".join(json.dumps(record) + "\n" for record in records).encode()))


def write_parquet(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), path, row_group_size=3)


@pytest.fixture
def c4(tmp_path):
    root = tmp_path / "c4"
    for n in range(3):
        texts = [f"page {n}.{i}" for i in range(400)]
        records = [{"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "http://a.b"} for text in texts]
        write_gz(root / f"en/c4-train.{n:05d}-of-00003.json.gz", records)
    write_gz(root / "en/c4-validation.00000-of-00001.json.gz", [{"text": "not held out by the paper"}])
    write_gz(root / "realnewslike/c4-train.00000-of-00001.json.gz", [{"text": "another part"}])
    (root / "README.md").write_text("about")
    return root


def documents(source, split="train"):
    return [text for part in source.splits[split] for text in part.read()]


def test_c4_is_its_english_training_files_in_order(c4):
    source = open_source("c4", copy=c4)
    assert list(source.splits) == ["train"]
    assert documents(source) == [f"page {n}.{i}" for n in range(3) for i in range(400)]


def test_c4_holds_out_half_a_percent_and_takes_exactly_the_first_tokens(c4, tmp_path):
    chosen = Settings(source="c4", tokenizer="bytes", limit_tokens=5000)
    prepared = prepare(chosen, tmp_path / "out", copy=c4)
    assert prepared.splits["train"]["tokens"] == 5000
    assert 0 < prepared.splits["validation"]["documents"] < 15


def test_pes2o_is_read_from_its_json_files(tmp_path):
    write_gz(tmp_path / "data/v1/train-00000-of-00001.json.gz", [{"text": "old"}])
    write_gz(tmp_path / "data/v2/validation-00000-of-00001.json.gz", [{"text": "not held out by the paper"}])
    for n in range(2):
        record = {"added": "2023", "created": "2020", "id": str(n), "source": "s2orc/train", "version": "v2"}
        write_gz(tmp_path / f"data/v2/train-{n:05d}-of-00002.json.gz", [{**record, "text": f"paper {n}"}])
    assert documents(open_source("pes2o", copy=tmp_path)) == ["paper 0", "paper 1"]


ARTICLES = [
    " \n = First = \n \n Text , with an equation : \n = not a title = \n 1 . \n \n = = Section = = \n \n More . \n \n",
    " = Second = \n \n Text that goes on \n in the next file . \n \n",
    " = = = \n",
]


def wikitext_rows(text):
    """As the hub has them: a line a row, that of a single space being empty."""
    return ["" if line == " \n" else line for line in text.splitlines(keepends=True)]


@pytest.fixture
def wikitext(tmp_path):
    root = tmp_path / "wikitext"
    rows = wikitext_rows("".join(ARTICLES[:2]))
    directory = root / "wikitext-103-raw-v1"
    write_parquet(directory / "train-00000-of-00002.parquet", text=rows[:-3])
    write_parquet(directory / "train-00001-of-00002.parquet", text=rows[-3:])
    for split in ("validation", "test"):
        write_parquet(directory / f"{split}-00000-of-00001.parquet", text=wikitext_rows(f" \n = {split} = \n words \n"))
    write_parquet(root / "wikitext-2-raw-v1/train-00000-of-00001.parquet", text=["another part"])
    return root


def test_wikitext_is_its_articles_across_files_with_the_original_lines(wikitext):
    source = open_source("wikitext103", copy=wikitext)
    assert documents(source) == ARTICLES[:2]
    assert documents(source, "validation") == [" \n = validation = \n words \n"]


def test_wikitext_keeps_its_own_splits(wikitext, tmp_path):
    prepared = prepare(Settings(source="wikitext103", tokenizer="bytes"), tmp_path / "out", copy=wikitext)
    assert {name: split["documents"] for name, split in prepared.splits.items()} == {
        "test": 1,
        "train": 2,
        "validation": 1,
    }
    held_out = Settings(source="wikitext103", tokenizer="bytes", held_out=0)
    assert "validation" not in prepare(held_out, tmp_path / "held-out", copy=wikitext).splits


def test_the_hubs_files_are_read_by_the_same_code_at_one_revision(c4, tmp_path, monkeypatch):
    asked = []

    def dataset_info(self, repo_id, *, revision=None):
        names = [str(path.relative_to(c4)) for path in c4.rglob("*") if path.is_file()]
        siblings = [{"rfilename": name} for name in names]
        return DatasetInfo(id=repo_id, sha=revision or "newest", siblings=siblings, tags=[])

    def hf_hub_download(repo_id, filename, *, repo_type, revision):
        asked.append((repo_id, filename, repo_type, revision))
        return str(c4 / filename)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    chosen = Settings(source="c4", tokenizer="bytes")
    prepared = prepare(chosen, tmp_path / "fetched")
    copied = prepare(chosen, tmp_path / "copied", copy=c4)
    assert prepared.manifest["revision"] == "newest"
    assert set(asked) == {
        ("allenai/c4", f"en/c4-train.{n:05d}-of-00003.json.gz", "dataset", "newest") for n in range(3)
    }
    assert prepared.splits == copied.splits
    asked.clear()
    assert len(documents(open_repository(REPOSITORIES["c4"], revision="older"))) == 1200
    assert {revision for *_, revision in asked} == {"older"}


def test_any_data_set_of_the_hub_is_read_at_one_revision(tmp_path, monkeypatch):
    asked = []

    def dataset_info(self, repo_id, *, revision=None):
        return DatasetInfo(id=repo_id, sha=revision or "newest", siblings=[], tags=[])

    def get_dataset_split_names(name, config, *, revision):
        asked.append((name, config, revision))
        return ["train"]

    def load_dataset(name, config, *, split, revision, streaming):
        asked.append((name, config, revision))
        return [{"body": f"{revision} {split} {n}"} for n in range(3)]

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "get_dataset_split_names", get_dataset_split_names)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    settings = Settings(source="hf:some/set/part#body", tokenizer="bytes", held_out=0)
    assert prepare(settings, tmp_path / "out").manifest["revision"] == "newest"
    assert set(asked) == {("some/set", "part", "newest")}
    older = open_source("hf:some/set/part#body", revision="older")  # as after a kill
    assert documents(older) == [f"older train {n}" for n in range(3)]


@pytest.mark.parametrize("name", REPOSITORIES)
def test_without_a_network_the_message_says_what_to_fetch_and_how_to_give_it(name, tmp_path):
    with pytest.raises(DataError, match=rf"cannot get {REPOSITORIES[name].name} from the hub .* give --copy DIR"):
        prepare(Settings(source=name), tmp_path / "out")


def test_a_copy_without_the_files_is_named(tmp_path):
    with pytest.raises(DataError, match=r"has no file en/c4-train\.\*\.json\.gz: is it a copy of allenai/c4\?"):
        open_source("c4", copy=tmp_path)
    with pytest.raises(DataError, match="a copy can be read of c4, pes2o, wikitext103 and enwik8, not of text:x"):
        open_source("text:x", copy=tmp_path)


class TestDatasets:
    def test_a_dataset_is_streamed_with_its_own_splits(self, tmp_path):
        for split in ("train", "validation"):
            write_parquet(tmp_path / f"set/{split}.parquet", body=[f"{split} {i}" for i in range(5)], number=range(5))
        source = open_source(f"hf:{tmp_path}/set#body")
        assert documents(source) == [f"train {i}" for i in range(5)]
        assert documents(source, "validation") == [f"validation {i}" for i in range(5)]

    def test_json_lines_are_streamed_too(self, tmp_path):
        write_gz(tmp_path / "set/train.json.gz", [{"text": "one"}, {"text": "two"}])
        assert documents(open_source(f"hf:{tmp_path}/set#text")) == ["one", "two"]

    def test_a_missing_column_is_named(self, tmp_path):
        write_parquet(tmp_path / "set/train.parquet", body=["a"])
        with pytest.raises(DataError, match=r"train, row 0 has no text column 'text' \(it has: body\)"):
            documents(open_source(f"hf:{tmp_path}/set#text"))
        with pytest.raises(DataError, match="names no column: expected hf:NAME/CONFIG#column"):
            open_source("hf:allenai/c4/en")

    def test_a_directory_that_is_no_dataset_is_named(self, tmp_path):
        (tmp_path / "notes.xyz").write_text("")
        with pytest.raises(DataError, match="is no data set that `datasets` can read"):
            open_source(f"hf:{tmp_path}#text")

    def test_without_a_network_a_local_copy_is_the_way(self):
        with pytest.raises(
            DataError, match=r"cannot get hf:allenai/c4/en#text .* read a local copy, hf:DIRECTORY#text"
        ):
            open_source("hf:allenai/c4/en#text")


class TestParquet:
    def test_files_are_read_row_by_row_in_the_order_of_their_names(self, tmp_path):
        write_parquet(tmp_path / "b.parquet", text=["five"])
        write_parquet(tmp_path / "a.parquet", number=range(5), text=["one", "", "two", "three", "four"])
        assert list(read_documents(f"parquet:{tmp_path}/*.parquet#text")) == ["one", "two", "three", "four", "five"]

    def test_text_that_is_not_utf8_is_named(self, tmp_path):
        raw = pa.array([b"one", b"\xff"]).buffers()
        parquet.write_table(pa.table({"text": pa.StringArray.from_buffers(2, *raw[1:])}), tmp_path / "a.parquet")
        with pytest.raises(DataError, match=r"a.parquet' is not UTF-8 in column 'text', near row 0"):
            list(read_documents(f"parquet:{tmp_path}/a.parquet#text"))

    @pytest.mark.parametrize(
        ("column", "message"),
        [
            ("texts", r"has no column 'texts' \(it has: text, number\)"),
            ("number", "row 0 of column 'number' is no text"),
            ("text", "row 1 of column 'text' is no text"),
        ],
    )
    def test_a_row_that_is_no_text_is_named(self, tmp_path, column, message):
        write_parquet(tmp_path / "a.parquet", text=["one", None], number=[1, 2])
        with pytest.raises(DataError, match=message):
            list(read_documents(f"parquet:{tmp_path}/a.parquet#{column}"))

    def test_a_damaged_file_is_named(self, tmp_path):
        write_parquet(tmp_path / "a.parquet", text=["one"] * 100)
        (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
        with pytest.raises(DataError, match=r"a.parquet' is no Parquet file, or damaged"):
            list(read_documents(f"parquet:{tmp_path}/a.parquet#text"))


class TestEnwik8:
    RAW = "<page>naïve</page>\n".encode() * 100
    LENGTHS = {"train": 1807, "validation": 97, "test": 96}  # noqa: RUF012 (a constant; cuts characters in half)

    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch):
        monkeypatch.setattr(enwik8, "SHA256", hashlib.sha256(self.RAW).hexdigest())
        monkeypatch.setattr(enwik8, "SPLIT", self.LENGTHS)

    def archive(self, path):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("enwik8", self.RAW)
        return path

    @pytest.mark.parametrize("form", ["enwik8.zip", "enwik8", "directory"])
    def test_its_bytes_are_numbered_and_split_in_order(self, tmp_path, form):
        copy = tmp_path if form == "directory" else tmp_path / form
        if form == "enwik8":
            copy.write_bytes(self.RAW)
        else:
            self.archive(tmp_path / "enwik8.zip")
        prepared = prepare(Settings(source="enwik8"), tmp_path / "out", copy=copy)
        values = sorted(set(self.RAW))
        raw = np.frombuffer(self.RAW, dtype=np.uint8)
        whole = np.concatenate([prepared.tokens(split)[:] for split in self.LENGTHS])
        assert np.array_equal(np.array(values)[whole], raw)
        assert {name: split["tokens"] for name, split in prepared.splits.items()} == self.LENGTHS
        corpus = open_corpus(str(tmp_path / "out"), validation_fraction=0.1)
        assert corpus.vocabulary.beginning is None
        assert corpus.vocabulary.size == len(values)
        assert load_vocabulary(tmp_path / "out/tokenizer").values == bytes(values)

    def test_it_is_fetched_and_the_archive_not_kept(self, tmp_path, monkeypatch):
        content = self.archive(tmp_path / "served.zip").open("rb")
        monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: content)
        prepare(Settings(source="enwik8"), tmp_path / "out")
        assert not list((tmp_path / "out").glob("*.zip*"))

    def test_a_fetched_archive_that_is_damaged_is_fetched_again(self, tmp_path, monkeypatch):
        content = self.archive(tmp_path / "served.zip").read_bytes()
        damaged = bytearray(content)
        damaged[60:90] = bytes(30)
        served = [content[: len(content) // 2], bytes(damaged), content]
        monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: io.BytesIO(served.pop(0)))
        for _ in range(2):
            with pytest.raises(DataError, match=r"is not Enwik8|cannot read Enwik8 from .*enwik8\.zip"):
                prepare(Settings(source="enwik8"), tmp_path / "out")
        prepare(Settings(source="enwik8"), tmp_path / "out")

    def test_something_else_is_refused(self, tmp_path):
        (tmp_path / "enwik8").write_bytes(self.RAW[:-1])
        with pytest.raises(DataError, match=r"enwik8 is not Enwik8 \(1,999 bytes, of another checksum\)"):
            prepare(Settings(source="enwik8"), tmp_path / "out", copy=tmp_path)
        with pytest.raises(DataError, match=r"holds neither enwik8\.zip nor enwik8"):
            prepare(Settings(source="enwik8"), tmp_path / "out", copy=tmp_path / "out")
        with pytest.raises(DataError, match="no setting applies to it"):
            prepare(Settings(source="enwik8", shuffle=1), tmp_path / "other", copy=tmp_path)

    def test_without_a_network_the_message_says_what_to_fetch(self, tmp_path, monkeypatch):
        def urlopen(url, timeout):
            raise urllib.error.URLError("Name or service not known")

        monkeypatch.setattr(urllib.request, "urlopen", urlopen)
        with pytest.raises(DataError, match=r"cannot fetch http://.*/enwik8.zip .* give --copy enwik8.zip"):
            prepare(Settings(source="enwik8"), tmp_path / "out")


def test_the_published_splits_of_enwik8_are_of_its_size():
    values, parts = enwik8.split_bytes(bytes(range(10)) * 10, {"train": 90, "validation": 5, "test": 5})
    assert values == bytes(range(10))
    assert [len(part) for part in parts.values()] == [90, 5, 5]
    assert sum(enwik8.SPLIT.values()) == 100_000_000


def test_an_unknown_source_is_told_the_known_ones():
    with pytest.raises(DataError, match=r"cannot read data 'c5': expected text:.* c4, pes2o, wikitext103, enwik8, hf:"):
        open_source("c5")

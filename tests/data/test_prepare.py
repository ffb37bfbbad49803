import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from switchhead.data import ByteVocabulary, load_vocabulary
from switchhead.data.bpe import train_bpe
from switchhead.data.prepare import prepare
from switchhead.data.sources import _READERS, read_jsonl
from switchhead.data.tokens import join_documents
from switchhead.data.vocabulary import documents_of
from switchhead.data.writer import Writer
from switchhead.errors import DataError
from tests.data.corpora import BYTES, DOCUMENTS, IN_ORDER, contents, settings, texts

pytestmark = pytest.mark.usefixtures("small_chunks")


def test_the_tokens_are_those_of_the_documents_in_order(jsonl, tmp_path):
    prepared = prepare(settings(jsonl), tmp_path / "out")
    tokens = prepared.tokens("train")
    assert np.array_equal(tokens[:], join_documents(IN_ORDER, BYTES))
    split = prepared.splits["train"]
    assert len(split["shards"]) > 5
    assert split["documents"] == sum(shard["documents"] for shard in split["shards"]) == len(DOCUMENTS)
    assert split["tokens"] == sum(shard["tokens"] for shard in split["shards"]) == len(tokens)
    assert split["bytes"] == sum(len(text.encode()) for text in DOCUMENTS)


def test_a_tokenizer_is_trained_on_the_training_documents(jsonl, tmp_path):
    prepared = prepare(settings(jsonl, tokenizer=None, vocab_size=500, held_out=0.2), tmp_path / "out")
    vocabulary = load_vocabulary(tmp_path / "out/tokenizer", size=500)
    assert prepared.manifest["tokenizer"] == {"size": 500, "beginning": 1, "sha256": vocabulary.fingerprint}
    decoded = {
        split: [vocabulary.decode(part.tolist()) for part in documents_of(prepared.tokens(split)[:], 1)]
        for split in ("train", "validation")
    }
    assert sorted(decoded["train"] + decoded["validation"]) == sorted(DOCUMENTS)
    assert train_bpe(decoded["train"], 500).fingerprint == vocabulary.fingerprint


def test_another_tokenizer_can_be_given(jsonl, tmp_path):
    first = prepare(settings(jsonl, tokenizer=None, vocab_size=400), tmp_path / "first")
    second = prepare(settings(jsonl, tokenizer=str(tmp_path / "first/tokenizer")), tmp_path / "second")
    assert second.manifest["tokenizer"] == first.manifest["tokenizer"]
    assert np.array_equal(second.tokens("train")[:], first.tokens("train")[:])


class TestSplits:
    def test_a_documents_text_decides_whether_it_is_held_out(self, tmp_path):
        (tmp_path / "a.jsonl").write_text("".join(json.dumps({"t": f"document {i % 500}"}) + "\n" for i in range(2000)))
        prepared = prepare(settings(f"jsonl:{tmp_path}/a.jsonl#t", held_out=0.1), tmp_path / "out")
        train, validation = Counter(texts(prepared)), Counter(texts(prepared, "validation"))
        assert not train & validation
        assert train + validation == Counter({f"document {i}": 4 for i in range(500)})
        assert 0.05 < len(validation) / 500 < 0.15

    def test_half_a_percent_is_held_out_unless_said_otherwise(self, tmp_path):
        (tmp_path / "a.jsonl").write_text("".join(json.dumps({"t": f"document {i}"}) + "\n" for i in range(20_000)))
        prepared = prepare(settings(f"jsonl:{tmp_path}/a.jsonl#t", held_out=None), tmp_path / "out")
        assert 70 < prepared.splits["validation"]["documents"] < 130

    def test_text_can_be_given_for_validation_and_test(self, jsonl, tmp_path):
        for name in ("valid", "test"):
            (tmp_path / f"{name}.txt").write_text(f"text for {name}")
        given = {name: f"text:{tmp_path}/{name}.txt" for name in ("valid", "test")}
        prepared = prepare(settings(jsonl, held_out=None, **given), tmp_path / "out")
        assert texts(prepared, "validation") == ["text for valid"]
        assert texts(prepared, "test") == ["text for test"]
        assert texts(prepared) == IN_ORDER

    def test_no_document_held_out_is_an_error_with_the_ways_out(self, tmp_path):
        (tmp_path / "a.txt").write_text("one document")
        with pytest.raises(DataError, match=r"no document of text:.* has come out for validation: .* hold out 0"):
            prepare(settings(f"text:{tmp_path}/a.txt", held_out=None), tmp_path / "out")
        assert not list((tmp_path / "out").iterdir())  # known before any work, which other settings could not use

    def test_a_limit_reached_before_a_document_is_held_out_asks_for_another_directory(self, tmp_path):
        (tmp_path / "a.jsonl").write_text("".join(json.dumps({"t": f"document {i}"}) + "\n" for i in range(20_000)))
        with pytest.raises(DataError, match="come out for validation: into another directory, hold out a larger part"):
            prepare(settings(f"jsonl:{tmp_path}/a.jsonl#t", held_out=1e-3, limit_tokens=1), tmp_path / "out")

    @pytest.mark.parametrize("name", ["valid", "test"])
    def test_text_that_is_given_and_empty_is_named_before_any_work(self, jsonl, tmp_path, name):
        (tmp_path / "empty.txt").write_text("")
        given = {"held_out": None, name: f"text:{tmp_path}/empty.txt"}
        with pytest.raises(DataError, match=r"text:.*empty\.txt holds no text"):
            prepare(settings(jsonl, **given), tmp_path / "out")
        assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("changes", [{}, {"shuffle": 0}, {"held_out": None}, {"tokenizer": None}])
def test_a_source_without_text_is_an_error(tmp_path, changes):
    (tmp_path / "a.jsonl").write_text('{"t": ""}\n')
    with pytest.raises(DataError, match=r"jsonl:.*#t holds no text|there is no text"):
        prepare(settings(f"jsonl:{tmp_path}/a.jsonl#t", **changes), tmp_path / "out")


class TestLimitAndOrder:
    @pytest.mark.parametrize("limit", [1, 50_000, 123_456])
    def test_the_first_tokens_are_exactly_so_many(self, jsonl, tmp_path, limit):
        prepared = prepare(settings(jsonl, limit_tokens=limit), tmp_path / "out")
        assert np.array_equal(prepared.tokens("train")[:], join_documents(IN_ORDER, BYTES)[:limit])

    def test_a_limit_beyond_the_text_is_an_error(self, jsonl, tmp_path):
        with pytest.raises(DataError, match=r"has [\d,]+ training tokens, fewer than limit_tokens = 9,000,000"):
            prepare(settings(jsonl, limit_tokens=9_000_000), tmp_path / "out")

    def test_shuffling_puts_the_same_documents_in_an_order_that_the_seed_decides(self, jsonl, tmp_path):
        one, again, two = (
            texts(prepare(settings(jsonl, shuffle=seed), tmp_path / name))
            for name, seed in (("one", 1), ("again", 1), ("two", 2))
        )
        assert Counter(one) == Counter(two) == Counter(DOCUMENTS)
        assert one == again
        assert one != two
        assert one != IN_ORDER
        assert not list((tmp_path / "one").glob("unshuffled*"))

    def test_a_limit_applies_to_the_shuffled_documents(self, jsonl, tmp_path):
        whole = prepare(settings(jsonl, shuffle=1), tmp_path / "whole").tokens("train")
        limited = prepare(settings(jsonl, shuffle=1, limit_tokens=200_001), tmp_path / "limited").tokens("train")
        assert np.array_equal(limited[:], whole[:200_001])


def children_of(process):
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


VARIANTS = {
    "plain": {},
    "held out and limited": {"held_out": 0.1, "limit_tokens": 300_000},
    "shuffled": {"shuffle": 3, "limit_tokens": 400_000},
    "tokenizer": {"tokenizer": None, "vocab_size": 400, "shard_tokens": 20_000},
}


class TestInterruptions:
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_killed_at_any_write_it_goes_on_to_the_same_bytes(self, jsonl, tmp_path, monkeypatch, variant):
        chosen = settings(jsonl, **VARIANTS[variant])
        prepare(chosen, tmp_path / "whole")
        replace, random = os.replace, np.random.default_rng(0)
        left = [0]

        def die_now_and_then(*args):
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            replace(*args)

        monkeypatch.setattr(os, "replace", die_now_and_then)
        for _ in range(100):
            left[0] = int(random.integers(9))  # writes until the next death
            try:
                prepare(chosen, tmp_path / "often")
            except KeyboardInterrupt:
                continue
            break
        assert contents(tmp_path / "often") == contents(tmp_path / "whole")

    def test_killed_behind_the_shard_that_reaches_the_limit_it_reads_no_further(self, jsonl, tmp_path, monkeypatch):
        chosen = settings(jsonl, held_out=0.5, limit_tokens=20_000, shard_tokens=1)  # every chunk is a shard
        prepare(chosen, tmp_path / "whole")

        def die(self):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Writer, "end", die)
            with pytest.raises(KeyboardInterrupt):
                prepare(chosen, tmp_path / "out")
        prepare(chosen, tmp_path / "out")
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")

    @pytest.mark.slow
    def test_a_kill_leaves_no_process_behind_and_the_next_call_goes_on(self, jsonl, tmp_path):
        chosen = settings(jsonl, shard_tokens=10_000, shuffle=0)  # many shards: time enough to kill it in between
        script = tmp_path / "script.py"
        script.write_text(f"""
from switchhead.data import encoding
from switchhead.data.prepare import Settings, prepare
encoding.CHUNK = 5000
if __name__ == "__main__":
    prepare({chosen!r}, "{tmp_path}/out", processes=2)
""")
        process = subprocess.Popen([sys.executable, str(script)])
        while not (tmp_path / "out/unshuffled-00004.safetensors").exists():
            assert process.poll() is None
            time.sleep(0.001)
        workers = [int(child) for child in children_of(process.pid)]
        assert len(workers) >= 2
        process.kill()
        process.wait()
        assert not json.loads((tmp_path / "out/manifest.json").read_text())["complete"]
        deadline = time.monotonic() + 30
        while any(is_running(worker) for worker in workers):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        prepare(chosen, tmp_path / "out")
        prepare(chosen, tmp_path / "whole")
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")

    def test_files_that_were_read_are_not_read_again(self, jsonl, tmp_path, monkeypatch):
        read = []

        def reader(path, field):
            read.append(path[-7:])
            yield from read_jsonl(path, field)

        def stop_in_the_last_file(progress):
            if progress.part == 3:
                raise KeyboardInterrupt

        monkeypatch.setitem(_READERS, "jsonl", reader)
        with pytest.raises(KeyboardInterrupt):
            prepare(settings(jsonl), tmp_path / "out", progress=stop_in_the_last_file)
        assert read == ["0.jsonl", "1.jsonl", "2.jsonl"]
        read.clear()
        assert texts(prepare(settings(jsonl), tmp_path / "out")) == IN_ORDER
        assert read[-1] == "2.jsonl"
        assert "0.jsonl" not in read

    def test_a_finished_directory_is_verified_and_left_as_it_is(self, jsonl, tmp_path):
        prepare(settings(jsonl), tmp_path / "out")
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        prepare(settings(jsonl), tmp_path / "out")
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before

    def test_other_settings_are_refused_with_the_differences(self, jsonl, tmp_path):
        prepare(settings(jsonl), tmp_path / "out")
        with pytest.raises(DataError, match=r"other settings \(shuffle is None there and 1 here\): choose another"):
            prepare(settings(jsonl, shuffle=1), tmp_path / "out")


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_work_with_one_error(jsonl, tmp_path):
    chosen = settings(jsonl, shard_tokens=10_000)

    def kill_workers(progress):
        for child in multiprocessing.active_children():
            child.kill()

    with pytest.raises(DataError, match=r"a process that encodes text was killed, .* with fewer processes"):
        prepare(chosen, tmp_path / "out", processes=2, progress=lambda p: kill_workers(p) if p.tokens else None)
    assert prepare(chosen, tmp_path / "out").tokens("train")[:].tolist() == join_documents(IN_ORDER, BYTES).tolist()


@pytest.mark.slow
def test_any_number_of_processes_makes_the_same_bytes(jsonl, tmp_path):
    chosen = settings(jsonl, tokenizer=None, vocab_size=400, held_out=0.1, shuffle=0)
    prepare(chosen, tmp_path / "one", processes=1)
    prepare(chosen, tmp_path / "two", processes=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


class TestPlaces:
    def test_a_full_disk_is_one_error_and_what_was_written_serves_later(self, jsonl, tmp_path, monkeypatch):
        prepare(settings(jsonl), tmp_path / "whole")
        fsync, calls = os.fsync, []

        def full_after_six(file):
            calls.append(file)
            if len(calls) > 6:
                raise OSError(28, "No space left on device")
            fsync(file)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full_after_six)
            with pytest.raises(DataError, match=r"cannot write .*: No space left on device\. .* run the same command"):
                prepare(settings(jsonl), tmp_path / "out")
        prepare(settings(jsonl), tmp_path / "out")
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")

    def test_a_place_that_cannot_be_written_is_one_error(self, jsonl, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        with pytest.raises(DataError, match=r"cannot make directory .*file/out: Not a directory"):
            prepare(settings(jsonl), tmp_path / "file/out")

        def read_only(self, directory):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(ByteVocabulary, "save", read_only)
        with pytest.raises(DataError, match=r"cannot write .*out/tokenizer: Permission denied"):
            prepare(settings(jsonl), tmp_path / "out")

    def test_a_directory_with_something_else_is_refused(self, jsonl, tmp_path):
        (tmp_path / "thesis.tex").write_text("")
        with pytest.raises(DataError, match=r"is not empty \(it holds 'thesis.tex'\): choose another directory"):
            prepare(settings(jsonl), tmp_path)

    def test_files_of_others_stay(self, jsonl, tmp_path):
        prepare(settings(jsonl), tmp_path / "out")
        for name in ("model.safetensors", "train-99999.safetensors", "train-99999.safetensors.tmp"):
            (tmp_path / "out" / name).write_text("")
        prepare(settings(jsonl), tmp_path / "out")
        names = {path.name for path in (tmp_path / "out").iterdir()}
        assert "model.safetensors" in names
        assert not any("99999" in name for name in names)

    def test_two_calls_do_not_write_one_directory(self, jsonl, tmp_path):
        def again(_):
            with pytest.raises(DataError, match="another process is preparing"):
                prepare(settings(jsonl), tmp_path / "out")

        prepare(settings(jsonl), tmp_path / "out", progress=again)

    def test_files_that_came_or_went_between_two_calls_are_noticed(self, jsonl, tmp_path, monkeypatch):
        (tmp_path / "a.txt").write_text("text " * 20_000)
        (tmp_path / "b.txt").write_text("text " * 20_000)
        chosen = settings(f"text:{tmp_path}/*.txt")

        def stop(progress):
            if progress.tokens:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            prepare(chosen, tmp_path / "out", progress=stop)
        (tmp_path / "c.txt").write_text("more")
        with pytest.raises(DataError, match=r"had 2 files and has 3 now"):
            prepare(chosen, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"held_out": 1.0}, "held_out is 1.0; it must be at least 0 and below 1"),
        ({"valid": "text:x"}, "held_out and valid exclude each other"),
        ({"vocab_size": 200}, "vocab_size is 200; it must be at least 300"),
        ({"limit_tokens": 0}, "limit_tokens is 0; it must be at least 1"),
        ({"shuffle": -1}, "shuffle is -1; a seed must be 0 or more"),
    ],
)
def test_a_setting_out_of_range_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        settings("text:x", **change)

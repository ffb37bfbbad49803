import gzip
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from switchhead.errors import DataError
from switchhead.eval import (
    Settings,
    blimp,
    evaluate_blimp,
    evaluate_cbt,
    evaluate_lambada,
    evaluate_tasks,
    lambada,
    score_continuations,
)
from switchhead.eval.examples import load_examples
from switchhead.eval.lambada import STANDARD
from switchhead.eval.likelihood import encode_request
from tests.eval.conftest import DATA

FULL = Path(__file__).parents[3] / "shared" / "data"
PAIR = {"sentence_good": "a b", "sentence_bad": "b a", "UID": "p", "field": "f", "linguistics_term": "t"}
QUESTION = {"sentences": ["A cat."], "question": "A XXXXX .", "answer": "cat", "options": ["cat", "dog"]}
EVALUATE = {
    "blimp": (evaluate_blimp, PAIR),
    "lambada_test": (evaluate_lambada, {"text": "one two three"}),
    "cbt_cn": (evaluate_cbt, QUESTION),
}


@pytest.fixture
def model(make_model, language_model):
    return language_model(make_model(max_position_embeddings=1024))


def write(path, *records):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))


def read(name):
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def log_likelihoods(model, *texts):
    requests = [encode_request(model.vocabulary, *text) for text in texts]
    return [likelihood.log_likelihood for likelihood in score_continuations(model.model, requests)]


def test_blimp_averages_over_paradigms_and_these_over_terms_and_fields(model):
    correct = {}
    for line in read("blimp.jsonl"):
        good, bad = log_likelihoods(model, ("", line["sentence_good"]), ("", line["sentence_bad"]))
        correct.setdefault((line["field"], line["linguistics_term"], line["paradigm"]), []).append(good > bad)
    shares = {key: sum(values) / len(values) for key, values in correct.items()}
    result = evaluate_blimp(model, task_data=DATA)
    assert result.scores["accuracy"].value == pytest.approx(sum(shares.values()) / len(shares))
    assert {name: score.value for name, score in result.details["paradigm"].items()} == pytest.approx(
        {key[2]: share for key, share in shares.items()}
    )
    morphology = [share for key, share in shares.items() if key[0] == "morphology"]
    assert result.details["field"]["morphology"].value == pytest.approx(sum(morphology) / len(morphology))
    assert result.details["term"].keys() == {key[1] for key in shares}
    assert result.examples == 20


def test_lambada_scores_the_last_word_with_the_space_before_it(model):
    for form, name in ((None, "lambada_test.jsonl"), (STANDARD, "lambada_test_plain.jsonl")):
        texts = [line["text"].rpartition(" ") for line in read(name)]
        values = log_likelihoods(model, *((context, " " + word) for context, _, word in texts))
        result = evaluate_lambada(model, **({} if form is None else {"form": form}), task_data=DATA)
        assert result.scores["perplexity"].value == pytest.approx(pow(2.718281828459045, -sum(values) / len(values)))
        assert (result.examples, result.cut) == (6, 0)


def test_cbt_scores_whole_sentences_with_each_option_in_its_place(model):
    for name, kind in (("cbt_cn.jsonl", "common nouns"), ("cbt_ne.jsonl", "named entities")):
        correct = []
        for line in read(name):
            context = " ".join(line["sentences"])
            texts = [(context, " " + line["question"].replace("XXXXX", option)) for option in line["options"]]
            values = log_likelihoods(model, *texts)
            correct.append(line["options"][values.index(max(values))] == line["answer"])
        details = evaluate_cbt(model, task_data=DATA).details["kind"]
        assert details[kind].value == pytest.approx(sum(correct) / len(correct))


def test_all_options_of_a_question_lose_the_same_context(make_model, language_model, tmp_path):
    write(tmp_path / "cbt_cn.jsonl", {**QUESTION, "sentences": ["Once upon a time."], "options": ["cat", "elephant"]})
    seen = []
    model = make_model(max_position_embeddings=24)
    model.register_forward_pre_hook(lambda _, __, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True)
    result = evaluate_cbt(language_model(model), task_data=tmp_path)
    assert result.cut == 1
    (inputs,) = seen  # " A elephant ." is 13 bytes, of which 12 are read, after 12 of the context
    assert [bytes(row).rstrip(b"\0") for row in inputs.tolist()] == [
        b"upon a time. A elephant ",
        b"upon a time. A cat ",
    ]


def test_data_is_the_same_compressed_or_in_several_files(model, tmp_path):
    plain = evaluate_blimp(model, task_data=DATA)
    with gzip.open(tmp_path / "blimp.jsonl.gz", "wb") as file:
        file.write((DATA / "blimp.jsonl").read_bytes())
    packed = evaluate_blimp(model, task_data=tmp_path)
    (tmp_path / "many" / "blimp").mkdir(parents=True)
    records = read("blimp.jsonl")
    write(tmp_path / "many" / "blimp" / "1.jsonl", *records[:7])
    write(tmp_path / "many" / "blimp" / "2.jsonl", *records[7:])
    split = evaluate_blimp(model, task_data=tmp_path / "many")
    assert plain.data_sha256 == packed.data_sha256 == split.data_sha256
    assert plain.scores == packed.scores == split.scores


def test_a_limit_takes_the_first_examples_of_each_group(model):
    assert evaluate_blimp(model, task_data=DATA, limit=2).examples == 12
    assert evaluate_cbt(model, task_data=DATA, limit=1).examples == 2
    assert evaluate_lambada(model, task_data=DATA, limit=2).examples == 2


def test_tasks_run_in_order_with_every_form_that_there_is_data_for(model, tmp_path):
    shutil.copy(DATA / "blimp.jsonl", tmp_path)
    shutil.copy(DATA / "lambada_test_plain.jsonl", tmp_path)
    settings = Settings(data=f"jsonl:{DATA}/lambada_test.jsonl#text", task_data=tmp_path)
    results = list(evaluate_tasks(model, ["blimp", "lambada", "perplexity"], settings))
    assert [result.task for result in results] == ["blimp", "lambada_standard", "perplexity"]
    assert results[2].scores.keys() == {
        "loss", "perplexity", "word_perplexity", "bits_per_byte", "bits_per_character"
    }  # fmt: skip
    json.dumps([result.as_json() for result in results], allow_nan=False)


@pytest.mark.parametrize(
    ("stem", "change", "message"),
    [
        ("blimp", {"sentence_bad": None}, "field 'sentence_bad' is no text, or an empty one: null"),
        ("blimp", {"sentence_good": "  "}, "field 'sentence_good' is no text, or an empty one: \"  \""),
        ("lambada_test", {"text": 3}, "field 'text' is no text, or an empty one: 3"),
        ("lambada_test", {"text": "alone"}, "one word only"),
        ("cbt_cn", {"options": []}, "'options' is no list of texts, or an empty one"),
        ("cbt_cn", {"options": ["cat", ""]}, "'options' has an empty text, number 2 of 2"),
        ("cbt_cn", {"options": ["cat", "cat"]}, "'cat' is the only option"),
        ("blimp", {"field": "g"}, "the field of paradigm 'p' is 'g' here, and 'f' before"),
        ("blimp", {"linguistics_term": "u"}, "the term of paradigm 'p' is 'u' here, and 't' before"),
        ("blimp", {"UID": "\ud800"}, "half a surrogate pair"),
        ("cbt_cn", {"options": ["cat", "\ud800"]}, "half a surrogate pair"),
        ("cbt_cn", {"answer": "cow"}, "the answer 'cow' is not among the options"),
        ("cbt_cn", {"question": "A cat ."}, "0 blanks XXXXX"),
        ("cbt_cn", {"sentences": "A cat."}, "'sentences' is no list"),
    ],
)
def test_a_faulty_example_is_named_by_file_and_line(model, tmp_path, stem, change, message):
    evaluate, record = EVALUATE[stem]
    write(tmp_path / f"{stem}.jsonl", record, "", {**record, **change})
    with pytest.raises(DataError, match=rf"{stem}\.jsonl:3:? .*{message}|{stem}\.jsonl:3 {message}"):
        evaluate(model, task_data=tmp_path)


def test_a_missing_field_is_named_with_those_that_are_there(model, tmp_path):
    write(tmp_path / "blimp.jsonl", PAIR, {"sentence_good": "a", "field": "f"})
    with pytest.raises(DataError, match=r"blimp\.jsonl:2 has no field 'sentence_bad' \(it has: field, sentence_good\)"):
        evaluate_blimp(model, task_data=tmp_path)


def test_a_line_that_is_not_utf8_is_named(model, tmp_path):
    (tmp_path / "blimp.jsonl").write_bytes(json.dumps(PAIR).encode() + b"\n\xff\xfe\n")
    with pytest.raises(DataError, match=r"blimp\.jsonl:2 is not UTF-8"):
        evaluate_blimp(model, task_data=tmp_path)


def test_a_file_may_begin_with_a_byte_order_mark(model, tmp_path):
    write(tmp_path / "blimp.jsonl", PAIR)
    expected = evaluate_blimp(model, task_data=tmp_path)
    content = (tmp_path / "blimp.jsonl").read_bytes()
    (tmp_path / "blimp.jsonl").write_bytes(b"\xef\xbb\xbf" + content)
    assert evaluate_blimp(model, task_data=tmp_path).data_sha256 == expected.data_sha256


@pytest.mark.parametrize(("line", "message"), [("{", "is not JSON"), ("[1]", "is list, not an object")])
def test_a_line_that_is_no_record_is_named(model, tmp_path, line, message):
    write(tmp_path / "blimp.jsonl", PAIR, line)
    with pytest.raises(DataError, match=rf"blimp\.jsonl:2 {message}"):
        evaluate_blimp(model, task_data=tmp_path)


def test_a_sentence_that_tokenises_to_nothing_is_named(model, vocabulary, tmp_path):
    write(tmp_path / "blimp.jsonl", PAIR, {**PAIR, "sentence_bad": "d"})
    vocabulary.encode = lambda text: type(vocabulary).encode(vocabulary, text.replace("d", ""))
    with pytest.raises(DataError, match=r"blimp\.jsonl:2: 'd' tokenises to nothing"):
        evaluate_blimp(model, task_data=tmp_path)


def test_sentences_longer_than_the_model_are_scored_and_counted(make_model, language_model, tmp_path):
    write(tmp_path / "blimp.jsonl", PAIR, {**PAIR, "sentence_bad": "a b c d e"})
    assert evaluate_blimp(language_model(make_model()), task_data=tmp_path).cut == 1  # 9 bytes, of which it reads 8


def test_missing_data_says_what_is_expected_where(model, tmp_path):
    with pytest.raises(DataError, match=r"has no blimp\.jsonl"):
        evaluate_blimp(model, task_data=tmp_path)
    with pytest.raises(DataError, match=r"has no cbt_cn\.jsonl or cbt_ne\.jsonl"):
        evaluate_cbt(model, task_data=tmp_path)
    with pytest.raises(DataError, match=r"has no lambada_test\.jsonl or lambada_test_plain\.jsonl"):
        list(evaluate_tasks(model, ["lambada"], Settings(task_data=tmp_path)))
    (tmp_path / "blimp.jsonl").write_text("\n")
    with pytest.raises(DataError, match="holds no examples"):
        evaluate_blimp(model, task_data=tmp_path)


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the hub: rows by name and configuration, and what was asked for."""
    rows, asked = {}, []
    config = SimpleNamespace(HF_HUB_OFFLINE=False)

    def load_dataset(name, configuration, split):
        asked.append((name, configuration, split, config.HF_HUB_OFFLINE))
        if (name, configuration) not in rows:
            raise ConnectionError("Couldn't reach the Hub\nat all")
        return rows[name, configuration]

    module = ModuleType("datasets")
    vars(module).update(
        config=config,
        load_dataset=load_dataset,
        get_dataset_config_names=lambda name: [configuration for known, configuration in rows if known == name],
    )
    monkeypatch.setitem(sys.modules, "datasets", module)
    return rows, asked


def test_without_local_data_examples_come_from_the_hub(model, hub):
    rows, asked = hub
    for line in read("blimp.jsonl"):
        rows.setdefault(("nyu-mll/blimp", line["paradigm"]), []).append({**line, "UID": line["paradigm"]})
    local, fetched = evaluate_blimp(model, task_data=DATA), evaluate_blimp(model)
    assert (fetched.scores, fetched.data_sha256) == (local.scores, local.data_sha256)
    assert ("nyu-mll/blimp", "island_wh", "train", False) in asked

    rows["cam-cst/cbt", "CN"], rows["cam-cst/cbt", "NE"] = read("cbt_cn.jsonl"), read("cbt_ne.jsonl")
    assert evaluate_cbt(model).scores == evaluate_cbt(model, task_data=DATA).scores
    rows["EleutherAI/lambada_openai", "default"] = read("lambada_test.jsonl")
    rows["cimec/lambada", "plain_text"] = read("lambada_test_plain.jsonl")
    results = list(evaluate_tasks(model, ["lambada"], Settings()))
    assert [result.scores for result in results] == [
        evaluate_lambada(model, task_data=DATA).scores,
        evaluate_lambada(model, STANDARD, task_data=DATA).scores,
    ]


def test_without_a_network_the_local_alternative_is_named(model, hub):
    with pytest.raises(
        DataError, match=r"cannot fetch .*lambada_openai .*Couldn't reach.*put lambada_test\.jsonl into"
    ):
        evaluate_lambada(model)


class ConnectError(Exception):
    """As the hub's library calls a connection that does not come about."""


class ReadTimeout(Exception):
    """As it calls an answer that does not come in time."""


@pytest.mark.parametrize(("error", "from_cache"), [(ConnectError("no route"), True), (ReadTimeout("slow"), False)])
def test_what_was_fetched_is_read_without_a_network_and_a_slow_one_is_waited_for(
    model, hub, monkeypatch, error, from_cache
):
    def model_info(self, name, timeout):
        raise error

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    rows, asked = hub
    rows["EleutherAI/lambada_openai", "default"] = read("lambada_test.jsonl")
    assert evaluate_lambada(model).scores == evaluate_lambada(model, task_data=DATA).scores
    with pytest.raises(DataError, match=rf"cannot fetch cam-cst/cbt .*{'no route' if from_cache else 'reach'}"):
        evaluate_cbt(model)
    assert [is_offline for *_, is_offline in asked] == [from_cache] * 2
    assert not sys.modules["datasets"].config.HF_HUB_OFFLINE


WITHOUT_NETWORK = """
import datasets, time
from switchhead.errors import DataError
from switchhead.eval import blimp
from switchhead.eval.examples import load_examples
start = time.perf_counter()
try:
    load_examples(blimp.FILE, blimp.HUB, blimp.parse, task_data=None)
except DataError as error:
    print(f"{time.perf_counter() - start:.0f} {error}")
"""


def test_a_hub_that_cannot_be_reached_is_given_up_within_seconds(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # of nobody, once it is closed
    nowhere = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    environment = {**os.environ, **nowhere, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NETWORK], env=environment, capture_output=True, text=True, check=True
    )
    seconds, message = done.stdout.split(" ", 1)
    assert int(seconds) < 10
    assert re.match(r"cannot fetch nyu-mll/blimp .*refused.*put blimp\.jsonl into a directory", message)
    assert "Retrying" not in done.stderr


def test_an_unknown_task_and_perplexity_without_text_are_refused_at_once(model):
    with pytest.raises(ValueError, match="task 'blip' is unknown; there are perplexity, lambada, blimp, cbt"):
        evaluate_tasks(model, ["blimp", "blip"], Settings())
    with pytest.raises(ValueError, match="perplexity needs a text"):
        evaluate_tasks(model, ["perplexity"], Settings())
    with pytest.raises(ValueError, match="limit is 0"):
        Settings(limit=0)


@pytest.mark.parametrize(
    ("task", "setting", "other"),
    [
        ("perplexity", {"limit": 5}, {"data": "text:x"}),
        ("perplexity", {"task_data": DATA}, {"data": "text:x"}),
        ("cbt", {"stride": 5}, {}),
        ("cbt", {"data": "text:x"}, {}),
    ],
)
def test_a_setting_that_no_task_reads_is_refused_at_once(model, task, setting, other):
    with pytest.raises(ValueError, match=f"{next(iter(setting))} is given, and no task that is chosen reads it"):
        evaluate_tasks(model, [task], Settings(**setting, **other))


def test_missing_files_of_a_later_task_are_named_at_once(model, tmp_path):
    shutil.copy(DATA / "blimp.jsonl", tmp_path)
    with pytest.raises(DataError, match=r"has no cbt_cn\.jsonl or cbt_ne\.jsonl"):
        evaluate_tasks(model, ["blimp", "cbt"], Settings(task_data=tmp_path))


@pytest.mark.parametrize("positions", ["rotary", "relative"])
def test_results_say_how_much_was_read_at_once_and_of_what(make_model, language_model, positions):
    memory = {"memory_length": 8} if positions == "relative" else {}
    model = language_model(make_model(positions=positions, **memory))
    for settings, chunk_length in (
        (Settings(task_data=DATA), 8),
        (Settings(task_data=DATA, chunk_length=4, limit=1), 4),
    ):
        for result in evaluate_tasks(model, ["lambada", "blimp", "cbt"], settings):
            expected = {"chunk_length": chunk_length, "limit": settings.limit, **memory}
            assert expected.items() <= result.settings.items(), result.task


@pytest.mark.parametrize(("batch_size", "lanes"), [(1, 1), (3, 3), (64, 5)])
def test_results_say_how_many_lanes_there_were(make_model, language_model, tmp_path, batch_size, lanes):
    (tmp_path / "text").write_text("a" * (16 * 8 * 5 + 3))  # 5 lanes of 16 chunks
    model = language_model(make_model(positions="relative", memory_length=8))
    settings = Settings(data=f"text:{tmp_path / 'text'}", batch_size=batch_size)
    (result,) = evaluate_tasks(model, ["perplexity"], settings)
    assert result.settings["lanes"] == lanes


@pytest.mark.skipif(not FULL.is_dir(), reason="the full data is not there")
def test_the_full_data_is_read_whole():
    _, pairs = load_examples(blimp.FILE, blimp.HUB, blimp.parse, task_data=FULL)
    assert Counter(pair.paradigm for pair in pairs) == dict.fromkeys({pair.paradigm for pair in pairs}, 1000)
    assert len({pair.paradigm for pair in pairs}) == 67
    assert {pair.field for pair in pairs} == {"morphology", "semantics", "syntax", "syntax_semantics"}
    for form in (lambada.OPENAI, lambada.STANDARD):
        _, passages = load_examples(form.file, form.hub, lambada.parse, task_data=FULL)
        assert len(passages) == 5153

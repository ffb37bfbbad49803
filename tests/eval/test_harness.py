import json
import os
import subprocess
import sys

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from switchhead.data import ByteSubsetVocabulary, ByteVocabulary
from switchhead.data.bpe import train_bpe
from switchhead.eval import encode_request, evaluate_blimp, evaluate_cbt, evaluate_lambada, load_language_model
from switchhead.eval.harness import TASKS, SwitchHeadLM
from switchhead.eval.harness import __main__ as command_line
from switchhead.eval.lambada import STANDARD
from tests.eval.conftest import DATA

MEMORY = {"positions": "relative", "memory_length": 64, "max_position_embeddings": 64}
NAMES = ["switchhead_blimp", "switchhead_lambada_openai", "switchhead_lambada_standard", "switchhead_cbt"]


@pytest.fixture
def saved(make_model, tmp_path):
    """A function: settings to the directory of a small saved model in float32."""

    def save(vocabulary=None, **changes):
        vocabulary = vocabulary or ByteVocabulary()
        sizes = {"vocab_size": vocabulary.size, "bos_token_id": None, "eos_token_id": None}
        make_model(**{**sizes, "max_position_embeddings": 1024, **changes}).float().save_pretrained(tmp_path)
        vocabulary.save(tmp_path)
        return str(tmp_path)

    return save


def run_harness(model, tasks):
    manager = TaskManager(include_path=str(TASKS), include_defaults=False, metadata={"task_data": str(DATA)})
    return simple_evaluate(model=model, tasks=tasks, task_manager=manager, bootstrap_iters=0, log_samples=True)


def record_tokens(model):
    """What a model of the harness gets to score from now on: texts, tokens of the context and of the continuation."""
    seen, score = [], model._loglikelihood_tokens
    model._loglikelihood_tokens = lambda requests, **options: (seen.extend(requests), score(requests, **options))[1]
    return seen


def sub_words():
    """A small sub-word vocabulary."""
    return train_bpe(["The dogs bark at night. " * 20, (DATA / "lambada_test.jsonl").read_text()], 340)


def requests(*texts, kind="loglikelihood"):
    return [Instance(kind, {}, text, i, metadata=("task", i, 1)) for i, text in enumerate(texts)]


@pytest.mark.parametrize(("kind", "names"), [({}, NAMES), (MEMORY, NAMES[:3])], ids=["rotary", "memory"])
def test_the_harness_and_the_native_scorer_agree(saved, kind, names):
    directory = saved(**kind)
    found = run_harness(SwitchHeadLM(directory, device="cpu", batch_size=3), names)["results"]
    model = load_language_model(directory, "cpu")
    lambada = [evaluate_lambada(model, task_data=DATA), evaluate_lambada(model, STANDARD, task_data=DATA)]
    assert found["switchhead_blimp"]["acc,none"] == evaluate_blimp(model, task_data=DATA).scores["accuracy"].value
    for name, result in zip(NAMES[1:3], lambada, strict=True):
        assert found[name]["acc,none"] == result.scores["accuracy"].value
        assert found[name]["perplexity,none"] == pytest.approx(result.scores["perplexity"].value, rel=1e-4)
    if "switchhead_cbt" in names:
        assert found["switchhead_cbt"]["acc,none"] == evaluate_cbt(model, task_data=DATA).scores["accuracy"].value


@torch.no_grad()
def test_the_harness_scores_the_tokens_that_plain_forwards_score(saved):
    """Tokens and likelihoods of every BLiMP sentence and LAMBADA word, once more without any of our scoring."""
    directory = saved()
    found = run_harness(SwitchHeadLM(directory, device="cpu"), NAMES[:2])["samples"]
    model = load_language_model(directory, "cpu").model
    checked = 0
    for sample in found["switchhead_blimp"] + found["switchhead_lambada_openai"]:
        for (context, continuation), (log_likelihood, greedy) in zip(
            [sample["arguments"][i] for i in range(len(sample["arguments"]))], sample["filtered_resps"], strict=True
        ):
            tokens = torch.tensor([256, *(context + continuation).encode()])
            scores = model(tokens[None, :-1]).logits[0].log_softmax(-1)[len(context.encode()) :]
            targets = tokens[1 + len(context.encode()) :]
            assert log_likelihood == pytest.approx(scores.gather(1, targets[:, None]).sum().item(), abs=1e-4)
            assert greedy == bool((scores.argmax(-1) == targets).all())
            checked += 1
    assert checked == 2 * 20 + 6


def test_the_harness_makes_the_tokens_of_the_native_scorer(saved):
    """Sub-word tokens of every request, as the harness cuts them and as `encode_request` does."""
    vocabulary = sub_words()
    model = SwitchHeadLM(saved(vocabulary), device="cpu")
    seen = record_tokens(model)
    run_harness(model, NAMES)
    assert len(seen) == 2 * 20 + 2 * 6 + 10 * 5
    for (context, continuation), *tokens in seen:
        assert tuple(tokens) == encode_request(vocabulary, context, continuation)


def test_the_harness_s_own_model_of_hugging_face_agrees(saved):
    """The same tokens, and likelihoods to 1e-4, from code that shares nothing with ours; it needs accelerate."""
    pytest.importorskip("accelerate")
    from lm_eval.models.huggingface import HFLM

    vocabulary = sub_words()
    ours = SwitchHeadLM(saved(vocabulary), device="cpu")
    options = {"backend": "causal", "batch_size": 8, "add_bos_token": True}
    theirs = HFLM(pretrained=ours.model, tokenizer=vocabulary.tokenizer, **options)
    seen = record_tokens(ours), record_tokens(theirs)
    samples = [run_harness(model, NAMES[:3])["samples"] for model in (ours, theirs)]
    assert [request[1:] for request in seen[0]] == [request[1:] for request in seen[1]]
    for name in NAMES[:3]:
        for mine, other in zip(samples[0][name], samples[1][name], strict=True):
            for (value, greedy), expected in zip(mine["filtered_resps"], other["filtered_resps"], strict=True):
                assert (value, greedy) == (pytest.approx(expected[0], abs=1e-4), expected[1])


def test_without_a_beginning_token_the_first_token_is_context(saved):
    directory = saved(ByteSubsetVocabulary(bytes(range(32, 128))))
    lm = SwitchHeadLM(directory, device="cpu")
    found = lm.loglikelihood(requests(("", "abc"), ("a", "bc")))
    assert found[0] == found[1]


@torch.no_grad()
def test_whole_texts_are_scored_once_by_their_windows(saved):
    lm = SwitchHeadLM(saved(max_position_embeddings=8), device="cpu")
    text = "Twenty-one characters"
    tokens = torch.tensor([256, *text.encode()])
    losses = [
        torch.nn.functional.cross_entropy(lm.model(tokens[None, i : i + 8]).logits[0], target, reduction="sum")
        for i, target in ((i, tokens[i + 1 : i + 9]) for i in (0, 8))
    ]
    last = torch.nn.functional.cross_entropy(lm.model(tokens[None, 16:21]).logits[0], tokens[17:22], reduction="sum")
    (found,) = lm.loglikelihood_rolling(requests((text,), kind="loglikelihood_rolling"))
    assert found == pytest.approx(-(sum(losses) + last).item(), rel=1e-5)


def test_generation_is_greedy_and_ends_at_a_stop_sequence(saved):
    lm = SwitchHeadLM(saved(max_position_embeddings=64), device="cpu")
    (whole,) = lm.generate_until(requests(("Once", {"until": [], "max_gen_toks": 12}), kind="generate_until"))
    stop = whole[4]
    options = {"until": ["never", stop], "max_gen_toks": 12}
    (cut,) = lm.generate_until(requests(("Once", options), kind="generate_until"))
    assert cut == whole.partition(stop)[0]


def test_an_unknown_dtype_is_named(saved):
    with pytest.raises(ValueError, match="dtype is 'float8'"):
        SwitchHeadLM(saved(), device="cpu", dtype="float8")


@pytest.mark.parametrize("own", [["--include_path", "DIR"], ["--include_path=DIR"], []])
def test_the_command_line_adds_our_tasks_unless_others_are_named(monkeypatch, own):
    arguments = ["lm_eval", "run", "--tasks", "switchhead_blimp", *own]
    monkeypatch.setattr(sys, "argv", arguments.copy())
    monkeypatch.setattr(command_line, "cli_evaluate", lambda: None)
    command_line.main()
    assert sys.argv == (arguments if own else [*arguments, "--include_path", str(TASKS)])


@pytest.mark.slow
def test_the_command_line_of_the_harness_knows_our_model_and_tasks(saved, tmp_path):
    directory = saved()
    command = [sys.executable, "-m", "switchhead.eval.harness", "run", "--model", "switchhead"]
    command += ["--model_args", f"pretrained={directory}", "--tasks", "switchhead_blimp"]
    command += ["--metadata", json.dumps({"task_data": str(DATA)}), "--output_path", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    assert "switchhead_blimp" in done.stdout
    (file,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_text())
    expected = evaluate_blimp(load_language_model(directory, "cpu"), task_data=DATA).scores["accuracy"].value
    assert results["results"]["switchhead_blimp"]["acc,none"] == pytest.approx(expected)
    assert results["config"]["model_sha"] == load_language_model(directory, "cpu").sha256

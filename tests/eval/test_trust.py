"""Models of which it is known by hand what they must score."""

import json
import math

import pytest
import torch

from switchhead.eval import evaluate, evaluate_blimp, evaluate_cbt, evaluate_lambada, score_tokens
from switchhead.eval.lambada import STANDARD
from switchhead.hf import SwitchHeadConfig, SwitchHeadForCausalLM
from tests.eval.conftest import DATA, NextToken


def lines(name):
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def test_a_uniform_model_is_as_perplexed_as_it_has_tokens(uniform, vocabulary, language_model, tmp_path):
    (tmp_path / "text").write_text("Any text at all.\n")
    score = evaluate(uniform, vocabulary, f"text:{tmp_path / 'text'}")
    assert score.perplexity == pytest.approx(257)
    assert score.bits_per_byte == score.bits_per_character == pytest.approx(math.log2(257))
    assert score.word_perplexity == pytest.approx(257 ** (17 / 5))  # 17 bytes; 4 words and a line end

    uniform.config.max_position_embeddings = 4096
    words = [line["text"].split(" ")[-1] for line in lines("lambada_test.jsonl")]
    result = evaluate_lambada(language_model(uniform), task_data=DATA)
    mean_length = sum(len(word) + 1 for word in words) / len(words)
    assert result.scores["perplexity"].value == pytest.approx(257**mean_length)
    assert result.scores["accuracy"].value == 0


def test_a_uniform_model_prefers_what_is_shorter_and_decides_no_ties(uniform, language_model):
    shorter = [len(line["sentence_good"]) < len(line["sentence_bad"]) for line in lines("blimp.jsonl")]
    longer = [len(line["sentence_good"]) > len(line["sentence_bad"]) for line in lines("blimp.jsonl")]
    assert 0 < sum(shorter) < len(shorter) - sum(longer)  # there are ties
    paradigms = [line["paradigm"] for line in lines("blimp.jsonl")]
    result = evaluate_blimp(language_model(uniform), task_data=DATA)
    shares = [
        sum(s for s, p in zip(shorter, paradigms, strict=True) if p == paradigm) / paradigms.count(paradigm)
        for paradigm in sorted(set(paradigms))
    ]
    assert result.scores["accuracy"].value == pytest.approx(sum(shares) / len(shares))


def test_a_bigram_model_scores_what_its_counts_say(vocabulary):
    # Counted on "aab": the beginning is followed by a; a by a and b once each.
    table = {vocabulary.beginning: {"a": 1.0}, ord("a"): {"a": 0.5, "b": 0.5}, ord("b"): {"a": 1.0}}

    def log_probabilities(tokens):
        following = table[tokens[-1]]
        return [math.log(following.get(chr(token), 1e-30)) for token in range(vocabulary.size)]

    model = NextToken(vocabulary.size, log_probabilities, max_position_embeddings=2)
    tokens = torch.tensor([vocabulary.beginning, *b"aabaab"]).numpy()
    score = score_tokens(model, vocabulary, tokens, chunk_length=2, batch_size=2)
    # a a b a a b: 1 * 1/2 * 1/2 * 1 * 1/2 * 1/2
    assert score.loss == pytest.approx(math.log(16) / 6)
    assert score.perplexity == pytest.approx(16 ** (1 / 6))
    assert score.bits_per_byte == pytest.approx(4 / 6)


def test_a_model_that_has_memorised_everything_is_always_right(memorising, vocabulary, language_model, tmp_path):
    text = "Known by heart."
    (tmp_path / "text").write_text(text)
    assert evaluate(memorising(text), vocabulary, f"text:{tmp_path / 'text'}").perplexity == pytest.approx(1)

    passages = [line["text"] for line in lines("lambada_test.jsonl") + lines("lambada_test_plain.jsonl")]
    model = language_model(memorising(*passages))
    for result in (evaluate_lambada(model, task_data=DATA), evaluate_lambada(model, STANDARD, task_data=DATA)):
        assert result.scores["accuracy"].value == 1
        assert result.scores["perplexity"].value == pytest.approx(1)

    sentences = [line["sentence_good"] for line in lines("blimp.jsonl")]
    assert evaluate_blimp(language_model(memorising(*sentences)), task_data=DATA).scores["accuracy"].value == 1

    stories = [
        " ".join([*line["sentences"], line["question"].replace("XXXXX", line["answer"])])
        for line in lines("cbt_cn.jsonl") + lines("cbt_ne.jsonl")
    ]
    assert evaluate_cbt(language_model(memorising(*stories)), task_data=DATA).scores["accuracy"].value == 1


def test_random_weights_score_pairs_by_chance(vocabulary, language_model, tmp_path):
    letters = torch.randint(ord("a"), ord("z"), (400, 2, 12), generator=torch.Generator().manual_seed(0)).tolist()
    with (tmp_path / "blimp.jsonl").open("w") as file:
        for good, bad in letters:
            pair = {"sentence_good": "".join(map(chr, good)), "sentence_bad": "".join(map(chr, bad))}
            file.write(json.dumps({**pair, "UID": "letters", "field": "none", "linguistics_term": "none"}) + "\n")
    config = SwitchHeadConfig(vocab_size=257, hidden_size=16, num_hidden_layers=1, head_dim=4, intermediate_size=16)
    torch.manual_seed(0)
    score = evaluate_blimp(language_model(SwitchHeadForCausalLM(config)), task_data=tmp_path).scores["accuracy"]
    assert score.standard_error == pytest.approx(0.025, rel=0.02)
    assert abs(score.value - 0.5) < 3 * score.standard_error

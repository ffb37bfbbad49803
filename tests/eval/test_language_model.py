import json
import time

import huggingface_hub
import pytest
import torch
from huggingface_hub import HfApi
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from switchhead.data import load_tokens
from switchhead.errors import CheckpointError, RunError
from switchhead.eval import evaluate, generate, load_language_model, score_tokens
from switchhead.recipes import get_recipe
from switchhead.train import train

WORDS = {"<s>": 0, "<unk>": 1, "the": 2, "cat": 3, "sat": 4}


@pytest.fixture
def gpt2(tmp_path):
    """A directory with a GPT-2 of another make, and a tokenizer of five words."""
    tokenizer = Tokenizer(WordLevel(WORDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>").save_pretrained(tmp_path)
    sizes = {"n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    GPT2LMHeadModel(GPT2Config(vocab_size=6, **sizes)).save_pretrained(tmp_path)
    return tmp_path


def test_a_model_of_another_make_is_scored_and_generates(gpt2, tmp_path):
    loaded = load_language_model(gpt2, "cpu")
    assert (loaded.vocabulary.beginning, loaded.vocabulary.size, loaded.step, loaded.run) == (0, 5, None, None)
    (tmp_path / "text").write_text("the cat sat")
    score = evaluate(loaded.model, loaded.vocabulary, f"text:{tmp_path / 'text'}")
    logits = loaded.model(torch.tensor([[0, 2, 3]])).logits[0]
    assert score.loss == pytest.approx(torch.nn.functional.cross_entropy(logits, torch.tensor([2, 3, 4])).item())
    assert generate(loaded.model, loaded.vocabulary, "the", max_new_tokens=20, temperature=0)


def test_a_vocabulary_larger_than_the_model_is_refused(gpt2):
    GPT2LMHeadModel(GPT2Config(vocab_size=4, n_positions=8, n_embd=8, n_layer=1, n_head=2)).save_pretrained(gpt2)
    with pytest.raises(RunError, match=r"vocabulary of .* has 5 tokens, the model 4"):
        load_language_model(gpt2)


def test_weights_in_a_pickle_are_not_read(gpt2):
    torch.save({}, gpt2 / "pytorch_model.bin")
    (gpt2 / "model.safetensors").unlink()
    with pytest.raises(RunError, match="cannot load model"):
        load_language_model(gpt2)


def test_a_run_and_a_saved_copy_of_its_model_are_the_same(tmp_path):
    (tmp_path / "text").write_text("How much wood would a woodchuck chuck? " * 60)
    recipe = get_recipe("tiny-switchhead")
    settings = {"steps": 2, "warmup_steps": 0, "batch_size": 2, "save_every": 1}
    training = type(recipe.training)(**{**vars(recipe.training), **settings})
    source = f"text:{tmp_path / 'text'}"
    train(model=recipe.model, training=training, data=source, out=tmp_path / "run", device="cpu")
    run = load_language_model(tmp_path / "run", "cpu")
    assert (run.step, run.run) == (2, tmp_path / "run")
    run.model.save_pretrained(tmp_path / "saved")
    run.vocabulary.save(tmp_path / "saved" / "tokenizer")
    saved = load_language_model(str(tmp_path / "saved"), "cpu")
    assert saved.sha256 == run.sha256
    tokens = load_tokens(source, run.vocabulary)[:50]
    scores = [score_tokens(m.model, m.vocabulary, tokens, chunk_length=64, batch_size=1).loss for m in (run, saved)]
    assert scores[0] == scores[1]
    earlier = load_language_model(tmp_path / "run" / "checkpoints" / "step-1", "cpu")
    assert earlier.step == 1
    assert earlier.sha256 != run.sha256
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*step-9; in .* there are: step-2, step-1$"):
        load_language_model(tmp_path / "run" / "checkpoints" / "step-9", "cpu")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "is not a run directory or a saved model: it has no config.json"),
        ("missing/of/it", "does not exist: expected a run directory, a saved model, or a name on the hub"),
        ("broken", "cannot load model"),
    ],
)
def test_what_is_no_model_is_named(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    with pytest.raises(RunError, match=message) as error:
        load_language_model(tmp_path / name)
    assert name in str(error.value)


def test_a_saved_model_without_its_tokenizer_says_what_to_add(tmp_path):
    GPT2LMHeadModel(GPT2Config(vocab_size=4, n_positions=8, n_embd=8, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    with pytest.raises(RunError, match=r"holds a model without a tokenizer: save its own beside it"):
        load_language_model(tmp_path)


def test_a_name_on_the_hub_without_a_network_is_an_error_of_one_line_at_once(monkeypatch):
    def model_info(self, name, *, timeout):
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(HfApi, "model_info", model_info)
    started = time.monotonic()
    with pytest.raises(
        RunError, match="cannot load model 'nobody/nothing': no directory of that name is here, and on the hub: "
    ) as error:
        load_language_model("nobody/nothing")
    assert str(error.value).endswith("on the hub: no network")
    assert time.monotonic() - started < 10  # `from_pretrained` would try again for longer


def test_a_model_that_was_fetched_before_needs_no_network(monkeypatch):
    def model_info(self, name, *, timeout):
        raise ConnectionError("no network")

    def from_pretrained(name, **settings):
        raise OSError("its kept files are read")

    monkeypatch.setattr(HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: f"/cache/{name}/{file}")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    with pytest.raises(RunError, match="its kept files are read"):
        load_language_model("nobody/nothing")

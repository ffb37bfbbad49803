import logging

import pytest
import torch

from switchhead.eval import generate

PROMPT = "Once"


def greedy_bytes(model, vocabulary, ids, n_new, window=None):
    """Likeliest tokens one after the other, each by a full forward; `window(ids)` is what the model may see."""
    new = []
    for _ in range(n_new):
        seen = window(ids) if window else ids
        new.append(int(model(torch.tensor([seen])).logits[0, -1].argmax()))
        ids = [*ids, new[-1]]
        if new[-1] == vocabulary.beginning:
            break
    return vocabulary.decode(new)


@torch.no_grad()
def test_zero_temperature_takes_the_likeliest_tokens(make_model, vocabulary):
    model = make_model(max_position_embeddings=64)
    ids = [vocabulary.beginning, *PROMPT.encode()]
    expected = greedy_bytes(model, vocabulary, ids, 30)
    assert len(expected) > 10
    assert generate(model, vocabulary, PROMPT, max_new_tokens=30, temperature=0) == expected


@torch.no_grad()
def test_a_full_context_goes_on_from_its_later_half(make_model, vocabulary):
    model = make_model(max_position_embeddings=8)

    def window(ids):
        start = 0
        while len(ids) - start >= 8:
            start += 4
        return ids[start:]

    ids = [vocabulary.beginning, *PROMPT.encode()]
    expected = greedy_bytes(model, vocabulary, ids, 30, window)
    assert generate(model, vocabulary, PROMPT, max_new_tokens=30, temperature=0) == expected
    long_prompt = PROMPT * 5
    assert len(generate(model, vocabulary, long_prompt, max_new_tokens=3, temperature=0)) > 0


def test_transformer_xl_goes_on_beyond_a_chunk_without_complaint(make_model, vocabulary, caplog):
    model = make_model(positions="relative", memory_length=8)
    with caplog.at_level(logging.WARNING):
        text = generate(model, vocabulary, PROMPT, max_new_tokens=40, temperature=0)
    assert len(text) > 8
    assert not caplog.records


def test_the_seed_decides_the_sample_and_the_global_generator_is_left_alone(make_model, vocabulary):
    model = make_model()
    state = torch.get_rng_state()
    first = generate(model, vocabulary, PROMPT, max_new_tokens=20, seed=1)
    assert generate(model, vocabulary, PROMPT, max_new_tokens=20, seed=1) == first
    assert generate(model, vocabulary, PROMPT, max_new_tokens=20, seed=2) != first
    assert torch.equal(torch.get_rng_state(), state)


def test_top_1_sampling_is_greedy(make_model, vocabulary):
    model = make_model()
    greedy = generate(model, vocabulary, max_new_tokens=20, temperature=0)
    assert generate(model, vocabulary, max_new_tokens=20, top_k=1) == greedy


def test_generation_ends_with_the_document(make_model, vocabulary):
    model = make_model()
    with torch.no_grad():
        model.lm_head.bias[vocabulary.beginning] = 1e4
    assert generate(model, vocabulary, PROMPT, max_new_tokens=20) == ""


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1e-300}, "temperature is 1e-300"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": 0}, "top_k is 0"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
    ],
)
def test_a_setting_out_of_range_is_named(make_model, vocabulary, setting, message):
    with pytest.raises(ValueError, match=message):
        generate(make_model(), vocabulary, PROMPT, **setting)

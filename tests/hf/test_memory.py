import pytest
import torch
from torch import Tensor

from switchhead.hf.compat import CACHE_NAME
from tests.helpers import relative_error
from tests.hf.models import KINDS, greedy, greedy_by_full_forward, lively_model, random_tokens, small_config


def windows(n_tokens: int, chunk: int, memory_length: int) -> Tensor:
    """Which keys each token sees when text is read in chunks with memory: `[1, 1, T, T]`, True = attend."""
    query, key = torch.arange(n_tokens)[:, None], torch.arange(n_tokens)
    first = query // chunk * chunk - memory_length
    return ((key <= query) & (key >= first))[None, None]


def read_in_chunks(model, tokens: Tensor, chunk: int, attention_mask: Tensor | None = None) -> Tensor:
    memory, logits = None, []
    for start in range(0, tokens.shape[1], chunk):
        part = slice(start, start + chunk)
        mask = None if attention_mask is None else attention_mask[:, part]
        output = model(tokens[:, part], mask, memory=memory)
        memory = output.memory
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize(("chunk", "memory_length"), [(4, 4), (4, 3), (4, 6), (4, 8), (1, 5)])
@pytest.mark.parametrize(("attention", "positions"), KINDS)
@torch.no_grad()
def test_chunks_with_memory_match_one_windowed_sequence(attention, positions, chunk, memory_length):
    # One layer: in deeper models a memory carries more than the window shows.
    config = small_config(attention, positions, memory_length=memory_length, num_hidden_layers=1)
    model = lively_model(config)
    tokens = random_tokens(2, 12)
    expected = model(tokens, windows(12, chunk, memory_length)).logits
    assert relative_error(read_in_chunks(model, tokens, chunk), expected) < 1e-12


@pytest.mark.parametrize(("attention", "positions"), KINDS)
@torch.no_grad()
def test_chunks_with_a_memory_of_everything_match_the_whole_text_in_a_deep_model(attention, positions):
    model = lively_model(small_config(attention, positions, memory_length=100, num_hidden_layers=3))
    tokens = random_tokens(2, 12)
    for chunk in (3, 5):
        assert relative_error(read_in_chunks(model, tokens, chunk), model(tokens).logits) < 1e-12


@pytest.mark.parametrize(("attention", "positions"), KINDS)
@torch.no_grad()
def test_memory_and_explicit_positions_agree_with_the_default(attention, positions):
    model = lively_model(small_config(attention, positions, memory_length=4))
    tokens = random_tokens(2, 8)
    memory = model(tokens[:, :4]).memory
    default = model(tokens[:, 4:], memory=memory).logits
    explicit = model(tokens[:, 4:], memory=memory, position_ids=torch.arange(100, 104)).logits
    assert relative_error(explicit, default) < 1e-10


@torch.no_grad()
def test_memory_is_the_input_of_every_layer_cut_to_its_length():
    model = lively_model(small_config(positions="relative", memory_length=5))
    tokens = random_tokens(2, 7)
    output = model(tokens, output_hidden_states=True)
    assert len(output.memory) == model.config.num_hidden_layers
    for memory, state in zip(output.memory, output.hidden_states, strict=False):
        assert torch.equal(memory, state[:, -5:])
    following = model(tokens[:, :2], memory=output.memory)
    assert torch.equal(following.memory[1][:, :3], output.memory[1][:, -3:])


def test_no_gradient_flows_into_memory_and_the_model_stores_none():
    model = lively_model(small_config(positions="relative", memory_length=4))
    before = set(vars(model.model)), [name for name, _ in model.named_buffers()]
    output = model(random_tokens(2, 4))
    assert not any(memory.requires_grad for memory in output.memory)
    given = tuple(memory.clone().requires_grad_() for memory in output.memory)
    following = model(random_tokens(2, 4, seed=2), memory=given)
    assert not any(memory.requires_grad for memory in following.memory)
    assert (set(vars(model.model)), [name for name, _ in model.named_buffers()]) == before


@torch.no_grad()
def test_padding_in_a_chunk_behind_memory_is_ignored():
    model = lively_model(small_config(positions="relative", memory_length=4))
    tokens = random_tokens(2, 8)
    memory = model(tokens[:, :4]).memory
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    padded = model(tokens[:, 4:], mask, memory=memory).logits
    alone = model(tokens[:, 4:7], memory=memory).logits
    assert relative_error(padded[:1, :3], alone[:1]) < 1e-12
    whole = torch.cat([torch.ones(2, 4, dtype=torch.long), mask], dim=1)
    assert torch.equal(model(tokens[:, 4:], whole, memory=memory).logits, padded)
    whole[0, :4] = 0
    assert relative_error(model(tokens[:, 4:], whole, memory=memory).logits[0, :3], padded[0, :3]) > 1e-3


@pytest.mark.parametrize("attention", ["switchhead", "mha"])
@torch.no_grad()
def test_transformer_xl_decodes_with_its_last_hidden_states_as_memory(attention):
    model = lively_model(small_config(attention, "relative", memory_length=6))
    prompt = random_tokens(2, 9)
    output = model(prompt)
    expected = [prompt]
    for _ in range(15):
        following = output.logits[:, -1:].argmax(-1)
        expected.append(following)
        output = model(following, memory=output.memory)
    assert torch.equal(greedy(model, prompt, 15), torch.cat(expected, dim=1))


@pytest.mark.parametrize("attention", ["switchhead", "mha"])
@torch.no_grad()
def test_transformer_xl_equals_the_full_forward_within_its_window_and_not_beyond(attention):
    model = lively_model(small_config(attention, "relative", memory_length=8))
    prompt = random_tokens(4, 3)
    full = greedy_by_full_forward(model, prompt, 20)
    windowed = greedy(model, prompt, 20)
    assert torch.equal(windowed[:, :10], full[:, :10])
    assert not torch.equal(windowed, full)


@torch.no_grad()
def test_transformer_xl_cache_stays_at_its_memory_length():
    model = lively_model(small_config(positions="relative", memory_length=6))
    cache = getattr(model(random_tokens(2, 11), use_cache=True), CACHE_NAME)
    for token in random_tokens(2, 4, seed=2).split(1, dim=1):
        output = model(token, cache=cache)
    assert all(layer.keys.shape[2] == 6 for layer in cache.layers)
    assert output.memory is None


def test_left_padded_prompts_longer_than_the_window_continue_as_they_do_alone():
    model = lively_model(small_config(positions="relative", memory_length=6))
    short, long = random_tokens(1, 4, seed=2), random_tokens(1, 12, seed=3)
    together = torch.cat([torch.cat([torch.zeros(1, 8, dtype=torch.long), short], dim=1), long])
    mask = torch.ones_like(together)
    mask[0, :8] = 0
    out = greedy(model, together, 9, attention_mask=mask)
    assert torch.equal(out[:1, 8:], greedy(model, short, 9))
    assert torch.equal(out[1:], greedy(model, long, 9))


@pytest.mark.parametrize(
    ("changes", "n_layers", "use_cache", "message"),
    [
        ({}, 2, False, "memory_length=0"),
        ({"memory_length": 4}, 1, False, "1 entries for 2 layers"),
        ({"memory_length": 4}, 2, True, "memory and cache exclude each other"),
    ],
)
def test_memory_that_cannot_be_used_is_refused(changes, n_layers, use_cache, message):
    model = lively_model(small_config(**changes))
    memory = [torch.zeros(1, 4, 24, dtype=torch.float64)] * n_layers
    with pytest.raises(ValueError, match=message):
        model(random_tokens(1, 3), memory=memory, use_cache=use_cache)


def test_memory_of_another_batch_is_refused():
    model = lively_model(small_config(memory_length=4))
    memory = model(random_tokens(3, 4)).memory
    with pytest.raises(ValueError, match="memory must be"):
        model(random_tokens(2, 4), memory=memory)

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CompileConfig, DynamicCache, StaticCache

from switchhead.hf.compat import CACHE_NAME
from tests.helpers import relative_error
from tests.hf.models import (
    KINDS,
    VARIANTS,
    greedy,
    greedy_by_full_forward,
    lively_model,
    random_tokens,
    small_config,
    variant_config,
)

FIXED_CACHE_KINDS = [kind for kind in KINDS if kind[1] != "relative"]


def cache_of(output):
    return getattr(output, CACHE_NAME)


@pytest.mark.parametrize(("attention", "positions"), KINDS)
@torch.no_grad()
def test_cached_decoding_token_by_token_matches_full_forward(attention, positions):
    model = lively_model(small_config(attention, positions))
    tokens = random_tokens(2, 17)
    cache = None
    for length in range(1, 18):
        step = model(tokens[:, length - 1 : length], cache=cache, use_cache=True)
        cache = cache_of(step)
        full = model(tokens[:, :length])
        assert relative_error(step.logits[:, -1], full.logits[:, -1]) < 1e-12, length


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_generate_as_the_full_forward_does(variant):
    model = lively_model(variant_config(variant))
    tokens = random_tokens(2, 17)
    cache, pieces = None, []
    with torch.no_grad():
        for piece in tokens.split([4, 1, 1, 1, 3, 1, 1, 5], dim=1):
            step = model(piece, cache=cache, use_cache=True)
            cache = cache_of(step)
            pieces.append(step.logits)
        assert relative_error(torch.cat(pieces, dim=1), model(tokens).logits) < 1e-12
    assert torch.equal(greedy(model, tokens, 8), greedy_by_full_forward(model, tokens, 8))


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize(("attention", "positions"), KINDS)
@torch.no_grad()
def test_cache_is_used_under_either_name_and_in_pieces_of_any_length(attention, positions, name):
    model = lively_model(small_config(attention, positions))
    tokens = random_tokens(2, 12)
    cache, pieces = DynamicCache(config=model.config), []
    for piece in tokens.split([5, 1, 4, 2], dim=1):
        pieces.append(model(piece, **{name: cache}).logits)
    assert relative_error(torch.cat(pieces, dim=1), model(tokens).logits) < 1e-12


def test_both_names_of_the_cache_at_once_are_refused():
    model = lively_model(small_config())
    cache = DynamicCache(config=model.config)
    with pytest.raises(ValueError, match="two names of one argument"):
        model(random_tokens(1, 3), cache=cache, past_key_values=cache)


@pytest.mark.parametrize("n_prompt", [3, 8])
@pytest.mark.parametrize(("attention", "positions"), KINDS)
def test_greedy_tokens_are_equal_with_cache_without_and_by_full_forward(attention, positions, n_prompt):
    model = lively_model(small_config(attention, positions))
    prompt = random_tokens(6, n_prompt)
    expected = greedy_by_full_forward(model, prompt, 12)
    assert len(expected[:, n_prompt:].unique()) > 10, "degenerate weights prove nothing"
    assert torch.equal(greedy(model, prompt, 12), expected)
    assert torch.equal(greedy(model, prompt, 12, use_cache=False), expected)


@pytest.mark.parametrize(("attention", "positions"), FIXED_CACHE_KINDS)
def test_greedy_tokens_are_equal_with_a_cache_of_fixed_size(attention, positions):
    model = lively_model(small_config(attention, positions))
    prompt = random_tokens(3, 5)
    expected = greedy_by_full_forward(model, prompt, 12)
    assert torch.equal(greedy(model, prompt, 12, cache_implementation="static"), expected)


@pytest.mark.parametrize(("attention", "positions"), FIXED_CACHE_KINDS)
@torch.no_grad()
def test_a_cache_of_fixed_size_works_without_generate(attention, positions):
    model = lively_model(small_config(attention, positions))
    tokens, mask = random_tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    cache, pieces = StaticCache(config=model.config, max_cache_len=20), []
    for start, end in ((0, 5), (5, 6), (6, 9)):
        pieces.append(model(tokens[:, start:end], mask[:, :end], cache=cache).logits)
    real = mask.bool()
    assert relative_error(torch.cat(pieces, dim=1)[real], model(tokens, mask).logits[real]) < 1e-12


class MaskOperations(TorchDispatchMode):
    """Counts operations that read or make booleans: masks, in a model without dropout or routing by threshold."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        self.count += any(tensor.dtype == torch.bool for tensor in tensors)
        return result


@pytest.mark.parametrize("attention", ["switchhead", "mha"])
@torch.no_grad()
def test_masks_of_a_token_behind_a_cache_of_fixed_size_are_made_once_for_all_layers(attention):
    counts = []
    for n_layers in (1, 3):
        model = lively_model(small_config(attention, num_hidden_layers=n_layers))
        cache = StaticCache(config=model.config, max_cache_len=20)
        model(random_tokens(2, 5), cache=cache)
        with MaskOperations() as operations:
            model(random_tokens(2, 1), cache=cache)
        counts.append(operations.count)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_autocast_hands_no_query_that_sees_nothing_to_attention(dtype, monkeypatch):
    """Some kernels would make NaN of it; a least float32 becomes minus infinity in 16 bits."""
    masks = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def spy(*args, attn_mask, **options):
        masks.append(attn_mask)
        return attention(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    model = lively_model(small_config("switchhead")).float()
    mask = torch.zeros(2, 1, 5, 20)
    mask[0, :, 0] = torch.finfo(torch.float32).min
    mask[..., 5:] = torch.finfo(torch.float32).min
    with torch.autocast("cpu", dtype):
        model(random_tokens(2, 5), mask, cache=StaticCache(config=model.config, max_cache_len=20))
    assert all(given.dtype == dtype for given in masks)
    assert not any((given == -torch.inf).all(-1).any() for given in masks)
    assert masks


@pytest.mark.parametrize("attention", ["switchhead", "moa"])
def test_decoding_into_a_cache_of_fixed_size_compiles_once_without_graph_breaks(attention):
    torch.compiler.reset()
    model = lively_model(small_config(attention, "rotary"))
    prompt = random_tokens(2, 5)
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0
    options = CompileConfig(fullgraph=True, backend="eager", mode=None)
    options._compile_all_devices = True  # generate compiles on accelerators only, unless told so
    counters.clear()
    found = greedy(model, prompt, 10, attention_mask=mask, cache_implementation="static", compile_config=options)
    assert counters["stats"]["unique_graphs"] == 1
    assert torch.equal(found, greedy(model, prompt, 10, attention_mask=mask))


@pytest.mark.parametrize("memory_length", [0, 8])
def test_relative_positions_refuse_a_cache_of_fixed_size(memory_length):
    model = lively_model(small_config(positions="relative", memory_length=memory_length))
    with pytest.raises(ValueError, match="cache_implementation='dynamic'"):
        greedy(model, random_tokens(1, 3), 2, cache_implementation="static")


@pytest.mark.parametrize(
    ("attention", "positions", "options"),
    [(*kind, options) for kind in KINDS for options in ({}, {"use_cache": False})]
    + [(*kind, {"cache_implementation": "static"}) for kind in FIXED_CACHE_KINDS],
)
def test_left_padded_prompts_continue_as_they_do_alone(attention, positions, options):
    model = lively_model(small_config(attention, positions))
    short, long = random_tokens(1, 3, seed=2), random_tokens(1, 10, seed=3)
    together = torch.cat([torch.cat([torch.zeros(1, 7, dtype=torch.long), short], dim=1), long])
    mask = torch.ones_like(together)
    mask[0, :7] = 0
    out = greedy(model, together, 9, attention_mask=mask, **options)
    assert torch.equal(out[:1, 7:], greedy_by_full_forward(model, short, 9))
    assert torch.equal(out[1:], greedy_by_full_forward(model, long, 9))


@pytest.mark.parametrize(("attention", "positions"), KINDS)
@torch.no_grad()
def test_padding_on_either_side_leaves_the_logits_of_real_tokens(attention, positions):
    model = lively_model(small_config(attention, positions))
    text, padding = random_tokens(1, 6), torch.zeros(1, 4, dtype=torch.long)
    alone = model(text).logits
    ones, zeros = torch.ones_like(text), torch.zeros_like(padding)
    left = model(torch.cat([padding, text], dim=1), torch.cat([zeros, ones], dim=1)).logits[:, 4:]
    right = model(torch.cat([text, padding], dim=1), torch.cat([ones, zeros], dim=1)).logits[:, :6]
    assert relative_error(left, alone) < 1e-12
    assert relative_error(right, alone) < 1e-12


@pytest.mark.parametrize(("attention", "positions"), KINDS)
def test_beam_search_is_equal_with_and_without_cache(attention, positions):
    model = lively_model(small_config(attention, positions))
    prompt = random_tokens(2, 4)
    options = dict(num_beams=4, num_return_sequences=4)
    assert torch.equal(greedy(model, prompt, 8, **options), greedy(model, prompt, 8, use_cache=False, **options))


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize(("attention", "positions"), KINDS)
def test_prompt_may_be_read_in_chunks(attention, positions, chunk):
    model = lively_model(small_config(attention, positions))
    prompt = random_tokens(2, 7)
    assert torch.equal(greedy(model, prompt, 6, prefill_chunk_size=chunk), greedy(model, prompt, 6))


@pytest.mark.parametrize("head_dim", [41, 76, 100])
@pytest.mark.parametrize(("attention", "positions"), KINDS)
def test_head_widths_of_the_paper_decode(attention, positions, head_dim):
    model = lively_model(small_config(attention, positions, head_dim=head_dim, num_hidden_layers=1))
    prompt = random_tokens(2, 3)
    assert torch.equal(greedy(model, prompt, 5), greedy_by_full_forward(model, prompt, 5))


@pytest.mark.parametrize("num_experts", [1, 2, 7])
@torch.no_grad()
def test_cache_holds_two_head_widths_a_token_and_head_whatever_the_number_of_experts(num_experts):
    model = lively_model(small_config(num_experts=num_experts, num_experts_per_tok=1, expert_projections="qkvo"))
    cache = cache_of(model(random_tokens(3, 5), use_cache=True))
    numbers = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    config = model.config
    assert numbers == 3 * 5 * config.num_hidden_layers * config.num_attention_heads * 2 * config.head_dim


@torch.no_grad()
def test_cache_of_grouped_query_attention_holds_its_few_key_value_heads():
    model = lively_model(small_config("mha", num_attention_heads=4, num_key_value_heads=1))
    prompt = random_tokens(2, 5)
    cache = cache_of(model(prompt, use_cache=True))
    assert all(layer.keys.shape == (2, 1, 5, 10) for layer in cache.layers)
    expected = greedy_by_full_forward(model, prompt, 8)
    assert torch.equal(greedy(model, prompt, 8), expected)
    assert torch.equal(greedy(model, prompt, 8, cache_implementation="static"), expected)


@torch.no_grad()
def test_cache_of_moa_holds_one_head_whatever_the_number_of_experts():
    cache = cache_of(lively_model(small_config("moa", num_experts=7))(random_tokens(2, 5), use_cache=True))
    assert all(layer.keys.shape == layer.values.shape == (2, 1, 5, 10) for layer in cache.layers)


@torch.no_grad()
def test_a_plain_forward_keeps_no_cache():
    assert cache_of(lively_model(small_config())(random_tokens(1, 3))) is None


@torch.no_grad()
def test_an_attention_mask_of_ones_changes_nothing_and_costs_no_mask(monkeypatch):
    model = lively_model(small_config())
    tokens = random_tokens(2, 6)
    expected = model(tokens).logits
    seen = []
    real = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **options: seen.append(options) or real(*args, **options),
    )
    logits = model(tokens, torch.ones_like(tokens)).logits
    assert seen
    assert all(options["is_causal"] and options.get("attn_mask") is None for options in seen)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("n_mask", [4, 7])
def test_attention_mask_of_another_shape_is_refused(n_mask, padded):
    model = lively_model(small_config())
    mask = torch.ones(1, n_mask, dtype=torch.long)
    mask[0, 0] = not padded
    with pytest.raises(ValueError, match=f"attention_mask has {n_mask} entries for 5 tokens"):
        model(random_tokens(1, 5), mask)
    with pytest.raises(ValueError, match="attention_mask has 1 rows for a batch of 2"):
        model(random_tokens(2, 5), mask[:, :5])
    with pytest.raises(ValueError, match=r"four dimensions must be boolean \(True = attend\).*got torch.int64"):
        model(random_tokens(1, 5), mask[:, None, None].expand(1, 1, 5, n_mask))


def test_mask_longer_than_a_fixed_cache_is_refused():
    model = lively_model(small_config())
    cache = StaticCache(config=model.config, max_cache_len=4)
    with pytest.raises(ValueError, match="5 entries, but the cache only 4 slots"):
        model(random_tokens(1, 5), torch.ones(1, 5), cache=cache)


def test_sampling_with_a_seed_is_repeatable():
    model = lively_model(small_config())

    def sample():
        torch.manual_seed(7)
        return model.generate(random_tokens(2, 3), max_new_tokens=10, do_sample=True, top_k=0)

    assert torch.equal(sample(), sample())


def test_unknown_options_are_refused_rather_than_ignored():
    model = lively_model(small_config())
    with pytest.raises(TypeError, match="memry=3"):
        model(random_tokens(1, 3), memry=3)
    with pytest.raises(TypeError, match=r"output_attentions=True, .*; attention weights are not kept"):
        model(random_tokens(1, 3), output_attentions=True)
    with pytest.raises(ValueError, match="past_key_value_states"):
        greedy(model, random_tokens(1, 3), 2, past_key_value_states=DynamicCache())

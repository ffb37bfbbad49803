"""Whole-model figures against the real model on the CPU."""

import contextlib
import dataclasses
import functools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from switchhead.accounting import model_resources
from switchhead.hf import SwitchHeadConfig, SwitchHeadForCausalLM
from switchhead.recipes import get_recipe

T, B = 128, 4
SIZES = {"vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16, "num_attention_heads": 4}
KINDS = {
    "dense": {"attention": "mha", "intermediate_size": 256},
    "switchhead with memory": {"num_experts": 4, "positions": "relative", "memory_length": T, "intermediate_size": 256},
    "moa": {"attention": "moa", "num_experts": 6, "gating": "softmax", "intermediate_size": 256, "dropout": 0.1},
    "switchall": {
        "num_experts": 4,
        "feed_forward": "sigma_moe",
        "ffn_num_experts": 8,
        "ffn_num_experts_per_tok": 2,
        "ffn_expert_size": 64,
    },
    "modern": {
        "attention": "mha",
        "num_key_value_heads": 2,
        "feed_forward": "swiglu",
        "norm": "rmsnorm",
        "qk_norm": True,
        "use_bias": False,
        "tie_word_embeddings": True,
        "rotary_fraction": 1.0,
        "intermediate_size": 256,
    },
}


@functools.cache
def predicted(kind, dtype="float32"):
    config = SwitchHeadConfig(**SIZES | KINDS[kind])
    return model_resources(config, chunk_length=T, batch_size=B, dtype=dtype, device="cpu")


def real_step(config, dtype="float32"):
    """A loss to call backward on, of the real model with experts as on a GPU: computed where chosen."""
    model = SwitchHeadForCausalLM(config)
    for part in model.modules():
        if hasattr(part, "backend"):
            part.backend = "grouped"
    tokens = torch.randint(config.vocab_size, (B, T))
    memory = None
    if config.memory_length:
        memory = tuple(torch.randn(B, config.memory_length, config.hidden_size) for _ in model.model.layers)

    def forward():
        with torch.autocast("cpu", torch.bfloat16) if dtype == "bfloat16" else contextlib.nullcontext():
            return model(tokens, shift_labels=tokens, memory=memory).loss

    return model, forward


def measured_peak(forward):
    """The most bytes that PyTorch's CPU allocator had given out at a time, beyond those before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        forward().backward()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    live = peak = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, "float32") for kind in KINDS), ("dense", "bfloat16"), ("switchall", "bfloat16")],
)
def test_peak_memory_is_what_the_allocator_measures(kind, dtype):
    config = SwitchHeadConfig(**SIZES | KINDS[kind])
    model, forward = real_step(config, dtype)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == config.tie_word_embeddings
    parameters = sum(4 * parameter.numel() for parameter in model.parameters())
    resources = predicted(kind, dtype)
    assert resources.parameter_bytes == resources.gradient_bytes == resources.optimizer_bytes / 2 == parameters
    peak = resources.peak_bytes - resources.parameter_bytes - resources.optimizer_bytes
    assert peak == pytest.approx(measured_peak(forward), rel=0.1)
    assert resources.activation_bytes < peak


# Bytes at the peak of forward and backward on one NVIDIA H200, torch 2.11, by `python benchmarks/memory.py`: batch 16,
# the recipe's own length, bfloat16.
MEASURED_ON_A_GPU = {
    "c4-45m-switchhead-rope": 3_067_688_448,
    "c4-45m-dense-rope": 3_601_161_216,
    "c4-244m-switchhead-rope": 13_144_093_696,
    "c4-244m-dense-rope": 15_477_439_488,
    "c4-47m-switchhead": 2_274_150_400,
}


@pytest.mark.parametrize("name", MEASURED_ON_A_GPU)
def test_peak_memory_is_what_a_gpu_measured(name):
    recipe = get_recipe(name)
    shape = {"chunk_length": recipe.training.chunk_length, "batch_size": 16, "dtype": "bfloat16"}
    model = dataclasses.replace(recipe.model, max_position_embeddings=shape["chunk_length"])
    assert model_resources(model, **shape).peak_bytes == pytest.approx(MEASURED_ON_A_GPU[name], rel=0.1)


@pytest.mark.parametrize(
    ("kind", "at_most"),  # XL: no attention matrix on a GPU; moa has dropout, of which it keeps a byte a number
    [("dense", 1.0), ("switchhead with memory", 0.7), ("moa", 0.9), ("switchall", 1.01), ("modern", 1.0)],
)
def test_a_gpu_keeps_no_more_than_a_cpu(kind, at_most):
    config = SwitchHeadConfig(**SIZES | KINDS[kind])
    gpu, cpu = (model_resources(config, chunk_length=T, batch_size=B, device=d) for d in ("cuda", "cpu"))
    assert gpu.activation_bytes <= at_most * cpu.activation_bytes
    same = dataclasses.replace(gpu, device="cpu", activation_bytes=cpu.activation_bytes, peak_bytes=cpu.peak_bytes)
    assert same == cpu


@pytest.mark.parametrize("kind", KINDS)
def test_activation_memory_is_what_autograd_saves(kind):
    config = SwitchHeadConfig(**SIZES | KINDS[kind])
    model, forward = real_step(config)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = forward()
    assert predicted(kind).activation_bytes == pytest.approx(sum(saved.values()), rel=0.001)
    del loss


def test_operations_are_those_that_pytorch_counts_on_the_real_model():
    config = SwitchHeadConfig(**SIZES | KINDS["dense"], positions="relative")
    _, forward = real_step(config)
    resources = model_resources(config, chunk_length=T, batch_size=B)
    with FlopCounterMode(display=False) as counter:
        loss = forward()
    assert resources.forward_flops * B * T == counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert resources.backward_flops * B * T == counter.get_total_flops()


@pytest.mark.parametrize("kind", KINDS)
def test_backward_costs_about_twice_forward(kind):
    resources = predicted(kind)
    assert resources.backward_flops == pytest.approx(2 * resources.forward_flops, rel=0.25)


def test_operations_a_token_do_not_depend_on_the_batch():
    config = SwitchHeadConfig(**SIZES | KINDS["dense"])
    one, four = model_resources(config, chunk_length=T, batch_size=1), predicted("dense")
    assert (one.forward_flops, one.backward_flops) == (four.forward_flops, four.backward_flops)


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_the_cache_has_the_size_that_generation_fills(dtype, width):
    config = SwitchHeadConfig(**SIZES | KINDS["switchall"])
    model = SwitchHeadForCausalLM(config).eval()
    output = model(torch.zeros(1, 5, dtype=torch.long), use_cache=True)
    cache = getattr(output, "cache", None) or output.past_key_values
    numbers = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert predicted("switchall", dtype).cache_bytes == width * numbers / 5


def test_bad_arguments_are_named():
    config = SwitchHeadConfig(**SIZES)
    with pytest.raises(ValueError, match="unknown dtype 'float8'; choose one of float32, bfloat16, float16"):
        model_resources(config, chunk_length=T, dtype="float8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown device 'tpu'; choose one of cuda, cpu"):
        model_resources(config, chunk_length=T, device="tpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size must be at least 1; got 0"):
        model_resources(config, chunk_length=T, batch_size=0)

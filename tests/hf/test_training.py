import math

import pytest
import torch
from torch import nn
from transformers.utils.generic import find_labels

from switchhead.hf import SwitchHeadForCausalLM
from switchhead.hf.router_logits import RouterLogits
from switchhead.nn import Router, feed_forward
from switchhead.ops import document_boundaries
from tests.helpers import relative_error
from tests.hf.models import KINDS, SIGMA_MOE, VARIANTS, lively_model, random_tokens, small_config, variant_config


def enable_activation_checkpointing(model, **options):
    """Under the name that the installed release of transformers has for it."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(options)
    else:
        model.gradient_checkpointing_enable(options)


def gradients_of(model, *args, **inputs) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(*args, **inputs).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_labels_are_shifted_and_ignored_where_negative():
    model = lively_model(small_config())
    tokens = random_tokens(2, 6)
    labels = tokens.clone()
    labels[0, :3] = -100
    output = model(tokens, labels=labels)
    losses = nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    scored = labels[:, 1:].flatten() >= 0
    assert output.loss.item() == pytest.approx(losses[scored].mean().item(), rel=1e-6)


def test_shifted_labels_score_the_last_position_too():
    model = lively_model(small_config())
    text = random_tokens(2, 7)
    output = model(text[:, :-1], shift_labels=text[:, 1:])
    expected = nn.functional.cross_entropy(output.logits.flatten(0, 1), text[:, 1:].flatten())
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_number_of_items_divides_the_summed_loss():
    model = lively_model(small_config())
    tokens = random_tokens(2, 6)
    mean = model(tokens, labels=tokens).loss
    assert model(tokens, labels=tokens, num_items_in_batch=20).loss.item() == pytest.approx(mean.item() / 2, rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"loss_chunk_length": 4}])
def test_losses_of_accumulated_batches_weigh_auxiliary_losses_by_scored_tokens(options):
    model = lively_model(variant_config("moa with all losses")).train()
    few, many = random_tokens(1, 6), random_tokens(3, 6, seed=2)
    some = many.clone()
    some[:, :3] = -100
    for tokens, labels, share in ((few, few, 5 / 14), (many, some, 9 / 14)):
        mean = model(tokens, labels=labels)
        part = model(tokens, labels=labels, num_items_in_batch=torch.tensor(14), **options)
        assert part.aux_loss.item() == pytest.approx(mean.aux_loss.item() * share, rel=1e-6)
        assert part.loss.item() == pytest.approx(mean.loss.item() * share, rel=1e-6)


def test_the_trainer_of_transformers_finds_the_labels_it_evaluates_with():
    assert find_labels(SwitchHeadForCausalLM) == ["labels"]


@pytest.mark.parametrize("kept", [1, 3, torch.tensor([0, 4])])
def test_logits_to_keep_are_those_of_the_full_output(kept):
    model = lively_model(small_config())
    tokens = random_tokens(2, 6)
    expected = model(tokens).logits[:, -kept:] if isinstance(kept, int) else model(tokens).logits[:, kept]
    assert relative_error(model(tokens, logits_to_keep=kept).logits, expected) < 1e-12


def test_hidden_states_are_the_embedding_and_every_layer_with_the_last_one_normed():
    model = lively_model(small_config())
    tokens = random_tokens(2, 6)
    states = model(tokens, output_hidden_states=True).hidden_states
    assert len(states) == model.config.num_hidden_layers + 1
    assert torch.equal(states[0], model.model.embed_tokens(tokens))
    assert torch.equal(states[-1], model.model(tokens).last_hidden_state)
    assert model(tokens).hidden_states is None


def test_embeddings_may_be_given_in_place_of_tokens():
    model = lively_model(small_config())
    tokens = random_tokens(2, 6)
    embedded = model.model.embed_tokens(tokens)
    assert torch.equal(model(inputs_embeds=embedded).logits, model(tokens).logits)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(tokens, inputs_embeds=embedded)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()


def test_outputs_may_be_a_tuple():
    model = lively_model(small_config())
    tokens = random_tokens(2, 6)
    (logits,) = model(tokens, return_dict=False)
    assert torch.equal(logits, model(tokens).logits)


def test_dropout_stands_where_the_paper_has_it(monkeypatch):
    model = lively_model(small_config(dropout=0.3)).train()
    places = {name for name, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p == 0.3}
    layers = {f"model.layers.{i}.{part}" for i in range(2) for part in ("dropout", "feed_forward.dropout")}
    assert places == {"model.embedding_dropout", "output_dropout"} | layers
    calls: list[str] = []
    for name in sorted(places):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.append(name))
    relu_dropout = feed_forward.relu_dropout

    def noted(x, bias, p):  # in place of a call of `feed_forward.dropout`
        calls.append(f"ReLU and dropout of {p}")
        return relu_dropout(x, bias, p)

    monkeypatch.setattr(feed_forward, "relu_dropout", noted)
    model(random_tokens(1, 4))
    assert calls[0] == "model.embedding_dropout"
    assert calls[-1] == "output_dropout"
    after = [f"model.layers.{i}.dropout" for i in range(2)]  # after attention, inside the feed-forward, and after it
    assert calls[1:-1] == [name for each in after for name in (each, "ReLU and dropout of 0.3", each)]


@pytest.mark.parametrize(("attention", "positions"), KINDS)
def test_every_parameter_gets_a_gradient(attention, positions):
    model = lively_model(small_config(attention, positions)).train()
    tokens = random_tokens(4, 9)
    for name, gradient in gradients_of(model, tokens, labels=tokens).items():
        assert gradient.isfinite().all(), name
        assert gradient.any(), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_of_a_variant_gets_a_gradient_in_every_dtype(variant):
    for dtype in (torch.float64, torch.bfloat16):
        model = lively_model(variant_config(variant)).to(dtype).train()
        for name, gradient in gradients_of(model, random_tokens(4, 9), labels=random_tokens(4, 9)).items():
            assert gradient.dtype == dtype, name
            assert gradient.isfinite().all(), name
            assert gradient.any(), name
    with torch.autocast("cpu", torch.bfloat16):
        model = lively_model(variant_config(variant)).float().train()
        assert gradients_of(model, random_tokens(4, 9), labels=random_tokens(4, 9))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_activation_checkpointing_leaves_loss_and_gradients_of_variants_alone(variant, use_reentrant):
    dropout = dict(dropout=0.2) if "modern" in variant else dict(dropout=0.2, ffn_expert_dropout=0.2)
    model, tokens = lively_model(variant_config(variant, **dropout)).train(), random_tokens(2, 7)

    def run():
        torch.manual_seed(0)
        return gradients_of(model, tokens, labels=tokens)

    expected = run()
    enable_activation_checkpointing(model, use_reentrant=use_reentrant)
    found = run()
    assert all(relative_error(found[name], expected[name]) < 1e-6 for name in expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(("attention", "positions"), KINDS)
def test_activation_checkpointing_leaves_loss_memory_and_gradients_alone(attention, positions, use_reentrant):
    model = lively_model(small_config(attention, positions, dropout=0.2, memory_length=4)).train()
    text, memory = random_tokens(2, 7), model(random_tokens(2, 4, seed=5)).memory

    def run():
        torch.manual_seed(0)
        return gradients_of(model, text, labels=text, memory=memory)

    expected = run()
    enable_activation_checkpointing(model, use_reentrant=use_reentrant)
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    found = run()
    assert all(relative_error(found[name], expected[name]) < 1e-6 for name in expected)


def test_activation_checkpointing_refuses_what_a_second_run_would_spoil():
    model = lively_model(small_config()).train()
    enable_activation_checkpointing(model, use_reentrant=False)
    for option in ("use_cache", "output_router_logits"):
        with pytest.raises(ValueError, match="activation checkpointing runs layers twice"):
            model(random_tokens(1, 3), **{option: True})
    with torch.no_grad():
        model(random_tokens(1, 3), use_cache=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("attention", "positions"), KINDS)
def test_half_precision_models_train_without_autocast(attention, positions, dtype):
    model = lively_model(small_config(attention, positions, memory_length=4)).to(dtype).train()
    tokens = random_tokens(2, 6)
    memory = model(tokens).memory
    gradients = gradients_of(model, tokens, labels=tokens, memory=memory)
    assert all(gradient.isfinite().all() and gradient.dtype == dtype for gradient in gradients.values())
    assert model(tokens).logits.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("attention", "positions"), KINDS)
def test_autocast_keeps_float32_parameters_and_comes_close(attention, positions, dtype):
    model = lively_model(small_config(attention, positions, memory_length=4)).float().train()
    tokens = random_tokens(2, 6)
    exact = model(tokens, labels=tokens)
    with torch.autocast("cpu", dtype):
        rough = model(tokens, labels=tokens)
        model(tokens, memory=rough.memory)
    assert rough.logits.dtype == dtype
    assert rough.loss.item() == pytest.approx(exact.loss.item(), rel=3e-3)
    assert relative_error(rough.logits, exact.logits) < 0.3  # a rounded score may choose another expert
    rough.loss.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("attention", "positions"),  # every layer by itself is compiled in tests/nn
    [("switchhead", "rotary"), ("switchhead", "relative"), ("mha", "rotary"), ("moa", "relative")],
)
def test_forward_compiles_without_graph_breaks(attention, positions):
    torch.compiler.reset()  # recompilations are counted per function, over all models of the process
    model = lively_model(small_config(attention, positions, memory_length=4, num_hidden_layers=1))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    tokens = random_tokens(2, 6)
    memory = None
    for _ in range(2):
        output = compiled(tokens, memory=memory, labels=tokens)
        expected = model(tokens, memory=memory, labels=tokens)
        assert relative_error(output.logits, expected.logits) < 1e-9
        assert relative_error(output.loss, expected.loss) < 1e-6
        memory = expected.memory


@pytest.mark.parametrize("variant", ["dynamic k", "moa with all losses", "modern switchhead"])
def test_variants_compile_without_graph_breaks(variant):
    torch.compiler.reset()
    model, tokens = lively_model(variant_config(variant, num_hidden_layers=1)).train(), random_tokens(2, 6)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    output, expected = compiled(tokens, labels=tokens), model(tokens, labels=tokens)
    assert relative_error(output.loss, expected.loss) < 1e-6
    assert relative_error(compiled(tokens, labels=tokens, loss_chunk_length=5).loss, expected.loss) < 1e-6


def test_auxiliary_losses_are_weighted_summed_over_layers_and_added_to_the_loss():
    weights = dict(cv_loss_weight=0.5, switch_loss_weight=0.25, router_z_loss_weight=0.0, ffn_entropy_loss_weight=2.0)
    model = lively_model(variant_config("moa with all losses", **weights)).train()
    tokens = random_tokens(2, 6)
    inputs = {}
    for index, layer in enumerate(model.model.layers):
        for name, part in (("attention", layer.attention), ("feed_forward", layer.feed_forward)):
            part.register_forward_pre_hook(lambda m, args, key=(index, name): inputs.update({key: args[0]}))
    output = model(tokens, labels=tokens)
    expected = dict.fromkeys(weights, 0.0)
    for (index, name), x in inputs.copy().items():
        _, losses = getattr(model.model.layers[index], name)(x, return_aux=True)
        for loss, value in losses.items():
            expected[("ffn_" if name == "feed_forward" else "") + loss + "_weight"] += value.item()
    assert list(output.aux_losses) == ["cv_loss", "switch_loss", "router_z_loss", "ffn_entropy_loss"]
    for name, value in output.aux_losses.items():
        assert value.item() == pytest.approx(expected[f"{name}_weight"] / 2, rel=1e-9), name  # mean of two layers
    total = sum(weight * expected[name] for name, weight in weights.items())
    assert output.aux_loss.item() == pytest.approx(total, rel=1e-9)
    cross_entropy = nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert (output.loss - output.aux_loss).item() == pytest.approx(cross_entropy.item(), rel=1e-5)
    chunked = model(tokens, labels=tokens, loss_chunk_length=4)
    assert chunked.loss.item() == pytest.approx(output.loss.item(), rel=1e-5)
    assert model(tokens).aux_loss.item() == pytest.approx(total, rel=1e-9)
    assert len(model(tokens, return_dict=False)) == 3  # logits and both kinds of auxiliary losses


def test_auxiliary_losses_exist_in_training_and_with_a_weight_only():
    tokens = random_tokens(2, 6)
    evaluated = lively_model(variant_config("moa with all losses"))(tokens, labels=tokens)
    unweighted = lively_model(small_config(**SIGMA_MOE)).train()(tokens, labels=tokens)
    for output in (evaluated, unweighted):
        assert output.aux_loss is None
        assert output.aux_losses is None


@pytest.mark.parametrize("behind_memory", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_auxiliary_losses_do_not_count_padding(side, behind_memory):
    model = lively_model(variant_config("moa with all losses", positions="none", memory_length=4)).train()
    text, ones = random_tokens(1, 6), torch.ones(1, 6, dtype=torch.long)
    memory = model(random_tokens(1, 4, seed=5)).memory if behind_memory else None
    alone = model(text, memory=memory).aux_losses
    before, after = (3, 0) if side == "left" else (0, 3)
    padded, mask = nn.functional.pad(text, (before, after)), nn.functional.pad(ones, (before, after))
    for name, value in model(padded, mask, memory=memory).aux_losses.items():
        assert value.item() == pytest.approx(alone[name].item(), rel=1e-9), name


@pytest.mark.parametrize("chunk_length", [1, 5, 100])
@pytest.mark.parametrize("bias", [True, False])
def test_loss_in_chunks_has_the_same_value_and_gradients_and_no_scores(chunk_length, bias):
    model = lively_model(small_config(use_bias=bias, tie_word_embeddings=not bias)).train()
    tokens = random_tokens(2, 9)
    labels = tokens.clone()
    labels[0, :4] = -100
    for options in (dict(labels=labels), dict(shift_labels=labels), dict(labels=labels, num_items_in_batch=7)):
        plain, chunked = model(tokens, **options), model(tokens, **options, loss_chunk_length=chunk_length)
        assert chunked.logits is None
        assert relative_error(chunked.loss, plain.loss) < 1e-6  # transformers computes the plain one in float32
        expected = gradients_of(model, tokens, **options)
        for name, gradient in gradients_of(model, tokens, **options, loss_chunk_length=chunk_length).items():
            assert relative_error(gradient, expected[name]) < 1e-6, name


def test_loss_in_chunks_of_nothing_or_of_other_lengths_is_refused():
    model, tokens = lively_model(small_config()), random_tokens(2, 6)
    with pytest.raises(ValueError, match="loss_chunk_length needs labels or shift_labels"):
        model(tokens, loss_chunk_length=4)
    with pytest.raises(ValueError, match=r"labels must be \[2, 6\], as the input; got \[2, 5\]"):
        model(tokens, shift_labels=tokens[:, 1:], loss_chunk_length=4)


@pytest.mark.parametrize(("attention", "positions"), [kind for kind in KINDS if kind[1] != "relative"])
def test_packed_documents_do_not_see_each_other(attention, positions):
    model = lively_model(small_config(attention, positions))
    documents = [random_tokens(1, n, seed=n) for n in (3, 4, 5, 2)]
    rows = torch.cat([torch.cat(documents[:2], 1), torch.cat(documents[2:], 1)])
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 1]])
    packed = model(rows, position_ids=position_ids, cu_seqlens=document_boundaries(position_ids)).logits.flatten(0, 1)
    expected = torch.cat([model(document).logits[0] for document in documents])
    assert relative_error(packed, expected) < 1e-12


def test_packed_documents_with_what_they_do_not_go_with_are_refused():
    tokens, bounds = random_tokens(1, 6), torch.tensor([0, 2, 6], dtype=torch.int32)
    with pytest.raises(ValueError, match="does not go with relative positions"):
        lively_model(small_config(positions="relative"))(tokens, cu_seqlens=bounds)
    model = lively_model(small_config(memory_length=4))
    with pytest.raises(ValueError, match="does not go with memory"):
        model(tokens, memory=model(tokens).memory, cu_seqlens=bounds)
    with pytest.raises(ValueError, match="does not go with cache"):
        model(tokens, use_cache=True, cu_seqlens=bounds)
    with pytest.raises(ValueError, match="does not go with key_padding_mask"):
        model(tokens, torch.tensor([[0, 1, 1, 1, 1, 1]]), cu_seqlens=bounds)


def test_router_logits_of_every_kind_of_router_come_in_the_order_of_the_layers():
    model = lively_model(variant_config("moa with all losses"))
    logits = model(random_tokens(2, 6), output_router_logits=True).router_logits
    assert [tuple(scores.shape) for scores in logits] == [(2, 6, 1, 4)] * 4
    assert len(lively_model(variant_config("switchall"))(random_tokens(2, 6), output_router_logits=True)[-1]) == 6


def test_router_logits_have_a_shape_a_meaning_and_a_gradient():
    config = small_config(num_attention_heads=3, num_experts=4, num_experts_per_tok=2, memory_length=5)
    model = lively_model(config).train()
    tokens = random_tokens(2, 6)
    memory = model(random_tokens(2, 5, seed=3)).memory
    output = model(tokens, memory=memory, labels=tokens, output_router_logits=True)
    shapes = [tuple(logits.shape) for logits in output.router_logits]
    assert shapes == [(2, 6, 3, 4)] * 4  # the new tokens', destination and source
    routers = [m for m in model.modules() if type(m).__name__ == "Router"]
    assert not any(router._forward_pre_hooks for router in routers)
    (output.loss + sum(logits.logsumexp(-1).square().mean() for logits in output.router_logits)).backward()
    assert math.isfinite(output.loss.item())
    assert all(router.weight.grad.any() for router in routers)
    plain = model(tokens, memory=memory, labels=tokens)
    assert plain.router_logits is None
    assert torch.equal(plain.logits, output.logits)


def test_router_logits_are_those_that_chose_the_experts():
    model = lively_model(small_config())
    routings = []
    router = model.model.layers[0].attention.destination_router
    router.register_forward_hook(lambda module, args, routing: routings.append(routing))
    logits = model(random_tokens(2, 6), output_router_logits=True).router_logits[0].flatten(0, 1)
    best, indices = logits.sort(-1, descending=True)
    assert torch.equal(indices[..., :2], routings[0].expert_indices)
    assert relative_error(best[..., :2].sigmoid(), routings[0].gates) < 1e-12


def test_router_logits_do_not_depend_on_the_width_that_a_layer_pads_tokens_to():
    router = Router(d_model=5, n_heads=2, n_experts=3, k=1).double()
    tokens = torch.randn(4, 5, dtype=torch.float64)
    with (logits := RouterLogits([router])):
        router(tokens)
        router(nn.functional.pad(tokens, (0, 3)))
    plain, padded = logits.of_batch(2)
    assert plain.shape == (2, 2, 2, 3)
    assert relative_error(padded, plain) < 1e-12


def test_dense_attention_has_no_router_logits():
    assert lively_model(small_config("mha"))(random_tokens(1, 3), output_router_logits=True).router_logits == ()

import copy
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from switchhead.hf import SwitchHeadConfig, SwitchHeadForCausalLM, SwitchHeadModel
from tests.helpers import relative_error
from tests.hf.models import ATTENTIONS, KINDS, VARIANTS, lively_model, random_tokens, small_config, variant_config


@pytest.fixture
def saved(tmp_path):
    model = lively_model(small_config(positions="relative"))
    model.save_pretrained(tmp_path)
    return model, tmp_path


def rewrite(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(("attention", "positions"), KINDS)
def test_saved_models_load_through_the_auto_classes_bit_for_bit(attention, positions, tmp_path):
    check_saving(lively_model(small_config(attention, positions, memory_length=3)), tmp_path)


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_variants_load_through_the_auto_classes_bit_for_bit(variant, tmp_path):
    check_saving(lively_model(variant_config(variant)), tmp_path)


@torch.no_grad()
def check_saving(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert type(loaded) is SwitchHeadForCausalLM
    assert type(AutoConfig.from_pretrained(tmp_path)) is SwitchHeadConfig
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    tokens = random_tokens(2, 7)
    # Weights are equal to the bit; another place in memory may choose another kernel.
    assert relative_error(loaded(tokens).logits, model(tokens).logits) < 1e-12
    body = AutoModel.from_pretrained(tmp_path, dtype="auto")
    assert type(body) is SwitchHeadModel
    assert relative_error(body(tokens).last_hidden_state, model.model(tokens).last_hidden_state) < 1e-12


def test_missing_tensors_are_an_error_with_their_names(saved):
    _, directory = saved
    rewrite(directory, lambda tensors: tensors.pop("model.layers.1.attention.position_proj.weight"))
    with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.attention\.position_proj\.weight"):
        SwitchHeadForCausalLM.from_pretrained(directory)


def test_unexpected_tensors_are_an_error_with_their_names(saved):
    _, directory = saved
    rewrite(directory, lambda tensors: tensors.update({"model.layers.0.attention.extra": torch.zeros(2)}))
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.0\.attention\.extra"):
        AutoModelForCausalLM.from_pretrained(directory)


def test_checkpoint_of_another_depth_is_an_error(saved):
    _, directory = saved
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"missing: model\.layers\.2\..* and \d+ more"):
        SwitchHeadForCausalLM.from_pretrained(directory)


def test_tensor_of_another_shape_is_an_error(saved):
    _, directory = saved
    rewrite(directory, lambda tensors: tensors.update({"lm_head.bias": torch.zeros(3)}))
    with pytest.raises(RuntimeError, match=r"mismatched|size mismatch|ignore_mismatched_sizes"):
        SwitchHeadForCausalLM.from_pretrained(directory)


def test_a_body_without_an_output_layer_is_no_language_model(saved, tmp_path):
    model, _ = saved
    model.model.save_pretrained(tmp_path / "body")
    with pytest.raises(ValueError, match=r"missing: lm_head\.bias, lm_head\.weight"):
        SwitchHeadForCausalLM.from_pretrained(tmp_path / "body")


def test_fields_overridden_while_loading_are_checked(saved):
    _, directory = saved
    assert SwitchHeadForCausalLM.from_pretrained(directory, dropout=0.25).model.embedding_dropout.p == 0.25
    with pytest.raises(ValueError, match=r"dropout=1\.5 must be"):
        SwitchHeadForCausalLM.from_pretrained(directory, dropout=1.5)


def test_loading_report_is_returned_when_asked_for(saved):
    _, directory = saved
    model, report = SwitchHeadForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert isinstance(model, SwitchHeadForCausalLM)
    assert not report["missing_keys"]


@torch.no_grad()
def test_tied_embeddings_stay_tied_through_saving(tmp_path):
    model = lively_model(small_config(tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    loaded = SwitchHeadForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    tokens = random_tokens(1, 5)
    assert relative_error(loaded(tokens).logits, model(tokens).logits) < 1e-12


@pytest.mark.parametrize(("attention", "positions"), KINDS)
def test_initial_weights_have_the_papers_deviations(attention, positions):
    config = small_config(
        attention, positions, hidden_size=64, num_hidden_layers=8, head_dim=32, intermediate_size=128, vocab_size=500
    )
    model = SwitchHeadForCausalLM(config)
    check_initial_weights(model)


@pytest.mark.parametrize("variant", VARIANTS)
def test_initial_weights_of_variants_have_the_papers_deviations(variant):
    sizes = dict(hidden_size=64, num_hidden_layers=8, head_dim=32, vocab_size=500)
    check_initial_weights(SwitchHeadForCausalLM(variant_config(variant, **sizes)))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_models_built_on_the_meta_device_are_drawn_by_init_weights(attention):
    config = small_config(
        attention, "relative", hidden_size=64, num_hidden_layers=8, head_dim=32, intermediate_size=128, vocab_size=500
    )
    with torch.device("meta"):
        model = SwitchHeadForCausalLM(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.init_weights()
    check_initial_weights(model)


def check_initial_weights(model):
    config = model.config
    scale, d_model = math.sqrt(2 / config.num_hidden_layers), config.hidden_size
    width = config.num_attention_heads * config.head_dim
    for name, parameter in model.named_parameters():
        if name == "model.embed_tokens.weight":
            expected = d_model**-0.5
        elif name.startswith("lm_head"):
            assert parameter.abs().max() <= d_model**-0.5  # uniform, PyTorch's own
            expected = d_model**-0.5 / math.sqrt(3)
        elif "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter) if "weight" in name else parameter * 0), name
            continue
        elif name.endswith("bias"):
            assert not parameter.any(), name
            continue
        elif name.endswith("attention.scale"):
            assert parameter.item() == pytest.approx(config.head_dim**-0.5)
            continue
        else:
            inner = config.intermediate_size
            if config.feed_forward == "sigma_moe":
                inner = config.ffn_num_experts * config.ffn_expert_size
            fan_in = {"o_proj": width, "down_proj": inner}.get(name.split(".")[-2], d_model)
            expected = scale / math.sqrt(fan_in)
        # Half a percent of freedom for each draw of ten thousand.
        assert parameter.std().item() == pytest.approx(expected, rel=5 / math.sqrt(parameter.numel())), name


def test_construction_draws_the_same_numbers_from_the_same_seed():
    torch.manual_seed(3)
    first = SwitchHeadForCausalLM(small_config()).state_dict()
    torch.manual_seed(3)
    second = SwitchHeadForCausalLM(small_config()).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@torch.no_grad()
def test_copies_are_independent_and_equal():
    model = lively_model(small_config(positions="relative"))
    twin, tokens = copy.deepcopy(model), random_tokens(1, 5)
    assert torch.equal(twin(tokens).logits, model(tokens).logits)
    twin.model.embed_tokens.weight.zero_()
    assert model.model.embed_tokens.weight.any()


@torch.no_grad()
def test_vocabulary_can_be_resized():
    model = lively_model(small_config())
    tokens = random_tokens(1, 5)
    expected = model(tokens).logits
    model.resize_token_embeddings(70)
    assert model.config.vocab_size == 70
    assert torch.allclose(model(tokens).logits[..., :61], expected)

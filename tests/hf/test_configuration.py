import inspect
import typing

import pytest
import torch

from switchhead.hf import SwitchHeadConfig, SwitchHeadForCausalLM
from switchhead.hf.kinds import KINDS
from switchhead.nn import HeadGatedAttention, MoAAttention, Rotary, SwitchHeadAttention
from tests.hf.models import SIGMA_MOE, VARIANTS, small_config, variant_config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"k": 3}, "unknown field 'k'; did you mean 'num_experts_per_tok'"),
        ({"num_expert": 3}, "unknown field 'num_expert'; did you mean 'num_experts'"),
        ({"attention": "flash"}, "attention='flash' must be one of 'switchhead', 'mha'"),
        ({"positions": "rope"}, "positions='rope' must be one of 'none', 'rotary', 'relative'"),
        ({"feed_forward": "sparse"}, "feed_forward='sparse' must be one of 'mlp', 'swiglu', 'sigma_moe'"),
        ({"norm": "batchnorm"}, "norm='batchnorm' must be one of 'layernorm', 'rmsnorm'"),
        ({"attention": "moa"}, "num_experts=None must be an integer of at least 1"),
        ({"attention": "moa", "num_experts": 1}, "num_attention_heads=2 must be at most num_experts=1"),
        ({"attention": "moa", "num_experts": 4, "num_experts_per_tok": 2}, "num_experts_per_tok=2 has no effect"),
        ({"attention": "head_gating", "num_experts": 4}, "num_experts=4 has no effect with attention='head_gating'"),
        ({"attention": "head_gating", "num_experts_per_tok": 3}, "num_experts_per_tok=3 must be at most num_attention"),
        ({"gating": "softmax_chosen"}, "gating='softmax_chosen' must be 'sigmoid' or 'softmax'"),
        ({"cv_loss_weight": 0.1}, "cv_loss_weight=0.1 has no effect with attention='switchhead'"),
        ({"ffn_entropy_loss_weight": 0.1}, "ffn_entropy_loss_weight=0.1 has no effect with feed_forward='mlp'"),
        ({"feed_forward": "sigma_moe"}, "ffn_num_experts=None must be an integer of at least 1"),
        (SIGMA_MOE | {"ffn_num_experts_per_tok": 5}, "ffn_num_experts_per_tok=5 must be at most ffn_num_experts=4"),
        (SIGMA_MOE | {"ffn_gating": "softmax_chosen"}, "ffn_gating='softmax_chosen' must be 'sigmoid' or 'softmax'"),
        (SIGMA_MOE | {"ffn_entropy_loss_weight": -1}, "ffn_entropy_loss_weight=-1 must be a number of at least 0"),
        (SIGMA_MOE | {"intermediate_size": 100}, "intermediate_size=100 has no effect with feed_forward='sigma_moe'"),
        ({"router_threshold": 1.0}, "router_threshold=1.0 must be a number of at least 0 and below 1"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05 has no effect with norm='layernorm'"),
        ({"norm": "rmsnorm", "rms_norm_eps": 0.0}, "rms_norm_eps=0.0 must be a number above 0"),
        ({"use_bias": 1}, "use_bias=1 must be True or False"),
        ({"qk_norm": None}, "qk_norm=None must be True or False"),
        ({"attention": "mha", "expert_norm_init": True}, "expert_norm_init=True has no effect with attention='mha'"),
        ({"attention": "mha", "num_experts": 3}, "num_experts=3 has no effect with attention='mha'"),
        ({"attention": "mha", "gating": "softmax"}, "gating='softmax' has no effect with attention='mha'"),
        ({"num_key_value_heads": 1}, "num_key_value_heads=1 has no effect with attention='switchhead'"),
        ({"positions": "none", "rope_theta": 5.0}, "rope_theta=5.0 has no effect with positions='none'"),
        ({"num_experts": 3, "num_experts_per_tok": 4}, "num_experts_per_tok=4 must be at most num_experts=3"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0 must be an integer of at least 1"),
        (
            {"attention": "mha", "num_attention_heads": 4, "num_key_value_heads": 3},
            "num_key_value_heads=3 must be a div",
        ),
        ({"hidden_size": 0}, "hidden_size=0 must be an integer of at least 1"),
        ({"hidden_size": "64"}, "hidden_size='64' must be an integer"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers=1.5 must be an integer"),
        ({"num_attention_heads": True}, "num_attention_heads=True must be an integer"),
        ({"memory_length": -1}, "memory_length=-1 must be an integer of at least 0"),
        ({"dropout": 1.0}, "dropout=1.0 must be a number of at least 0 and below 1"),
        ({"dropout": "0.1"}, "dropout='0.1' must be a number"),
        ({"rope_theta": float("inf")}, "rope_theta=inf must be a number above 0"),
        ({"expert_dropout": -0.1}, "expert_dropout=-0.1 must be"),
        ({"layer_norm_eps": 0}, "layer_norm_eps=0 must be a number above 0"),
        ({"rotary_fraction": 1.5}, "rotary_fraction=1.5 must be"),
        ({"rotary_fraction": 1.0, "head_dim": 41}, "head_dim=41 must be even where all channels rotate"),
        (SIGMA_MOE | {"ffn_synchronize_entropy": True}, "ffn_synchronize_entropy=True has no effect with ffn_entropy"),
        ({"shared_selection": 1}, "shared_selection=1 must be True or False"),
        ({"gating": "tanh"}, "gating='tanh' must be 'sigmoid' or 'softmax'"),
        ({"expert_projections": "vv"}, "expert_projections='vv' must be distinct letters of 'qkvo'"),
        ({"expert_projections": "vx"}, "expert_projections='vx' must be"),
        ({"eos_token_id": 8000}, "eos_token_id=8000 must be None or a token below vocab_size=8000"),
        ({"eos_token_id": [0, -1]}, "eos_token_id=\\[0, -1\\] must be"),
        ({"output_attentions": True}, "output_attentions=True must be False"),
    ],
)
def test_field_that_cannot_be_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        SwitchHeadConfig(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attention": "mha", "num_attention_heads": 4, "num_key_value_heads": 2, "positions": "none"},
        {"positions": "relative", "memory_length": 256, "expert_projections": "", "dropout": 0.1},
        {"vocab_size": 205, "eos_token_id": [1, 2], "pad_token_id": 0, "tie_word_embeddings": True},
        *(variant_config(name).to_diff_dict() for name in VARIANTS),
    ],
)
def test_configuration_survives_saving(fields, tmp_path):
    config = SwitchHeadConfig(**fields)
    config.save_pretrained(tmp_path)
    assert SwitchHeadConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_saved_file_states_every_field_so_that_later_defaults_do_not_change_it(tmp_path):
    config = small_config()
    config.save_pretrained(tmp_path)
    saved = (tmp_path / "config.json").read_text()
    own = vars(SwitchHeadConfig)["__annotations__"]
    assert [name for name in own if f'"{name}":' not in saved and name != "tie_word_embeddings"] == []


def test_experts_of_switchhead_have_defaults_and_dense_attention_has_none():
    switchhead, dense = SwitchHeadConfig(), SwitchHeadConfig(attention="mha")
    assert (switchhead.num_experts, switchhead.num_experts_per_tok) == (5, 2)
    assert (dense.num_experts, dense.num_experts_per_tok) == (None, None)


@pytest.mark.parametrize(
    ("attention", "gating"), [("switchhead", "sigmoid"), ("head_gating", "sigmoid"), ("moa", "softmax")]
)
def test_gates_are_by_default_those_of_the_layer(attention, gating):
    experts = {"num_experts": 4} if attention == "moa" else {}
    config = SwitchHeadConfig(attention=attention, **experts)
    layer = {"switchhead": SwitchHeadAttention, "moa": MoAAttention, "head_gating": HeadGatedAttention}[attention]
    assert config.gating == inspect.signature(layer).parameters["gating"].default == gating


def test_every_annotated_kind_can_be_built_and_no_other():
    hints = typing.get_type_hints(SwitchHeadConfig, localns={"torch": torch})
    for field, kinds in KINDS.items():
        assert set(typing.get_args(hints[field])) == set(kinds)


def test_fields_of_kinds_exist():
    fields = {name for kinds in KINDS.values() for kind in kinds.values() for name in kind.fields}
    assert fields <= set(vars(SwitchHeadConfig)["__annotations__"])


# A value for every field that a kind reads, other than the one in the small models.
OTHER_VALUES = dict(
    num_experts=6, num_experts_per_tok=1, expert_projections="qv", shared_selection=True, gating="softmax_chosen",
    expert_dropout=0.1, router_threshold=0.1, expert_norm_init=True, num_key_value_heads=1, rotary_fraction=0.9,
    rope_theta=5.0, intermediate_size=40, ffn_num_experts=6, ffn_num_experts_per_tok=1, ffn_expert_size=8,
    ffn_expert_dropout=0.1, ffn_gating="softmax", ffn_router_threshold=0.1, ffn_synchronize_entropy=True,
    layer_norm_eps=0.1, rms_norm_eps=0.1, qk_norm=True, use_bias=False, dropout=0.1,
)  # fmt: skip


def plain_attributes(config):
    """All that the modules of a model hold but tensors, and the tensors' shapes."""
    with torch.device("meta"):
        model = SwitchHeadForCausalLM(config)
    held = {name: {**vars(module), "config": None} for name, module in model.named_modules()}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    kept = (bool, int, float, str, tuple, Rotary)
    return shapes, {n: {k: v for k, v in values.items() if isinstance(v, kept)} for n, values in held.items()}


@pytest.mark.parametrize(("choice", "kind"), [(choice, kind) for choice, kinds in KINDS.items() for kind in kinds])
def test_every_field_that_a_kind_reads_reaches_the_model(choice, kind):
    base = {choice: kind} | (SIGMA_MOE | dict(ffn_entropy_loss_weight=0.1) if kind == "sigma_moe" else {})
    before = plain_attributes(small_config(**base))
    common = {"attention": ("qk_norm",), "feed_forward": ("dropout",)}.get(choice, ())
    common += ("use_bias",) if kind in ("mlp", "swiglu") else ()
    for name in (*KINDS[choice][kind].fields, *common):
        if name.endswith("_loss_weight"):  # the model's, not a layer's
            continue
        value = OTHER_VALUES[name]
        if name == "gating" and kind != "moa":
            value = "softmax"
        assert plain_attributes(small_config(**base | {name: value})) != before, name


def test_auxiliary_losses_are_those_of_the_chosen_kinds_with_a_weight_each():
    config = variant_config("moa with all losses", switch_loss_weight=0.0)
    assert config.aux_loss_weights == {
        "cv_loss": 0.1, "switch_loss": 0.0, "router_z_loss": 0.1, "ffn_entropy_loss": 0.1,
    }  # fmt: skip
    assert small_config().aux_loss_weights == {}
    assert small_config(**SIGMA_MOE).aux_loss_weights == {"ffn_entropy_loss": 0.0}


def test_only_transformer_xl_with_memory_bounds_the_cache():
    assert small_config(positions="relative", memory_length=6).sliding_window == 7
    assert small_config(positions="relative").sliding_window is None
    assert small_config(positions="rotary", memory_length=6).sliding_window is None

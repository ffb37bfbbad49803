import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from switchhead import MultiHeadAttention, Rotary, SwitchHeadAttention
from switchhead.convert import from_authors, to_authors
from switchhead.convert.authors import KINDS
from switchhead.nn import HeadGatedAttention, MoAAttention, SigmaMoE
from tests.helpers import relative_error

HERE = Path(__file__).parent.parent / "golden"
MORE = Path(__file__).parents[3] / "shared" / "golden"


def kind_of(path):
    return next((kind for kind in KINDS if path.name.startswith(kind)), None)


INPUTS = {"memory": "memory", "padding": "key_padding_mask"}
GOLDEN = sorted({p.name: p for folder in (MORE, HERE) for p in folder.glob("*.npz") if kind_of(p)}.items())


def load(path):
    file = np.load(path)
    return {prefix: {k[len(prefix) :]: file[k] for k in file.files if k.startswith(prefix)} for prefix in
            ("param/", "input/", "meta/", "output/grad_param/", "output/")}  # fmt: skip


@pytest.mark.parametrize("path", [path for _, path in GOLDEN], ids=[name[:-4] for name, _ in GOLDEN])
def test_output_and_every_gradient_agree_with_the_authors_layer(path):
    file = load(path)
    layer = from_authors(kind_of(path), file["param/"], causal="bidirectional" not in path.name, **file["meta/"])
    inputs = {name: torch.tensor(value) for name, value in file["input/"].items()}
    x = inputs["x"].requires_grad_()
    y = layer(x, **{ours: inputs[name] for name, ours in INPUTS.items() if name in inputs})
    y.backward(inputs["grad_y"])
    assert relative_error(y, torch.tensor(file["output/"]["y"])) < 1e-5
    assert relative_error(x.grad, torch.tensor(file["output/"]["grad_input/x"])) < 1e-5
    gradients, expected = to_authors(layer, grad=True), file["output/grad_param/"]
    assert set(gradients) == set(expected)
    for name, value in expected.items():
        assert relative_error(gradients[name], torch.tensor(value)) < 1e-5, name


@pytest.mark.parametrize("path", [path for _, path in GOLDEN], ids=[name[:-4] for name, _ in GOLDEN])
def test_values_return_to_the_authors_layout_unchanged(path):
    file = load(path)
    back = to_authors(from_authors(kind_of(path), file["param/"], **file["meta/"]))
    for name, value in back.items():
        assert torch.equal(value, torch.tensor(file["param/"][name])), name
    assert set(file["param/"]) - set(back) <= {"s_bias"}


SUBSETS = ["".join(s) for n in range(5) for s in itertools.combinations("qkvo", n)]


def random_layers():
    sizes = dict(d_model=16, n_heads=2, n_experts=3, d_head=6, k=2)
    yield "switchhead_rope", SwitchHeadAttention(**{**sizes, "n_experts": 1, "k": 1}, positions="rotary")
    yield "switchhead_xl", SwitchHeadAttention(**{**sizes, "n_experts": 1, "k": 1}, positions="relative")
    yield "switchhead_rope", SwitchHeadAttention(**sizes, positions=Rotary(fraction=1.0))
    yield "switchhead_rope", SwitchHeadAttention(**sizes)
    for experts in SUBSETS:
        for shared in (False, True) if {"v", "o"} <= set(experts) else (False,):
            layer = SwitchHeadAttention(
                **sizes, positions="relative", expert_projections=experts, shared_selection=shared
            )
            yield "research_xl", layer
    one = dict(n_experts=1, k=1, expert_projections="o")
    yield "research_xl", SwitchHeadAttention(**{**sizes, **one}, positions="relative")
    yield "research_dense_xl", MultiHeadAttention(d_model=16, n_heads=2, d_head=6, positions="relative")
    for gating in ("softmax", "softmax_chosen", "sigmoid"):
        yield (
            "research_moa",
            MoAAttention(d_model=16, n_heads=2, n_experts=5, d_head=6, positions="relative", gating=gating),
        )
    for gating in ("softmax", "sigmoid"):
        yield "research_sigma_moe", SigmaMoE(d_model=16, n_experts=5, expert_size=6, k=2, gating=gating)


MODES = {
    "softmax": dict(mode="moa"),
    "softmax_chosen": dict(mode="my", selection_mode="softmax"),
    "sigmoid": dict(mode="my"),
}


@pytest.mark.parametrize(
    ("kind", "layer"), list(random_layers()), ids=lambda value: getattr(value, "expert_projections", value)
)
def test_to_authors_and_from_authors_are_inverse(kind, layer):
    layer.authors_kind = kind
    if kind == "research_dense_xl":
        meta = dict(state_size=16, n_heads=2, projection_size=6)
    elif kind == "research_moa":
        meta = dict(state_size=16, n_heads=2, n_experts=5, projection_size=6) | MODES[layer.router.gating]
    elif kind == "research_sigma_moe":
        mode = {"softmax": "gate", "sigmoid": "sigmoid"}[layer.router.gating]
        meta = dict(dmodel=16, n_experts=5, expert_size=6, n_heads=2, selection_mode=mode)
    elif kind.startswith("switchhead"):
        meta = dict(d_model=16, n_heads=2, n_experts=layer.n_experts, d_head=6, moe_k=layer.k)
        if kind == "switchhead_rope":
            meta["rotate_fraction"] = layer.positions.fraction if layer.positions else 0.0
    else:
        meta = dict(state_size=16, n_heads=2, n_experts=layer.n_experts, projection_size=6, moe_k=layer.k)
        meta["same_sel"] = layer.shared_selection
        meta |= {f"{p}_expert": p in layer.expert_projections for p in "qkvo"}
    again = from_authors(kind, to_authors(layer), **meta)
    x = torch.randn(2, 5, 16)
    assert torch.equal(again(x), layer(x))


# Which selection each expert projection of a research layer uses: q that of o, k that of v where these have experts,
# with same_sel v that of o.
SELECTIONS = {
    "q": {"q"}, "k": {"k"}, "v": {"v"}, "o": {"o"}, "qk": {"q", "k"}, "qo": {"o"}, "kv": {"v"}, "qv": {"q", "v"},
    "ko": {"o", "k"}, "qkv": {"q", "v"}, "qko": {"o", "k"}, "": set(),
}  # fmt: skip


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize(
    ("experts", "selections"), [*SELECTIONS.items(), *((e, {"o", "v"}) for e in ("vo", "qvo", "kvo", "qkvo"))]
)
def test_research_layers_select_as_the_authors_do(experts, selections, same):
    if {"v", "o"} <= set(experts) and same:
        selections = {"o"}
    shape = {"o": (16, 12)}
    params = {
        f"projections.{p}": torch.randn(6, *((6, 16) if p == "o" else (16, 6)))
        if p in experts
        else torch.randn(shape.get(p, (12, 16)))
        for p in "qkvo"
    }
    params |= {f"selections.{p}": torch.randn(6, 16) for p in selections} | {"pos_to_pk": torch.randn(12, 16)}
    meta = dict(state_size=16, n_heads=2, n_experts=3, projection_size=6, moe_k=2, same_sel=same)
    layer = from_authors("research_xl", params, **meta, **{f"{p}_expert": p in experts for p in "qkvo"})
    back = to_authors(layer)
    assert set(back) == set(params)
    assert all(torch.equal(back[name], params[name]) for name in params)


def test_single_expert_layer_has_the_documented_layout():
    layer = SwitchHeadAttention(d_model=16, n_heads=2, n_experts=1, d_head=6, k=1, positions="rotary")
    shapes = {name: tuple(value.shape) for name, value in to_authors(layer).items()}
    assert shapes == {"q.weight": (12, 16), "k.weight": (12, 16), "v": (12, 16), "o": (16, 12), "sel_o": (2, 16)}
    x = torch.randn(1, 3, 16)
    plain = layer.o_proj.weight.flatten(0, 2).mT  # [D, H*d]
    ours = to_authors(layer)["o"]
    assert torch.equal(plain, ours)
    gates = torch.sigmoid(x @ to_authors(layer)["sel_o"].mT)  # [B, T, H]
    assert torch.allclose(layer.destination_router(x[0]).gates[..., 0], gates[0])


def test_faults_are_named():
    layer = SwitchHeadAttention(d_model=16, n_heads=2, n_experts=3, d_head=6, k=2, positions="rotary")
    params, meta = to_authors(layer), dict(d_model=16, n_heads=2, n_experts=3, d_head=6, moe_k=2)
    with pytest.raises(ValueError, match="kind='rope' is unknown"):
        from_authors("rope", params, **meta)
    with pytest.raises(ValueError, match=r"missing \['sel_v'\]"):
        from_authors("switchhead_rope", {k: v for k, v in params.items() if k != "sel_v"}, **meta)
    with pytest.raises(ValueError, match="lacks 'moe_k'"):
        from_authors("switchhead_rope", params, **{k: v for k, v in meta.items() if k != "moe_k"})
    with pytest.raises(ValueError, match=r"unknown keys \['n_head'\]"):
        from_authors("switchhead_rope", params, **meta, n_head=2)
    with pytest.raises(ValueError, match="does not fit meta"):
        from_authors("switchhead_rope", params, **{**meta, "n_experts": 4})
    with pytest.raises(ValueError, match="no gradient"):
        to_authors(layer, grad=True)
    sizes = dict(d_model=16, n_heads=2, n_experts=3, d_head=6, k=2)
    with pytest.raises(ValueError, match="no layer like this"):
        to_authors(SwitchHeadAttention(**sizes))
    shared = dict(positions="relative", expert_projections="ko", shared_selection=True)
    with pytest.raises(ValueError, match="no layer like this"):
        to_authors(SwitchHeadAttention(**sizes, **shared))
    meta = dict(state_size=16, n_heads=2, n_experts=1, projection_size=6, moe_k=1)
    with pytest.raises(ValueError, match="gates its single expert in each of 'qkvo'"):
        from_authors("research_xl", {}, **meta)


def test_the_order_of_expert_projections_does_not_matter():
    layer = SwitchHeadAttention(
        d_model=16, n_heads=2, n_experts=3, d_head=6, k=2, positions="rotary", expert_projections="ov"
    )
    assert set(to_authors(layer)) == {"q.weight", "k.weight", "v", "o", "sel_v", "sel_o"}


def test_what_the_authors_layout_cannot_say_is_refused():
    sizes = dict(d_model=16, n_heads=2, n_experts=3, d_head=6, k=2, positions="relative")
    pool = dict(d_model=16, n_experts=3, expert_size=6, k=2)
    refused = [
        (SwitchHeadAttention(**sizes, gating="softmax"), "'softmax' cannot be converted"),
        (SwitchHeadAttention(**sizes, router_threshold=0.1), "no threshold; 0.1 cannot be converted"),
        (SigmaMoE(**pool, router_threshold=0.1), "no threshold; 0.1 cannot be converted"),
        (SwitchHeadAttention(**sizes, qk_norm=True), "qk_norm=True cannot be converted"),
        (MultiHeadAttention(d_model=16, n_heads=2, d_head=6, positions="relative", qk_norm=True), "qk_norm=True"),
        (HeadGatedAttention(d_model=16, n_heads=2, d_head=6, k=1, positions="relative"), "no layer like this one"),
        (MoAAttention(d_model=16, n_heads=2, n_experts=3, d_head=6, positions="rotary"), "no layer like this one"),
    ]
    for layer, message in refused:
        with pytest.raises(ValueError, match=message):
            to_authors(layer)


def test_unknown_modes_of_moa_and_sigma_moe_are_named():
    with pytest.raises(ValueError, match=r"unknown modes \('my', 'tanh'\)"):
        from_authors("research_moa", {}, state_size=16, n_heads=2, projection_size=6, selection_mode="tanh")
    meta = dict(dmodel=16, n_experts=5, expert_size=6, n_heads=2, selection_mode="sinkhorn")
    with pytest.raises(ValueError, match="unknown modes sinkhorn"):
        from_authors("research_sigma_moe", {}, **meta)

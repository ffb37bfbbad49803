"""Layers of the paper's authors, by parameter names and layouts, to ours and back.

Two families exist: the stand-alone layers (`switchhead_rope`, `switchhead_xl`) and those of the research code
(`research_xl`, `research_dense_xl`, `research_moa`, `research_sigma_moe`). A kind is described once, by a list of
`_Field`s: our parameter, the authors' name for it, and the two layouts' relation; both directions follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from switchhead.nn import MoAAttention, MultiHeadAttention, Relative, Rotary, SigmaMoE, SwitchHeadAttention

KINDS = (
    "switchhead_rope",
    "switchhead_xl",
    "research_xl",
    "research_dense_xl",
    "research_moa",
    "research_sigma_moe",
)
Layer = SwitchHeadAttention | MultiHeadAttention | MoAAttention | SigmaMoE

# The authors' `mode` and `selection_mode` by our gating; in MoA's mode `moa` the second has no effect.
_MOA_MODES = {"softmax": ("moa", None), "sigmoid": ("my", "sigmoid"), "softmax_chosen": ("my", "softmax")}
_SIGMA_MOE_MODES = {"sigmoid": "sigmoid", "softmax": "gate"}


class _Field(NamedTuple):
    """One of the authors' parameters as a function of ours, and back."""

    theirs: str
    ours: tuple[str, ...]
    to_ours: Callable[[Tensor], tuple[Tensor, ...]]
    to_theirs: Callable[..., Tensor]


def from_authors(kind: str, params: Mapping[str, Tensor | np.ndarray], *, causal: bool = True, **meta: object) -> Layer:
    """Build our layer from the authors' parameters.

    Args:
        kind: one of `KINDS`.
        params: the authors' parameters by their names, tensors or arrays; `s_bias` of the dense layer has no effect
            and is dropped.
        causal: whether the layer is to mask later keys; the authors pass masks from outside.
        **meta: constructor arguments by the authors' names: `d_model, n_heads, n_experts, d_head, moe_k,
            rotate_fraction` (0.5; 0: no positions), or `state_size, n_heads, n_experts, projection_size, moe_k,
            {q,k,v,o}_expert` (True), `same_sel` (False; as theirs, without effect unless v and o both have experts).
            MoA: `n_heads` (the active ones), `mode` ("moa" or "my"), `selection_mode` ("sigmoid" or "softmax", of mode
            "my"); sigma-MoE: `dmodel, n_experts, expert_size, n_heads` (its k), `selection_mode` ("sigmoid" or "gate").

    Raises:
        ValueError: unknown kind or meta key, a missing or unexpected parameter, a shape that does not fit, or a
            research layer with one gated expert in q, k or v, which ours leaves ungated.
    """
    layer: Any = _build(kind, causal, {name: _plain(value) for name, value in meta.items()})
    layer.authors_kind = kind  # research and stand-alone layers differ in names alone
    params = {name: torch.as_tensor(value) for name, value in params.items() if name != "s_bias"}
    fields = _fields(layer, kind)
    expected, given = {field.theirs for field in fields}, set(params)
    if expected != given:
        raise ValueError(
            f"parameters of a {kind} layer with this meta are {sorted(expected)}; "
            f"missing {sorted(expected - given)}, unexpected {sorted(given - expected)}"
        )
    state = {}
    for field in fields:
        try:
            state.update(zip(field.ours, field.to_ours(params[field.theirs]), strict=True))
        except RuntimeError as error:
            shape = tuple(params[field.theirs].shape)
            raise ValueError(f"{field.theirs} has shape {shape}, which does not fit meta {meta}") from error
    for name, parameter in layer.named_parameters():
        if state[name].shape != parameter.shape:
            found, wanted = tuple(state[name].shape), tuple(parameter.shape)
            raise ValueError(f"{name} would be {found} from the authors' parameters, but {wanted} by meta {meta}")
    dtype = next(iter(state.values())).dtype
    layer.to(dtype).load_state_dict(state)
    return layer


def to_authors(module: Layer, grad: bool = False) -> dict[str, Tensor]:
    """The layer's parameters, or their gradients, by the authors' names and layouts.

    Raises:
        ValueError: the authors have no such layer, the layer has an option that theirs lack, or a parameter has no
            gradient (a missing one would look like a zero).
    """
    _refuse_options(module)
    kind = getattr(module, "authors_kind", None) or _nearest_kind(module)
    tensors = {}
    for name, parameter in module.named_parameters():
        value = parameter.grad if grad else parameter.detach()
        if value is None:
            raise ValueError(f"{name} has no gradient; call backward() before to_authors(module, grad=True)")
        tensors[name] = value
    return {field.theirs: field.to_theirs(*(tensors[name] for name in field.ours)) for field in _fields(module, kind)}


def _nearest_kind(module: nn.Module) -> str:
    """Kind of a layer that did not come from the authors: the stand-alone one where it can express the layer."""
    positions = getattr(module, "positions", None)
    if isinstance(module, SigmaMoE):
        return "research_sigma_moe"
    if isinstance(module, MoAAttention) and isinstance(positions, Relative):
        return "research_moa"
    if type(module) is MultiHeadAttention and isinstance(positions, Relative):  # no gated heads
        if module.n_kv_heads == module.n_heads:
            return "research_dense_xl"
    elif isinstance(module, SwitchHeadAttention) and positions is not None:
        experts = module.expert_projections
        standalone = experts == ("vo" if module.n_experts > 1 else "o") and not module.shared_selection
        if standalone:
            return "switchhead_rope" if isinstance(positions, Rotary) else "switchhead_xl"
        if isinstance(positions, Relative) and (not module.shared_selection or {"v", "o"} <= set(experts)):
            return "research_xl"
    raise ValueError(f"the authors have no layer like this one: {module}")


def _refuse_options(module: nn.Module) -> None:
    """The authors' layers have neither of these, so their parameters alone would say something else."""
    if getattr(module, "qk_norm", None) is not None:
        raise ValueError("the authors' layers do not norm queries and keys; qk_norm=True cannot be converted")
    for name in ("router", "source_router", "destination_router"):
        router = getattr(module, name, None)
        if router is None:
            continue
        if router.threshold:
            raise ValueError(f"the authors' routers have no threshold; {router.threshold} cannot be converted")
        if isinstance(module, SwitchHeadAttention) and router.gating != "sigmoid":
            raise ValueError(f"the authors' SwitchHead has sigmoid gates; {router.gating!r} cannot be converted")


def _plain(value: object) -> object:
    """0-d arrays, as numpy files hold them, to Python numbers."""
    return value.item() if isinstance(value, np.ndarray | np.generic | Tensor) else value


def _build(kind: str, causal: bool, meta: dict) -> Layer:
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is unknown; use one of {', '.join(KINDS)}")
    research = kind.startswith("research")
    given = dict(meta)

    def take(name: str, *default: object) -> Any:
        if name not in given and not default:
            raise ValueError(f"meta of kind {kind} lacks {name!r}")
        return given.pop(name, *default)

    def choose(modes: Mapping[str, object], given: object) -> Any:
        for gating, mode in modes.items():
            if mode == given:
                return gating
        raise ValueError(f"meta of kind {kind} has unknown modes {given}; use one of {list(modes.values())}")

    if kind == "research_sigma_moe":
        layer = SigmaMoE(
            d_model=take("dmodel"),
            n_experts=take("n_experts"),
            expert_size=take("expert_size"),
            k=take("n_heads"),
            gating=choose(_SIGMA_MOE_MODES, take("selection_mode", "sigmoid")),
        )
        _refuse_unknown(kind, given)
        return layer
    sizes: dict = {
        "d_model": take("state_size" if research else "d_model"),
        "n_heads": take("n_heads"),
        "d_head": take("projection_size" if research else "d_head"),
        "causal": causal,
        "positions": Relative(),
    }
    if kind == "switchhead_rope":
        fraction = take("rotate_fraction", 0.5)
        sizes["positions"] = Rotary(fraction=fraction) if fraction else None
    if kind == "research_dense_xl":
        layer = MultiHeadAttention(**sizes)
    elif kind == "research_moa":
        mode, selection = take("mode", "my"), take("selection_mode", "sigmoid")
        gating = choose(_MOA_MODES, (mode, None if mode == "moa" else selection))
        layer = MoAAttention(**sizes, n_experts=take("n_experts"), gating=gating)
    else:
        n_experts = take("n_experts")
        experts = "".join(p for p in "qkvo" if take(f"{p}_expert", True)) if research else "vo"
        if research and n_experts == 1 and experts not in ("", "o"):
            raise ValueError(
                f"a {kind} layer gates its single expert in each of {experts!r}; ours gates the output alone, so "
                "n_experts=1 needs q_expert, k_expert and v_expert False"
            )
        layer = SwitchHeadAttention(
            **sizes,
            n_experts=n_experts,
            k=take("moe_k"),
            expert_projections=experts,
            shared_selection=research and take("same_sel", False) and {"v", "o"} <= set(experts),
        )
    _refuse_unknown(kind, given)
    return layer


def _refuse_unknown(kind: str, keys: Mapping[str, object]) -> None:
    if keys:
        raise ValueError(f"meta of kind {kind} has unknown keys {sorted(keys)}")


def _same(name: str, ours: str) -> _Field:
    return _Field(name, (ours,), lambda t: (t,), lambda t: t)


def _per_expert(name: str, ours: str, heads: int, experts: int) -> _Field:
    """`[H*E, ...]` of theirs, `[H, E, ...]` of ours: experts and routers."""
    return _Field(name, (ours,), lambda t: (t.unflatten(0, (heads, experts)),), lambda t: t.flatten(0, 1))


def _pool(name: str, ours: str) -> _Field:
    """`[E, ...]` of theirs, `[1, E, ...]` of ours: experts, and their router, of one pool."""
    return _Field(name, (ours,), lambda t: (t[None],), lambda t: t[0])


def _fields(layer: nn.Module, kind: str) -> list[_Field]:
    if isinstance(layer, SigmaMoE):
        return [
            _pool("keys", "up_proj.weight"),
            _pool("values", "down_proj.weight"),
            _pool("expert_sel", "router.weight"),
        ]
    if isinstance(layer, MoAAttention):
        return [
            _pool("data_to_q", "q_proj.weight"),
            _Field(  # columns: those of the keys, then those of the values
                "data_to_kv",
                ("k_proj.weight", "v_proj.weight"),
                lambda t: tuple(t.mT.chunk(2)),
                lambda k, v: torch.cat([k, v]).mT,
            ),
            _pool("out_proj", "o_proj.weight"),
            _same("pos_to_pk", "position_proj.weight"),
            _pool("sel_dst", "router.weight"),
            _same("scale", "scale"),
        ]
    if isinstance(layer, MultiHeadAttention):
        heads, d = layer.n_heads, layer.d_head
        return [
            _same("data_to_q.weight", "q_proj.weight"),
            _Field(  # rows of each head: d for its keys, then d for its values
                "data_to_kv.weight",
                ("k_proj.weight", "v_proj.weight"),
                lambda t: tuple(part.flatten(0, 1) for part in t.unflatten(0, (heads, 2, d)).unbind(1)),
                lambda k, v: torch.stack([k.unflatten(0, (heads, d)), v.unflatten(0, (heads, d))], 1).flatten(0, 2),
            ),
            _same("multi_head_merge.weight", "o_proj.weight"),
            _same("pos_to_pq.weight", "position_proj.weight"),
            _same("global_content_bias", "content_bias"),
            _same("global_pos_bias", "position_bias"),
            _same("scale", "scale"),
        ]
    assert isinstance(layer, SwitchHeadAttention)
    return _switchhead_fields(layer, research=kind == "research_xl")


def _switchhead_fields(layer: SwitchHeadAttention, *, research: bool) -> list[_Field]:
    heads, experts, d = layer.n_heads, layer.n_experts, layer.d_head
    fields = []
    for p in "qkvo":
        theirs = f"projections.{p}" if research else {"q": "q.weight", "k": "k.weight"}.get(p, p)
        ours = f"{p}_proj.weight"
        if p not in layer.expert_projections:
            fields.append(_same(theirs, ours))
        elif experts == 1 and not research:  # a plain output matrix [D, H*d] behind the gates
            to_ours, to_theirs = lambda t: (t.mT.unflatten(0, (heads, 1, d)),), lambda t: t.flatten(0, 2).mT
            fields.append(_Field(theirs, (ours,), to_ours, to_theirs))
        else:
            fields.append(_per_expert(theirs, ours, heads, experts))
    for router, serves in (("destination_router", "oq"), ("source_router", "vk")):
        if getattr(layer, router) is not None:
            first = next(p for p in serves if p in layer.expert_projections)
            theirs = f"selections.{first}" if research else f"sel_{first}"
            fields.append(_per_expert(theirs, f"{router}.weight", heads, experts))
    if layer.position_proj is not None:
        fields.append(_same("pos_to_pk", "position_proj.weight"))
    return fields

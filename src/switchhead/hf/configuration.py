"""Configuration of the language model."""

from __future__ import annotations

import difflib
import math
from dataclasses import fields
from typing import Any, Literal

from transformers import GenerationConfig, PreTrainedConfig

from switchhead.hf.kinds import KINDS

# Our layers' and the paper's names, which difflib does not lead to Hugging Face's.
_OF_PAPER = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "d_head": "head_dim",
    "n_experts": "num_experts",
    "k": "num_experts_per_tok",
    "d_ff": "intermediate_size",
    "n_layers": "num_hidden_layers",
}
# What transformers' own configuration accepts and stores without declaring it as a field.
_INHERITED = frozenset(
    {*PreTrainedConfig().to_dict(), *GenerationConfig().to_dict()}
    | {"attn_implementation", "experts_implementation", "name_or_path", "num_labels", "output_attentions"}
    | {"per_layer_config", "tie_last_hidden_states", "torch_dtype"}
)


class SwitchHeadConfig(PreTrainedConfig):
    """Configuration of `SwitchHeadModel` and `SwitchHeadForCausalLM`.

    Default sizes are those of the paper's 47M SwitchHead for WikiText-103 (arXiv 2312.07987), with rotary positions in
    place of relative ones. Names are Hugging Face's; the table in `docs/architecture.md` maps them to the paper's.

    Args:
        vocab_size: rows of the embedding and of the output layer.
        hidden_size: width of the residual stream.
        num_hidden_layers: blocks.
        attention: kind of attention: "switchhead", "mha" (dense: multi-head, grouped-query, multi-query), "moa"
            (mixture of attention heads) or "head_gating" (dense heads, of which each query uses a few).
        num_attention_heads: attention matrices in a layer; of MoA: experts that a query uses.
        num_key_value_heads: key and value heads of dense attention; None: as many as `num_attention_heads`.
        head_dim: width of a head; `num_attention_heads * head_dim` need not be `hidden_size`.
        num_experts: the paper's E, experts of each SwitchHead projection and head (None: 5), or of MoA's queries and
            outputs.
        num_experts_per_tok: experts of a SwitchHead head that a token uses, the paper's k, or heads that a query uses
            with head gating; None: 2.
        expert_projections: which of the projections q, k, v, o have experts.
        shared_selection: one router serves both the source and the destination side.
        gating: "sigmoid", or "softmax" over all experts (the paper's competitive ablation; MoA's own); of MoA also
            "softmax_chosen" over the chosen ones. None: "softmax" for MoA, else "sigmoid".
        expert_dropout: probability that an attention expert may not be chosen by a token, in training.
        router_threshold: dynamic k: of the attention experts chosen, only those whose gate exceeds it are used; 0: all.
        expert_norm_init: bring SwitchHead's initial experts to one norm across the expert axis.
        cv_loss_weight: of MoA's auxiliary loss on the squared coefficient of variation of the experts' loads.
        switch_loss_weight: of MoA's auxiliary loss on probability times frequency of the experts.
        router_z_loss_weight: of MoA's auxiliary loss on the size of the router's scores.
        qk_norm: root-mean-square norm of queries and keys in each head, before positions.
        positions: "none", "rotary" or "relative" (Transformer-XL).
        rotary_fraction: share of a head's channels that rotate.
        rope_theta: base of the rotary wavelengths.
        memory_length: hidden states of earlier chunks that a layer attends to, `(C - 1) * T` in the paper's letters;
            0: none. With relative positions it also bounds what generation looks back to.
        feed_forward: kind of feed-forward layer, "mlp" (ReLU), "swiglu" or "sigma_moe".
        intermediate_size: inner width of a dense feed-forward layer.
        ffn_num_experts: experts of sigma-MoE.
        ffn_num_experts_per_tok: experts of sigma-MoE that a token uses.
        ffn_expert_size: inner width of one of them.
        ffn_expert_dropout: probability that a feed-forward expert may not be chosen by a token, in training.
        ffn_gating: "sigmoid", or "softmax" over all experts.
        ffn_router_threshold: as `router_threshold`, for the feed-forward experts.
        ffn_entropy_loss_weight: of sigma-MoE's auxiliary loss, minus the entropy of the mean choice.
        ffn_synchronize_entropy: take that mean over the tokens of all ranks.
        norm: kind of norm, "layernorm" or "rmsnorm".
        layer_norm_eps: added to the variance.
        rms_norm_eps: added to the mean square.
        use_bias: biases in a dense feed-forward layer and in the output layer. Attention has none.
        dropout: after the embedding, inside the feed-forward, on both sublayer outputs, before the output layer.
        max_position_embeddings: tokens that the model saw at once in training. It limits nothing here; evaluation
            harnesses read it.
        tie_word_embeddings: the output layer shares the embedding's matrix.
        use_cache: whether `generate` keeps keys and values. A plain forward keeps them only with `use_cache=True`.
        bos_token_id: first token of a text.
        eos_token_id: ends generation.
        pad_token_id: fills batches.

    Raises:
        ValueError: a field that is unknown, out of range, or without effect on the chosen kinds; the message names it.
    """

    model_type = "switchhead"
    keys_to_ignore_at_inference = ["cache", "past_key_values", "memory"]  # noqa: RUF012 (a dataclass field otherwise)

    vocab_size: int = 8000
    hidden_size: int = 412
    num_hidden_layers: int = 16
    attention: Literal["switchhead", "mha", "moa", "head_gating"] = "switchhead"
    num_attention_heads: int = 2
    num_key_value_heads: int | None = None
    head_dim: int = 76
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    expert_projections: str = "vo"
    shared_selection: bool = False
    gating: Literal["sigmoid", "softmax", "softmax_chosen"] | None = None
    expert_dropout: float = 0.0
    router_threshold: float = 0.0
    expert_norm_init: bool = False
    cv_loss_weight: float = 0.0
    switch_loss_weight: float = 0.0
    router_z_loss_weight: float = 0.0
    qk_norm: bool = False
    positions: Literal["none", "rotary", "relative"] = "rotary"
    rotary_fraction: float = 0.5
    rope_theta: float = 10000.0
    memory_length: int = 0
    feed_forward: Literal["mlp", "swiglu", "sigma_moe"] = "mlp"
    intermediate_size: int = 2080
    ffn_num_experts: int | None = None
    ffn_num_experts_per_tok: int | None = None
    ffn_expert_size: int | None = None
    ffn_expert_dropout: float = 0.0
    ffn_gating: Literal["sigmoid", "softmax"] = "sigmoid"
    ffn_router_threshold: float = 0.0
    ffn_entropy_loss_weight: float = 0.0
    ffn_synchronize_entropy: bool = False
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    layer_norm_eps: float = 1e-5
    rms_norm_eps: float = 1e-6
    use_bias: bool = True
    dropout: float = 0.0
    max_position_embeddings: int = 512
    tie_word_embeddings: bool = False
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Refuse unknown names, fill in what depends on the kind, and validate."""
        self._refuse_unknown(kwargs)
        if self.attention == "switchhead":
            self.num_experts = 5 if self.num_experts is None else self.num_experts
        if self.attention in ("switchhead", "head_gating"):
            self.num_experts_per_tok = 2 if self.num_experts_per_tok is None else self.num_experts_per_tok
        if self.gating is None:
            self.gating = "softmax" if self.attention == "moa" else "sigmoid"
        super().__post_init__(**kwargs)
        self.check()

    def check(self) -> None:
        """Raise a ValueError that names the first field that cannot be.

        Runs at construction, and again when a model is built, since transformers assigns to fields in between.
        """
        self._check_kinds()
        self._check_ranges()
        self._check_relations()

    @property
    def aux_loss_weights(self) -> dict[str, float]:
        """Weight of every auxiliary loss that the chosen kinds have, attention's before the feed-forward's."""
        names = [*KINDS["attention"][self.attention].losses, *KINDS["feed_forward"][self.feed_forward].losses]
        return {name: getattr(self, f"{name}_weight") for name in names}

    @property
    def fields_without_effect(self) -> dict[str, tuple[str, str]]:
        """Fields that the chosen kinds do not read, each with a choice that reads it, `("attention", "moa")`."""
        unread: dict[str, tuple[str, str]] = {}
        for field, kinds in KINDS.items():
            for kind in kinds:
                for name in kinds[kind].fields:
                    if name not in kinds[getattr(self, field)].fields:
                        unread.setdefault(name, (field, kind))
        return unread

    @property
    def sliding_window(self) -> int | None:
        """How many keys a single query sees; transformers' caches read it to drop older ones.

        Transformer-XL generates with a memory of `memory_length` tokens. Keeping their keys and values is the same as
        keeping their hidden states and projecting them anew for each token.
        """
        return self.memory_length + 1 if self.positions == "relative" and self.memory_length else None

    @classmethod
    def _refuse_unknown(cls, kwargs: dict[str, Any]) -> None:
        known = [field.name for field in fields(cls)]
        for name in kwargs:
            if name in _INHERITED or name.startswith("_"):
                continue
            similar = [_OF_PAPER[name]] if name in _OF_PAPER else difflib.get_close_matches(name, known, n=1)
            raise ValueError(f"unknown field {name!r}" + (f"; did you mean {similar[0]!r}?" if similar else ""))

    def _check_kinds(self) -> None:
        for field, kinds in KINDS.items():
            self._require(field, getattr(self, field) in kinds, f"one of {', '.join(map(repr, kinds))}")
        defaults = {field.name: field.default for field in fields(self)} | {"gating": "sigmoid"}  # filled in
        for name, (field, kind) in self.fields_without_effect.items():
            if getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} has no effect with {field}={getattr(self, field)!r}; "
                    f"leave it out, or use {field}={kind!r}"
                )

    def _check_ranges(self) -> None:
        sizes = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim"]
        sizes += ["intermediate_size", "max_position_embeddings"]
        if self.attention in ("switchhead", "moa"):
            sizes += ["num_experts"]
        if self.attention in ("switchhead", "head_gating"):
            sizes += ["num_experts_per_tok"]
        if self.feed_forward == "sigma_moe":
            sizes += ["ffn_num_experts", "ffn_num_experts_per_tok", "ffn_expert_size"]
        if self.num_key_value_heads is not None:
            sizes += ["num_key_value_heads"]
        for name in sizes:
            self._require(name, _is_integer(getattr(self, name), minimum=1), "an integer of at least 1")
        self._require("memory_length", _is_integer(self.memory_length, minimum=0), "an integer of at least 0")
        shares = ("dropout", "expert_dropout", "ffn_expert_dropout", "router_threshold", "ffn_router_threshold")
        for name in shares:
            value = getattr(self, name)
            self._require(name, _is_number(value) and 0 <= value < 1, "a number of at least 0 and below 1")
        for name in (field.name for field in fields(self) if field.name.endswith("_loss_weight")):
            value = getattr(self, name)
            self._require(name, _is_number(value) and value >= 0, "a number of at least 0")
        for name in ("layer_norm_eps", "rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            self._require(name, _is_number(value) and value > 0, "a number above 0")
        fraction = self.rotary_fraction
        self._require("rotary_fraction", _is_number(fraction) and 0 < fraction <= 1, "a number above 0 and at most 1")
        flags = ("shared_selection", "expert_norm_init", "qk_norm", "use_bias", "ffn_synchronize_entropy")
        for name in (*flags, "tie_word_embeddings", "use_cache"):
            self._require(name, isinstance(getattr(self, name), bool), "True or False")
        gatings = ["sigmoid", "softmax", *(["softmax_chosen"] if self.attention == "moa" else [])]
        self._require("gating", self.gating in gatings, " or ".join(map(repr, gatings)))
        self._require("ffn_gating", self.ffn_gating in ("sigmoid", "softmax"), "'sigmoid' or 'softmax'")
        self._require(
            "expert_projections", _are_distinct(self.expert_projections, "qkvo"), "distinct letters of 'qkvo'"
        )
        self._require("output_attentions", not self.output_attentions, "False: the fused attention keeps no weights")

    def _check_relations(self) -> None:
        choices = {
            "switchhead": ("num_experts_per_tok", "num_experts"),
            "moa": ("num_attention_heads", "num_experts"),
            "head_gating": ("num_experts_per_tok", "num_attention_heads"),
            "sigma_moe": ("ffn_num_experts_per_tok", "ffn_num_experts"),
        }
        for kind in (self.attention, self.feed_forward):
            if kind in choices:
                chosen, available = choices[kind]
                wanted = f"at most {available}={getattr(self, available)}"
                self._require(chosen, getattr(self, chosen) <= getattr(self, available), wanted)
        if self.num_key_value_heads is not None:
            wanted = f"a divisor of num_attention_heads={self.num_attention_heads}"
            self._require("num_key_value_heads", self.num_attention_heads % self.num_key_value_heads == 0, wanted)
        if self.positions == "rotary" and self.rotary_fraction == 1:
            self._require("head_dim", self.head_dim % 2 == 0, "even where all channels rotate (or rotary_fraction < 1)")
        if self.ffn_synchronize_entropy and not self.ffn_entropy_loss_weight:
            raise ValueError("ffn_synchronize_entropy=True has no effect with ffn_entropy_loss_weight=0")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            ids = value if isinstance(value, list) else [] if value is None else [value]
            inside = all(_is_integer(i, minimum=0) and i < self.vocab_size for i in ids)
            self._require(name, inside, f"None or a token below vocab_size={self.vocab_size}")

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise ValueError(f"{name}={getattr(self, name)!r} must be {wanted}")


def _is_integer(value: object, *, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_distinct(letters: object, alphabet: str) -> bool:
    return isinstance(letters, str) and len(set(letters)) == len(letters) and set(letters) <= set(alphabet)

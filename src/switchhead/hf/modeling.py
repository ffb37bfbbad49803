"""The language model: embedding, pre-norm blocks, final norm, output layer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import can_return_tuple

from switchhead.hf.compat import CACHE_NAME, named_cache, one_cache
from switchhead.hf.configuration import SwitchHeadConfig
from switchhead.hf.kinds import ATTENTION, FEED_FORWARD, NORM
from switchhead.hf.masks import fixed_cache_mask, layer_masks
from switchhead.hf.outputs import SwitchHeadCausalLMOutput, SwitchHeadModelOutput, aux_outputs
from switchhead.hf.router_logits import RouterLogits
from switchhead.nn import Block
from switchhead.nn.dropout import Dropout
from switchhead.ops import chunked_cross_entropy
from switchhead.ops.dtypes import compute_dtype


class SwitchHeadLayer(GradientCheckpointingLayer, Block):
    """A block of the configured kinds, whose activations Hugging Face knows how to recompute."""

    def __init__(self, config: SwitchHeadConfig) -> None:
        norm = NORM[config.norm].build
        super().__init__(
            attention=ATTENTION[config.attention].build(config),
            feed_forward=FEED_FORWARD[config.feed_forward].build(config),
            attention_norm=norm(config),
            feed_forward_norm=norm(config),
            dropout=config.dropout,
        )

    def forward(self, x: Float[Tensor, "batch T d_model"], *, return_aux: bool = False, **inputs: Any) -> Any:
        """As `Block.forward`, but auxiliary losses follow the output as tensors of one tuple.

        Reentrant checkpointing would not find them in a dictionary.
        """
        output = super().forward(x, return_aux=return_aux, **inputs)
        return (output[0], *output[1].values()) if return_aux else output


class SwitchHeadPreTrainedModel(PreTrainedModel):
    """Initialisation and loading, shared by all models."""

    config: SwitchHeadConfig
    config_class = SwitchHeadConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["SwitchHeadLayer"]  # noqa: RUF012 (transformers' own spelling)
    _supports_sdpa = True
    _can_compile_fullgraph = True

    def __init__(self, config: SwitchHeadConfig) -> None:
        config.check()
        super().__init__(config)

    def post_init(self) -> None:
        """Finish construction, keeping the weights that the layers drew for themselves."""
        if not any(parameter.is_meta for parameter in self.parameters()):
            for module in self.modules():
                module._is_hf_initialized = True  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
        super().post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Draw one module anew: needed only for models built on the meta device and never loaded."""
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.hidden_size**-0.5)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """Call `_init_weights` for all that was not loaded, containers included.

        In models outside its own package, transformers passes over modules without parameters of their own.
        """
        if any(not getattr(parameter, "_is_hf_initialized", False) for parameter in module.parameters()):
            super()._initialize_weights(module, is_custom_code=False)

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load a checkpoint; arguments as in `transformers.PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: tensors that the checkpoint lacks (transformers would draw them at random) or has too many.
        """
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, info = loaded
        faults = [
            f"{kind}: {_names(info[f'{kind}_keys'])}" for kind in ("missing", "unexpected") if info[f"{kind}_keys"]
        ]
        if faults:
            raise ValueError(
                f"the checkpoint does not fit {cls.__name__} ({'; '.join(faults)}); "
                "it was saved by another class, version or configuration"
            )
        return (model, info) if output_loading_info else model


class SwitchHeadModel(SwitchHeadPreTrainedModel):
    """Embedding, blocks and final norm: token ids to hidden states.

    Args:
        config: the kinds and sizes.
    """

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012 (a language model's body loads without its head)

    def __init__(self, config: SwitchHeadConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=config.hidden_size**-0.5)
        self.embedding_dropout = Dropout(config.dropout)
        self.layers = nn.ModuleList(SwitchHeadLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = NORM[config.norm].build(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "batch T"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "*batch T"] | None = None,
        *,
        memory: Sequence[Float[Tensor, "batch M d_model"]] | None = None,
        cu_seqlens: Int[Tensor, " documents+1"] | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "batch T d_model"] | None = None,
        use_cache: bool = False,
        output_hidden_states: bool | None = None,
        output_router_logits: bool = False,
        **kwargs: Any,
    ) -> SwitchHeadModelOutput:
        """Hidden states of all positions.

        Args:
            input_ids: tokens.
            attention_mask: 1 = attend, 0 = padding; see `switchhead.hf.masks.layer_masks`.
            position_ids: positions for rotary channels; default: behind the cache or the memory.
            memory: `output.memory` of the previous chunk (Transformer-XL).
            cu_seqlens: several documents in a row, none of which sees another: where they begin in the flattened batch,
                from `switchhead.ops.document_boundaries(position_ids)`.
            cache: keys and values of earlier calls; the input is added to them.
            past_key_values: the same, under its name before transformers 5.24.
            inputs_embeds: in place of `input_ids`.
            use_cache: start a cache, where none is given.
            output_hidden_states: return the embedding and the output of every layer, the last one normed; default: as
                the configuration says.
            output_router_logits: return the scores of every router.
            **kwargs: options of other models as None or False.
        """
        _refuse(kwargs, allowed=())
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        hidden = self.embedding_dropout(self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds)
        cache = one_cache(cache, past_key_values)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        self._check_state(memory, cache, output_router_logits)
        if cache is not None and position_ids is None:
            position_ids = cache.get_seq_length() + torch.arange(hidden.shape[1], device=hidden.device)
        masks = layer_masks(
            attention_mask,
            batch_size=hidden.shape[0],
            n_queries=hidden.shape[1],
            memory_length=0 if memory is None else memory[0].shape[1],
            cache=cache,
            device=hidden.device,
            dtype=compute_dtype(hidden),
        )
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        weights = self.config.aux_loss_weights if self.training else {}
        return_aux = any(weights.values())
        states, kept, aux = [], [], []
        logits = RouterLogits(self.layers) if output_router_logits else None
        with logits or nullcontext():
            for index, layer in enumerate(self.layers):
                if wants_states:
                    states.append(hidden)
                past = None if memory is None else memory[index]
                if self.config.memory_length and cache is None:
                    kept.append(_remember(past, hidden, self.config.memory_length))
                bound = None if cache is None else _LayerCache(cache, index)
                hidden = layer(
                    hidden, memory=past, position_ids=position_ids, cache=bound, cu_seqlens=cu_seqlens,
                    return_aux=return_aux, **masks,
                )  # fmt: skip
                if return_aux:
                    hidden, *losses = hidden
                    aux.append(torch.stack(losses))
        hidden = self.norm(hidden)
        return SwitchHeadModelOutput(
            last_hidden_state=hidden,
            hidden_states=(*states, hidden) if wants_states else None,
            memory=tuple(kept) or None,
            router_logits=None if logits is None else logits.of_batch(len(hidden)),
            **aux_outputs(aux, weights),
            **named_cache(cache),
        )

    def _check_state(self, memory: Sequence[Tensor] | None, cache: Cache | None, output_router_logits: bool) -> None:
        """Refuse what cannot be combined."""
        if memory is not None:
            if not self.config.memory_length:
                raise ValueError("memory was given, but the configuration has memory_length=0")
            if cache is not None:
                raise ValueError("memory and cache exclude each other: a cache holds the earlier tokens already")
            if len(memory) != len(self.layers):
                raise ValueError(f"memory has {len(memory)} entries for {len(self.layers)} layers")
        if cache is not None and cache.is_compileable and self.config.positions == "relative":
            raise ValueError("relative positions need a cache that grows; use cache_implementation='dynamic'")
        replayed = (cache is not None or output_router_logits) and self.training and torch.is_grad_enabled()
        if replayed and any(layer.gradient_checkpointing for layer in self.layers):
            raise ValueError("activation checkpointing runs layers twice: use neither a cache nor output_router_logits")


class SwitchHeadForCausalLM(SwitchHeadPreTrainedModel, GenerationMixin):
    """Language model: token ids to scores of the next token.

    Args:
        config: the kinds and sizes.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (transformers' own spelling)

    def __init__(self, config: SwitchHeadConfig) -> None:
        super().__init__(config)
        self.model = SwitchHeadModel(config)
        self.output_dropout = Dropout(config.dropout)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.use_bias)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "batch T"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "*batch T"] | None = None,
        *,
        memory: Sequence[Float[Tensor, "batch M d_model"]] | None = None,
        cu_seqlens: Int[Tensor, " documents+1"] | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "batch T d_model"] | None = None,
        labels: Int[Tensor, "batch T"] | None = None,
        use_cache: bool = False,
        output_hidden_states: bool | None = None,
        output_router_logits: bool = False,
        logits_to_keep: int | Int[Tensor, " positions"] = 0,
        loss_chunk_length: int | None = None,
        **kwargs: Any,
    ) -> SwitchHeadCausalLMOutput:
        """Scores, and with labels the mean cross-entropy in nats, plus the auxiliary losses of training.

        Args:
            input_ids: tokens.
            attention_mask: 1 = attend, 0 = padding; see `switchhead.hf.masks.layer_masks`.
            position_ids: positions for rotary channels; default: behind the cache or the memory.
            memory: `output.memory` of the previous chunk (Transformer-XL).
            cu_seqlens: several documents in a row, none of which sees another: where they begin in the flattened batch,
                from `switchhead.ops.document_boundaries(position_ids)`.
            cache: keys and values of earlier calls; the input is added to them.
            past_key_values: the same, under its name before transformers 5.24.
            inputs_embeds: in place of `input_ids`.
            labels: the tokens again (they are shifted here); -100 = not scored.
            use_cache: start a cache, where none is given.
            output_hidden_states: return the embedding and the output of every layer, the last one normed; default: as
                the configuration says.
            output_router_logits: return the scores of every router.
            logits_to_keep: compute scores of the last positions only, or of these; 0: of all.
            loss_chunk_length: compute the loss over so many positions of the flattened batch at a time, without keeping
                scores: a large vocabulary then costs little memory, and scores are computed once more in backward.
            **kwargs: `shift_labels`, the token after each position in place of `labels`: a text cut into chunks needs
                it, whose last position is scored by the first token of the next chunk. `num_items_in_batch`, the
                scored tokens of all batches whose gradients are summed: the cross-entropy is a sum divided by it, and
                `aux_loss` counts as much as this batch's share of them. (`transformers.Trainer` takes every parameter
                of forward with "label" in its name for a column that its data must have, so these have none.) Options
                of other models as None or False.
        """
        options = _refuse(kwargs, allowed=("shift_labels", "num_items_in_batch"))
        targets, n_items = options.get("shift_labels"), options.get("num_items_in_batch")
        if targets is None and labels is not None:
            targets = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        output: SwitchHeadModelOutput = self.model(
            input_ids,
            attention_mask,
            position_ids,
            memory=memory,
            cu_seqlens=cu_seqlens,
            cache=one_cache(cache, past_key_values),
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_router_logits=output_router_logits,
            return_dict=True,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        assert output.last_hidden_state is not None
        hidden = self.output_dropout(output.last_hidden_state[:, kept])
        logits = loss = None
        if loss_chunk_length is not None:
            loss = self._chunked_loss(hidden, targets, loss_chunk_length, n_items)
        else:
            logits = self.lm_head(hidden)
            if targets is not None:
                loss = self.loss_function(
                    logits=logits,
                    labels=labels,
                    shift_labels=targets.contiguous(),
                    vocab_size=self.config.vocab_size,
                    num_items_in_batch=n_items,
                )
        aux_loss = output.aux_loss
        if loss is not None and aux_loss is not None:
            if n_items is not None:
                aux_loss = aux_loss * (targets != -100).sum() / n_items
            loss = loss + aux_loss
        return SwitchHeadCausalLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=output.hidden_states,
            memory=output.memory,
            router_logits=output.router_logits,
            aux_loss=aux_loss,
            aux_losses=output.aux_losses,
            **named_cache(getattr(output, CACHE_NAME)),
        )

    def _chunked_loss(
        self,
        hidden: Float[Tensor, "batch T d_model"],
        targets: Int[Tensor, "batch T"] | None,
        chunk_length: int,
        n_items: int | Tensor | None,
    ) -> Float[Tensor, ""]:
        if targets is None:
            raise ValueError("loss_chunk_length needs labels or shift_labels to compute a loss of")
        if targets.shape != hidden.shape[:2]:
            raise ValueError(f"labels must be {list(hidden.shape[:2])}, as the input; got {list(targets.shape)}")
        loss = chunked_cross_entropy(
            hidden.flatten(0, 1), self.lm_head.weight, self.lm_head.bias, targets.flatten(),
            chunk_length=chunk_length, reduction="mean" if n_items is None else "sum",
        )  # fmt: skip
        return loss if n_items is None else loss / n_items

    @staticmethod
    def create_masks_for_generate(
        config: SwitchHeadConfig,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The mask `[B, 1, T, S]`, True = attend, that `generate` prepares for a cache of fixed size.

        It calls this outside the compiled forward, with further arguments of its own.
        """
        fixed = one_cache(cache, past_key_values)
        assert fixed is not None
        return ~fixed_cache_mask(attention_mask, inputs_embeds.shape[1], fixed, inputs_embeds.device)


class _LayerCache:
    """One layer's part of a Hugging Face cache, as the attention layers see it."""

    def __init__(self, cache: Cache, layer: int) -> None:
        self.cache, self.layer = cache, layer

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values `[B, H, T, d]`; return all of them."""
        return self.cache.update(k, v, self.layer)


def _remember(memory: Tensor | None, hidden: Tensor, length: int) -> Float[Tensor, "batch M d_model"]:
    """The last hidden states, out of memory and input, without gradient."""
    hidden = hidden.detach()
    if memory is not None and hidden.shape[1] < length:
        hidden = torch.cat([memory.to(hidden.dtype), hidden], dim=1)
    return hidden[:, -length:]


def _refuse(options: dict[str, Any], allowed: Sequence[str]) -> dict[str, Any]:
    """The options that are allowed; an error for others that ask for something, rather than silence."""
    for name, value in options.items():
        if name not in allowed and value is not None and value is not False:
            hint = "; attention weights are not kept, docs/use.md computes them" if name == "output_attentions" else ""
            raise TypeError(f"forward got {name}={value!r}, which this model does not know{hint}")
    return {name: value for name, value in options.items() if name in allowed}


def _names(keys: Sequence[str], limit: int = 10) -> str:
    more = f" and {len(keys) - limit} more" if len(keys) > limit else ""
    return ", ".join(sorted(keys)[:limit]) + more

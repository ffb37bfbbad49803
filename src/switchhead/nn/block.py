"""The pre-norm transformer block."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from switchhead.nn.attention import AuxLosses
from switchhead.nn.dropout import Dropout


class Block(nn.Module):
    """`x = x + dropout(attention(norm(x)))`, then `x + dropout(feed_forward(norm(x)))`.

    Args:
        attention: a layer with the interface of `SwitchHeadAttention`.
        feed_forward: a layer from `[..., d_model]` to itself, with the interface of `SigmaMoE`.
        attention_norm: applied to the attention's input, and to its memory.
        feed_forward_norm: applied to the feed-forward layer's input.
        dropout: probability of dropping an element of a sublayer's output, in training.
    """

    def __init__(
        self,
        *,
        attention: nn.Module,
        feed_forward: nn.Module,
        attention_norm: nn.Module,
        feed_forward_norm: nn.Module,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.feed_forward_norm, self.feed_forward = feed_forward_norm, feed_forward
        self.dropout = Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "batch T d_model"],
        *,
        memory: Float[Tensor, "batch M d_model"] | None = None,
        return_aux: bool = False,
        **attention_inputs: Any,
    ) -> Float[Tensor, "batch T d_model"] | tuple[Tensor, AuxLosses]:
        """One layer.

        Args:
            x: hidden states.
            memory: hidden states of the previous chunk before this block, un-normed.
            return_aux: return the auxiliary losses of both sublayers too; the feed-forward's names begin with `ffn_`.
            **attention_inputs: further arguments of the attention layer's forward (masks, position ids, cache).
        """
        memory = None if memory is None else self.attention_norm(memory)
        attended = self.attention(self.attention_norm(x), memory=memory, return_aux=return_aux, **attention_inputs)
        if not return_aux:
            x = x + self.dropout(attended)
            return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        attended, aux = attended
        x = x + self.dropout(attended)
        padding = None
        if attention_inputs.get("context") is None:  # whose tokens, not those of x, the mask would be about
            padding = attention_inputs.get("key_padding_mask")
            padding = None if padding is None else padding[:, padding.shape[1] - x.shape[1] :]  # memory stands first
        fed, of_feed_forward = self.feed_forward(self.feed_forward_norm(x), padding_mask=padding, return_aux=True)
        return x + self.dropout(fed), {**aux, **{f"ffn_{name}": loss for name, loss in of_feed_forward.items()}}

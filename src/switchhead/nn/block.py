"""The pre-norm transformer block."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn


class Block(nn.Module):
    """`x = x + dropout(attention(norm(x)))`, then `x + dropout(feed_forward(norm(x)))`.

    Args:
        attention: a layer with the interface of `SwitchHeadAttention`.
        feed_forward: a layer from `[..., d_model]` to itself.
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
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "batch T d_model"],
        *,
        memory: Float[Tensor, "batch M d_model"] | None = None,
        **attention_inputs,
    ) -> Float[Tensor, "batch T d_model"]:
        """One layer.

        Args:
            x: hidden states.
            memory: hidden states of the previous chunk before this block, un-normed.
            **attention_inputs: further arguments of the attention layer's forward (masks, position ids, cache).
        """
        memory = None if memory is None else self.attention_norm(memory)
        x = x + self.dropout(self.attention(self.attention_norm(x), memory=memory, **attention_inputs))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))

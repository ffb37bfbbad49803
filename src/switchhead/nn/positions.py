"""How attention knows where a token stands: rotary channels, or Transformer-XL's relative positions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from switchhead.ops.dtypes import at_least_float32
from switchhead.ops.rotary import rotary_table, rotate


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotation of the first channels of each head (RoFormer, arXiv 2104.09864).

    Channel i of the rotated part pairs with channel i + half; pair i turns by `position * base ** (-i / half)`.

    Attributes:
        fraction: share of the head's channels that rotate: `2 * floor(fraction * d_head / 2)` of them.
        base: wavelengths grow geometrically to `2 * pi * base`.
    """

    fraction: float = 0.5
    base: float = 10000.0

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise ValueError(f"rotary fraction={self.fraction} must be above 0 and at most 1")
        if self.base <= 0.0:
            raise ValueError(f"rotary base={self.base} must be positive")

    def rotated_width(self, d_head: int) -> int:
        """Channels that rotate, an even number; ValueError where all should and d_head is odd."""
        if self.fraction == 1.0 and d_head % 2:
            raise ValueError(f"d_head={d_head} is odd, so not all of it can rotate; use an even d_head or fraction < 1")
        return 2 * math.floor(self.fraction * d_head / 2)

    def table(self, positions: Int[Tensor, "*batch T"], d_head: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[..., T, half]` of the positions' angles, in dtype but float32 at least."""
        return rotary_table(positions, self.rotated_width(d_head) // 2, self.base, at_least_float32(dtype))

    def rotate(
        self, x: Float[Tensor, "batch heads T d_head"], table: tuple[Tensor, Tensor]
    ) -> Float[Tensor, "batch heads T d_head"]:
        """Turn the first channels of queries or keys; `table` is `[T, half]` or `[B, T, half]`."""
        return rotate(x.transpose(1, 2), *table).transpose(1, 2)  # in [B, T, H, d], as projections write and read heads


@dataclass(frozen=True, kw_only=True)
class Relative:
    """Transformer-XL's relative positions (arXiv 1901.02860): scores depend on source minus query index."""


def relative_distances(n_queries: int, n_keys: int, *, causal: bool, device: torch.device) -> Int[Tensor, " R"]:
    """Distances source - query that occur when queries are the last of the keys: `-(S-1) .. 0`, or `.. T-1`."""
    return torch.arange(-(n_keys - 1), 1 if causal else n_queries, device=device)


def sinusoids(distances: Int[Tensor, " R"], d_model: int, dtype: torch.dtype) -> Float[Tensor, "R d_model"]:
    """Sine on even channels and cosine on odd ones, in dtype but float32 at least."""
    dtype = at_least_float32(dtype)
    channels = torch.arange(0, d_model, 2, device=distances.device, dtype=dtype)
    angles = distances[:, None].to(dtype) * 10000.0 ** (-channels / d_model)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :d_model]


Positions = Rotary | Relative | None


def as_positions(positions: Positions | str, d_head: int) -> Positions:
    """The positions of a layer with this head width; a kind's name stands for its default options."""
    named = {"none": None, "rotary": Rotary(), "relative": Relative()}
    if isinstance(positions, str):
        if positions not in named:
            raise ValueError(f"positions={positions!r} is unknown; use {', '.join(named)}, Rotary() or Relative()")
        positions = named[positions]
    if isinstance(positions, Rotary):
        positions.rotated_width(d_head)  # raises where it cannot rotate
    elif positions is not None and not isinstance(positions, Relative):
        raise ValueError(f"positions must be None, a name, Rotary() or Relative(); got {type(positions).__name__}")
    return positions

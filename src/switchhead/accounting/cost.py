"""What a layer costs, and the ways to count it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Convention = Literal["consistent", "published", "executed"]
CONVENTIONS: tuple[Convention, ...] = get_args(Convention)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of one layer for one sequence.

    Attributes:
        macs: multiply-accumulate operations of the forward pass.
        floats: numbers the layer has to hold (projections, attention matrices, projected positions), of any dtype.
    """

    macs: int
    floats: int


def check_counting(convention: str, chunk_length: int) -> None:
    """Refuse an unknown convention and a sequence without tokens."""
    if convention not in CONVENTIONS:
        raise ValueError(f"unknown convention {convention!r}; choose one of {', '.join(CONVENTIONS)}")
    if chunk_length < 1:
        raise ValueError(f"chunk_length must be at least 1; got {chunk_length}")

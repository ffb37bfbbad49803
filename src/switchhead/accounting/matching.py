"""Configurations of equal size or equal cost, so that a comparison is about the architecture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from switchhead.accounting.attention import attention_cost
from switchhead.accounting.cost import Convention
from switchhead.accounting.parameters import count_parameters

if TYPE_CHECKING:
    from switchhead.hf import SwitchHeadConfig


def match_d_ff(config: SwitchHeadConfig, *, parameters: int) -> int:
    """The feed-forward width that brings the model closest to a number of parameters.

    The paper matches its models this way: the attention is chosen first and the feed-forward takes up the difference.

    Args:
        config: the model; its `intermediate_size` does not matter.
        parameters: the number to come close to, for example `count_parameters(dense).total`.

    Raises:
        ValueError: the model is larger than that even with a feed-forward of width 1, or its feed-forward is made of
            experts.
    """
    if config.feed_forward == "sigma_moe":
        raise ValueError("a feed-forward of experts has no intermediate_size to match; choose mlp or swiglu")
    without, per_unit = _line(lambda width: _parameters(config, intermediate_size=width), step=1)
    width = round((parameters - without) / per_unit)
    if width < 1:
        raise ValueError(
            f"cannot match {parameters:,} parameters: without feed-forwards the model has {without:,} already; "
            "choose fewer heads or experts, or a smaller head_dim"
        )
    return width


def match_parameters(config: SwitchHeadConfig, *, parameters: int, grain: int = 4) -> SwitchHeadConfig:
    """The model with the head width and feed-forward width that give it a number of parameters.

    The paper's rule: heads as wide as fit beside the feed-forward that `config` has (the dense model's), then the
    feed-forward takes what is left. With a grain of 4 it gives every head width in the paper's tables.

    Args:
        config: kinds, heads and experts; its `head_dim` does not matter, its `intermediate_size` is the least.
        parameters: the number to come close to.
        grain: the head width is a multiple of it.

    Raises:
        ValueError: not even the narrowest heads fit.
    """
    head_dim = _widest(lambda width: _parameters(config, head_dim=width), parameters, grain)
    if head_dim < 1:
        raise ValueError(
            f"cannot match {parameters:,} parameters: heads of width {grain} are too many of them already; "
            "choose fewer heads or experts, or a smaller intermediate_size"
        )
    narrowed = dataclasses.replace(config, head_dim=head_dim)
    if config.feed_forward == "sigma_moe":
        return narrowed
    return dataclasses.replace(narrowed, intermediate_size=match_d_ff(narrowed, parameters=parameters))


def match_macs(
    config: SwitchHeadConfig, *, macs: int, chunk_length: int, convention: Convention = "consistent", grain: int = 4
) -> SwitchHeadConfig:
    """The model with the widest heads whose attention costs at most a number of multiply-accumulates.

    Args:
        config: the model; its `head_dim` does not matter.
        macs: of one attention layer for one sequence, for example `attention_cost(dense, ...).macs`.
        chunk_length: tokens of the sequence.
        convention: how both are counted, see `attention_cost`.
        grain: the head width is a multiple of it.

    Raises:
        ValueError: not even the narrowest heads fit, or an unknown convention.
    """

    def cost(head_dim: int) -> int:
        resized = dataclasses.replace(config, head_dim=head_dim)
        return attention_cost(resized, chunk_length=chunk_length, convention=convention).macs

    head_dim = _widest(cost, macs, grain)
    if head_dim < 1:
        raise ValueError(
            f"cannot match {macs:,} multiply-accumulates: heads of width {grain} cost more already; "
            "choose fewer heads, or fewer experts per token"
        )
    return dataclasses.replace(config, head_dim=head_dim)


def _parameters(config: SwitchHeadConfig, **sizes: int) -> int:
    return count_parameters(dataclasses.replace(config, **sizes)).total


def _line(amount: Callable[[int], int], *, step: int) -> tuple[int, int]:
    """Value at 0, and slope, of what grows linearly with a width; `step` and its double are widths that can be."""
    first, second = amount(step), amount(2 * step)
    return 2 * first - second, (second - first) // step


def _widest(amount: Callable[[int], int], limit: int, grain: int) -> int:
    """The largest multiple of a grain at which an amount is within a limit; 0 or less where none is."""
    if grain < 1:
        raise ValueError(f"grain must be at least 1; got {grain}")
    without, per_unit = _line(amount, step=2 * grain)  # an even width, which can rotate as a whole
    return (limit - without) // per_unit // grain * grain

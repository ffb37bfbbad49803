"""Configurations of equal size, so that a comparison is about the architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
        ValueError: the model is larger than that even with a feed-forward of width 1.
    """
    # The count is linear in the width: one unit costs a column, a row and a bias in every layer.
    per_unit = config.num_hidden_layers * (2 * config.hidden_size + 1)
    without = count_parameters(config).total - per_unit * config.intermediate_size
    width = round((parameters - without) / per_unit)
    if width < 1:
        raise ValueError(
            f"cannot match {parameters:,} parameters: without feed-forwards the model has {without:,} already; "
            "choose fewer heads or experts, or a smaller head_dim"
        )
    return width

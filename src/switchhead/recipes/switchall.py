"""SwitchAll: experts in attention and feed-forward (table 3); and its feed-forward under dense attention."""

from __future__ import annotations

from switchhead.hf import SwitchHeadConfig
from switchhead.recipes.base import Recipe
from switchhead.recipes.registry import experiment
from switchhead.recipes.transformer_xl import (
    c4_47m_dense,
    c4_47m_switchhead,
    c4_262m_dense,
    c4_262m_switchhead,
    pes2o_47m_dense,
    pes2o_262m_dense,
    wikitext103_47m_dense,
    wikitext103_47m_switchhead,
    wikitext103_262m_dense,
)


@experiment(table="3")
def wikitext103_47m_switchall() -> Recipe:
    """Two heads with five experts, two at work; four of 16 feed-forward experts."""
    return _sigma_moe_47m(wikitext103_47m_switchhead())


@experiment(table="3")
def c4_47m_switchall() -> Recipe:
    """Two heads with five experts, three at work; four of 16 feed-forward experts."""
    return _sigma_moe_47m(c4_47m_switchhead())


@experiment(table="3")
def pes2o_47m_switchall() -> Recipe:
    """Two heads with five experts, three at work; four of 16 feed-forward experts."""
    return c4_47m_switchall().on("pes2o")


@experiment(table="3")
def wikitext103_262m_switchall() -> Recipe:
    """Four heads with four experts, two at work; four of 32 feed-forward experts."""
    return c4_262m_switchall().on("wikitext103")


@experiment(table="3")
def c4_262m_switchall() -> Recipe:
    """Four heads with four experts, two at work; four of 32 feed-forward experts."""
    return _sigma_moe_262m(c4_262m_switchhead()).with_model(expert_dropout=0.1)


@experiment(table="3")
def pes2o_262m_switchall() -> Recipe:
    """Four heads with four experts, two at work; four of 32 feed-forward experts."""
    return c4_262m_switchall().on("pes2o")


# The feed-forward of SwitchAll under dense attention: not in the paper.


@experiment()
def wikitext103_47m_sigma_moe() -> Recipe:
    """Ten ordinary heads; four of 16 feed-forward experts, as in wikitext103-47m-switchall."""
    return _sigma_moe_47m(wikitext103_47m_dense())


@experiment()
def c4_47m_sigma_moe() -> Recipe:
    """Ten ordinary heads; four of 16 feed-forward experts, as in c4-47m-switchall."""
    return _sigma_moe_47m(c4_47m_dense())


@experiment()
def pes2o_47m_sigma_moe() -> Recipe:
    """Ten ordinary heads; four of 16 feed-forward experts, as in pes2o-47m-switchall."""
    return _sigma_moe_47m(pes2o_47m_dense())


@experiment()
def wikitext103_262m_sigma_moe() -> Recipe:
    """Sixteen ordinary heads; four of 32 feed-forward experts, as in wikitext103-262m-switchall."""
    return _sigma_moe_262m(wikitext103_262m_dense())


@experiment()
def c4_262m_sigma_moe() -> Recipe:
    """Sixteen ordinary heads; four of 32 feed-forward experts, as in c4-262m-switchall."""
    return _sigma_moe_262m(c4_262m_dense())


@experiment()
def pes2o_262m_sigma_moe() -> Recipe:
    """Sixteen ordinary heads; four of 32 feed-forward experts, as in pes2o-262m-switchall."""
    return _sigma_moe_262m(pes2o_262m_dense())


def _sigma_moe_47m(recipe: Recipe) -> Recipe:
    return recipe.with_model(
        feed_forward="sigma_moe",
        intermediate_size=SwitchHeadConfig.intermediate_size,  # without meaning here, so at its default
        ffn_num_experts=16,
        ffn_num_experts_per_tok=4,
        ffn_expert_size=128,
        ffn_entropy_loss_weight=1e-4,
    ).with_training(grad_clip=0.25)


def _sigma_moe_262m(recipe: Recipe) -> Recipe:
    return _sigma_moe_47m(recipe).with_model(ffn_num_experts=32, ffn_expert_dropout=0.1, ffn_entropy_loss_weight=1e-3)

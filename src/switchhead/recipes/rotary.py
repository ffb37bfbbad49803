"""Dense and SwitchHead models with rotary positions and no memory (tables 7 and 8)."""

from __future__ import annotations

from switchhead.recipes.base import Recipe
from switchhead.recipes.registry import experiment
from switchhead.recipes.transformer_xl import (
    c4_47m_switchhead,
    c4_262m_switchhead,
    wikitext103_47m_dense,
    wikitext103_262m_dense,
)


@experiment(table="7")
def wikitext103_45m_dense_rope() -> Recipe:
    """Ten ordinary heads."""
    return _rotary(wikitext103_47m_dense(), chunk_length=512)


@experiment(table="7")
def wikitext103_45m_dense_rope_h2() -> Recipe:
    """Two ordinary heads of the same total width."""
    return wikitext103_45m_dense_rope().with_model(num_attention_heads=2, head_dim=205)


@experiment(table="7")
def wikitext103_45m_switchhead_rope() -> Recipe:
    """Two heads with five experts, three at work."""
    return c4_45m_switchhead_rope().on("wikitext103")


@experiment(table="7")
def wikitext103_244m_dense_rope() -> Recipe:
    """Sixteen ordinary heads."""
    return _rotary(wikitext103_262m_dense(), chunk_length=1024)


@experiment(table="7")
def wikitext103_244m_dense_rope_h2() -> Recipe:
    """Two ordinary heads of the same total width."""
    return wikitext103_244m_dense_rope().with_model(num_attention_heads=2, head_dim=512)


@experiment(table="7")
def wikitext103_244m_switchhead_rope() -> Recipe:
    """Four heads with four experts, two at work, and the memory of a Transformer-XL.

    Its dense twin was trained without it, so the two are not a comparison of attentions alone.
    """
    return c4_244m_switchhead_rope().with_model(memory_length=1024).on("wikitext103")


@experiment(table="7")
def c4_45m_dense_rope() -> Recipe:
    """Ten ordinary heads."""
    return wikitext103_45m_dense_rope().on("c4")


@experiment(table="7")
def c4_45m_switchhead_rope() -> Recipe:
    """Two heads with five experts, three at work."""
    return _rotary(c4_47m_switchhead(), chunk_length=512).with_model(head_dim=64, intermediate_size=2092)


@experiment(table="7")
def c4_244m_dense_rope() -> Recipe:
    """Sixteen ordinary heads."""
    return wikitext103_244m_dense_rope().on("c4")


@experiment(table="7")
def c4_244m_switchhead_rope() -> Recipe:
    """Four heads with four experts, two at work."""
    return _rotary(c4_262m_switchhead(), chunk_length=1024).with_model(head_dim=100, intermediate_size=4136)


@experiment(table="8")
def c4_54m_switchhead_rope_mac_matched() -> Recipe:
    """Grown until its attention costs what c4-45m-dense-rope's does, as the paper counts."""
    return c4_45m_switchhead_rope().with_model(num_attention_heads=3, head_dim=84)


def _rotary(recipe: Recipe, *, chunk_length: int) -> Recipe:
    """Rotary positions instead of relative ones and memory, on chunks twice as long."""
    return recipe.with_model(positions="rotary", memory_length=0, max_position_embeddings=chunk_length).with_training(
        chunk_length=chunk_length
    )

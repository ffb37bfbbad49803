"""Dense and SwitchHead models with Transformer-XL memory and relative positions (tables 2 and 4)."""

from __future__ import annotations

from switchhead.hf import SwitchHeadConfig
from switchhead.recipes.base import Recipe
from switchhead.recipes.registry import experiment
from switchhead.train.config import TrainingConfig

PAPER_STEPS = 100_000
PIECES = 8000  # SentencePiece BPE, digits split
ENWIK8_BYTES = 205  # byte values that occur


# WikiText-103: the models that all others vary.


@experiment(table="2")
def wikitext103_47m_dense() -> Recipe:
    """Ten ordinary heads."""
    chunk_length = 256
    return Recipe(
        dataset="wikitext103",
        model=SwitchHeadConfig(
            vocab_size=PIECES,
            hidden_size=412,
            num_hidden_layers=16,
            attention="mha",
            num_attention_heads=10,
            head_dim=41,
            intermediate_size=2053,
            positions="relative",
            memory_length=chunk_length,
            max_position_embeddings=chunk_length,
            dropout=0.1,
        ),
        training=TrainingConfig(
            steps=PAPER_STEPS, batch_size=64, chunk_length=chunk_length, grad_clip=0.1, dtype="bfloat16"
        ),
    )


@experiment(table="2")
def wikitext103_47m_dense_h2() -> Recipe:
    """Two ordinary heads of the same total width."""
    return wikitext103_47m_dense().with_model(num_attention_heads=2, head_dim=205)


@experiment(table="2")
def wikitext103_47m_switchhead() -> Recipe:
    """Two heads with five experts, two at work."""
    return wikitext103_47m_dense().with_model(
        attention="switchhead",
        num_attention_heads=2,
        head_dim=76,
        num_experts=5,
        num_experts_per_tok=2,
        intermediate_size=2080,
    )


@experiment(table="2")
def wikitext103_262m_dense() -> Recipe:
    """Sixteen ordinary heads."""
    chunk_length = 512
    return Recipe(
        dataset="wikitext103",
        model=SwitchHeadConfig(
            vocab_size=PIECES,
            hidden_size=1024,
            num_hidden_layers=18,
            attention="mha",
            num_attention_heads=16,
            head_dim=64,
            intermediate_size=4110,
            positions="relative",
            memory_length=chunk_length,
            max_position_embeddings=chunk_length,
            dropout=0.2,
        ),
        training=TrainingConfig(
            steps=PAPER_STEPS,
            batch_size=64,
            chunk_length=chunk_length,
            grad_clip=0.25,
            warmup_steps=4000,
            dtype="bfloat16",
        ),
    )


@experiment(table="2")
def wikitext103_262m_dense_h2() -> Recipe:
    """Two ordinary heads of the same total width."""
    return wikitext103_262m_dense().with_model(num_attention_heads=2, head_dim=512)


@experiment(table="2")
def wikitext103_262m_switchhead() -> Recipe:
    """Two heads with eight experts, four at work."""
    return wikitext103_262m_dense().with_model(
        attention="switchhead",
        num_attention_heads=2,
        head_dim=132,
        num_experts=8,
        num_experts_per_tok=4,
        intermediate_size=4147,
    )


# C4


@experiment(table="2")
def c4_47m_dense() -> Recipe:
    """Ten ordinary heads."""
    return wikitext103_47m_dense().on("c4")


@experiment(table="2")
def c4_47m_dense_h2() -> Recipe:
    """Two ordinary heads of the same total width."""
    return wikitext103_47m_dense_h2().on("c4")


@experiment(table="2")
def c4_47m_switchhead() -> Recipe:
    """Two heads with five experts, three at work."""
    return wikitext103_47m_switchhead().with_model(num_experts_per_tok=3).on("c4")


@experiment(table="2")
def c4_262m_dense() -> Recipe:
    """Sixteen ordinary heads."""
    return wikitext103_262m_dense().on("c4")


@experiment(table="2")
def c4_262m_dense_h4() -> Recipe:
    """Four ordinary heads of the same total width."""
    return c4_262m_dense().with_model(num_attention_heads=4, head_dim=256)


@experiment(table="2")
def c4_262m_switchhead() -> Recipe:
    """Four heads with four experts, two at work."""
    return c4_262m_dense().with_model(
        attention="switchhead",
        num_attention_heads=4,
        head_dim=112,
        num_experts=4,
        num_experts_per_tok=2,
        intermediate_size=4188,
    )


# peS2o


@experiment(table="2")
def pes2o_47m_dense() -> Recipe:
    """Ten ordinary heads."""
    return c4_47m_dense().on("pes2o")


@experiment(table="2")
def pes2o_47m_dense_h2() -> Recipe:
    """Two ordinary heads of the same total width."""
    return c4_47m_dense_h2().on("pes2o")


@experiment(table="2")
def pes2o_47m_switchhead() -> Recipe:
    """Two heads with five experts, three at work."""
    return c4_47m_switchhead().on("pes2o")


@experiment(table="2")
def pes2o_262m_dense() -> Recipe:
    """Sixteen ordinary heads."""
    return c4_262m_dense().on("pes2o")


@experiment(table="2")
def pes2o_262m_dense_h4() -> Recipe:
    """Four ordinary heads of the same total width."""
    return c4_262m_dense_h4().on("pes2o")


@experiment(table="2")
def pes2o_262m_switchhead() -> Recipe:
    """Four heads with four experts, two at work; initial experts normalised across the expert axis."""
    return c4_262m_switchhead().with_model(expert_norm_init=True).on("pes2o")


# Enwik8


@experiment(table="2")
def enwik8_41m_dense() -> Recipe:
    """Eight ordinary heads, on bytes."""
    chunk_length = 512
    return Recipe(
        dataset="enwik8",
        model=SwitchHeadConfig(
            vocab_size=ENWIK8_BYTES,
            hidden_size=512,
            num_hidden_layers=12,
            attention="mha",
            num_attention_heads=8,
            head_dim=64,
            intermediate_size=2053,
            positions="relative",
            memory_length=chunk_length,
            max_position_embeddings=chunk_length,
            dropout=0.1,
        ),
        training=TrainingConfig(
            steps=PAPER_STEPS, batch_size=32, chunk_length=chunk_length, grad_clip=0.25, dtype="bfloat16"
        ),
    )


@experiment(table="2")
def enwik8_41m_dense_h2() -> Recipe:
    """Two ordinary heads of the same total width, on bytes."""
    return enwik8_41m_dense().with_model(num_attention_heads=2, head_dim=256)


@experiment(table="2")
def enwik8_41m_switchhead() -> Recipe:
    """Two heads with four experts, two at work, on bytes."""
    return enwik8_41m_dense().with_model(
        attention="switchhead",
        num_attention_heads=2,
        head_dim=112,
        num_experts=4,
        num_experts_per_tok=2,
        intermediate_size=2088,
    )


# SwitchHead as costly as dense, and SwitchHead with one router (table 4)


@experiment(table="4")
def c4_63m_switchhead_mac_matched() -> Recipe:
    """Grown until its attention costs what c4-47m-dense's does, as the paper counts."""
    return c4_47m_switchhead().with_model(num_attention_heads=3, head_dim=112)


@experiment(table="4")
def c4_376m_switchhead_mac_matched() -> Recipe:
    """Grown until its attention costs what c4-262m-dense's does, as the paper counts."""
    return c4_262m_switchhead().with_model(num_attention_heads=6, head_dim=168)


@experiment(table="4")
def c4_47m_switchhead_shared() -> Recipe:
    """One router chooses the experts of both sides."""
    return c4_47m_switchhead().with_model(shared_selection=True)


@experiment(table="4")
def c4_262m_switchhead_shared() -> Recipe:
    """One router chooses the experts of both sides."""
    return c4_262m_switchhead().with_model(shared_selection=True)

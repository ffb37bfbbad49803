"""Models that a laptop trains in a minute: a SwitchHead of two heads and its dense twins, on bytes.

All have the same number of parameters to within half a percent, so that what differs is the attention.
"""

from __future__ import annotations

from switchhead.hf import SwitchHeadConfig
from switchhead.recipes.base import Recipe
from switchhead.recipes.registry import experiment
from switchhead.train.config import TrainingConfig


@experiment()
def tiny_switchhead() -> Recipe:
    """Two heads with four experts each; two of them at work."""
    return tiny_dense().with_model(
        attention="switchhead",
        num_attention_heads=2,
        head_dim=24,
        num_experts=4,
        num_experts_per_tok=2,
        intermediate_size=520,
    )


@experiment()
def tiny_dense() -> Recipe:
    """Eight ordinary heads."""
    chunk_length = 128
    return Recipe(
        dataset="any text",
        model=SwitchHeadConfig(
            vocab_size=257,  # bytes and the beginning of a text
            hidden_size=128,
            num_hidden_layers=4,
            attention="mha",
            num_attention_heads=8,
            head_dim=16,
            intermediate_size=512,
            positions="rotary",
            max_position_embeddings=chunk_length,
            dropout=0.0,
        ),
        training=TrainingConfig(
            steps=340,
            batch_size=8,
            chunk_length=chunk_length,
            learning_rate=3e-3,
            warmup_steps=50,
            betas=(0.9, 0.98),
            grad_clip=1.0,
            eval_every=85,
            save_every=170,
        ),
    )


@experiment()
def tiny_dense_h2() -> Recipe:
    """Two ordinary heads as wide as the eight together: what few heads cost without experts."""
    return tiny_dense().with_model(num_attention_heads=2, head_dim=64)

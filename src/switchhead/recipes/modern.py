"""SwitchHead in today's block, beside dense and grouped-query attention of equal size. Ours, not the paper's.

RMS norms, also of queries and keys; SwiGLU; full rotary positions; tied embeddings; no biases, no dropout; documents
that share a window do not see each other. All widths are multiples of 16, and the head and feed-forward widths of each
model are those that make it as large as its dense twin to 0.25 %.
"""

from __future__ import annotations

from switchhead.hf import SwitchHeadConfig
from switchhead.recipes.base import Recipe
from switchhead.recipes.registry import experiment
from switchhead.recipes.transformer_xl import PIECES
from switchhead.train.config import TrainingConfig


@experiment()
def modern_47m_dense() -> Recipe:
    """Eight ordinary heads."""
    return _dense(n_layers=12, d_model=512, n_heads=8, d_head=64, d_ff=1664, chunk_length=512, learning_rate=1e-3)


@experiment()
def modern_47m_gqa() -> Recipe:
    """Eight query heads, two heads of keys and values."""
    return modern_47m_dense().with_model(num_key_value_heads=2, intermediate_size=1920)


@experiment()
def modern_47m_switchhead() -> Recipe:
    """Two heads with four experts, two at work."""
    return _switchhead(modern_47m_dense(), n_heads=2, d_head=80, d_ff=1808)


@experiment()
def modern_262m_dense() -> Recipe:
    """Sixteen ordinary heads."""
    return _dense(n_layers=18, d_model=1024, n_heads=16, d_head=64, d_ff=3232, chunk_length=1024, learning_rate=6e-4)


@experiment()
def modern_262m_gqa() -> Recipe:
    """Sixteen query heads, four heads of keys and values."""
    return modern_262m_dense().with_model(num_key_value_heads=4, intermediate_size=3744)


@experiment()
def modern_262m_switchhead() -> Recipe:
    """Four heads with four experts, two at work."""
    return _switchhead(modern_262m_dense(), n_heads=4, d_head=80, d_ff=3520)


@experiment()
def modern_1300m_dense() -> Recipe:
    """Sixteen ordinary heads."""
    dense = _dense(n_layers=24, d_model=2048, n_heads=16, d_head=128, d_ff=5632, chunk_length=2048, learning_rate=3e-4)
    return dense.with_model(vocab_size=32_000)


@experiment()
def modern_1300m_gqa() -> Recipe:
    """Sixteen query heads, four heads of keys and values."""
    return modern_1300m_dense().with_model(num_key_value_heads=4, intermediate_size=6656)


@experiment()
def modern_1300m_switchhead() -> Recipe:
    """Four heads with four experts, two at work."""
    return _switchhead(modern_1300m_dense(), n_heads=4, d_head=192, d_ff=5792)


def _dense(
    *, n_layers: int, d_model: int, n_heads: int, d_head: int, d_ff: int, chunk_length: int, learning_rate: float
) -> Recipe:
    return Recipe(
        dataset="c4",
        model=SwitchHeadConfig(
            vocab_size=PIECES,
            hidden_size=d_model,
            num_hidden_layers=n_layers,
            attention="mha",
            num_attention_heads=n_heads,
            head_dim=d_head,
            qk_norm=True,
            positions="rotary",
            rotary_fraction=1.0,
            feed_forward="swiglu",
            intermediate_size=d_ff,
            norm="rmsnorm",
            use_bias=False,
            tie_word_embeddings=True,
            max_position_embeddings=chunk_length,
        ),
        training=TrainingConfig(
            steps=100_000,
            batch_size=64,
            chunk_length=chunk_length,
            learning_rate=learning_rate,
            warmup_steps=2000,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            grad_clip=1.0,
            dtype="bfloat16",
            mask_documents=True,
        ),
    )


def _switchhead(dense: Recipe, *, n_heads: int, d_head: int, d_ff: int) -> Recipe:
    return dense.with_model(
        attention="switchhead",
        num_attention_heads=n_heads,
        head_dim=d_head,
        num_experts=4,
        num_experts_per_tok=2,
        intermediate_size=d_ff,
    )

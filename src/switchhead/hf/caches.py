"""Caches of keys and values, as transformers has them."""

from __future__ import annotations

from transformers import Cache, DynamicCache, StaticCache

from switchhead.hf.configuration import SwitchHeadConfig


def growing_cache(config: SwitchHeadConfig) -> Cache:
    """An empty cache that is as long as what it holds."""
    return DynamicCache(config=config)


def fixed_cache(config: SwitchHeadConfig, slots: int) -> Cache:
    """An empty cache for so many tokens: tensors that stay where they are, which compiled and replayed steps need."""
    return StaticCache(config=config, max_cache_len=slots)

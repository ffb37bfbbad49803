"""What differs between the supported releases of transformers, 5.17 up to 6.

Release 5.24 renamed the argument and the output field `past_key_values` to `cache`. A model that knows one name only
does not fail under the other: the cache disappears among the keyword arguments, and generation goes on with wrong
tokens. So forward takes both names, and outputs use the one that the installed release reads.
"""

from __future__ import annotations

import inspect
from typing import Any

from transformers import Cache
from transformers.masking_utils import create_causal_mask

CACHE_NAME = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"


def one_cache(cache: Cache | None, past_key_values: Cache | None) -> Cache | None:
    """The cache, by whichever name it came."""
    if cache is not None and past_key_values is not None:
        raise ValueError("cache and past_key_values are two names of one argument; pass one of them")
    return past_key_values if cache is None else cache


def named_cache(cache: Cache | None) -> dict[str, Any]:
    """The cache as the keyword argument of an output class."""
    return {CACHE_NAME: cache}

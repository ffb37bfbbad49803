"""Twins of the paper's models in widths that today's hardware likes: `NAME-aligned`.

Model, head and feed-forward widths are multiples of 16, and the parameters within 0.25 % of the original's. Heads,
experts and k stay. Model and head widths are near the original's; the feed-forward is a multiple of 64 where one comes
close enough beside them. Wider heads would often allow one, but change what attention costs.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from switchhead.recipes.base import Recipe
from switchhead.recipes.registry import get_recipe, register

ALIGNED = "-aligned"  # how the names end


class _Widths(NamedTuple):
    hidden_size: int
    head_dim: int
    intermediate_size: int


class _ExpertWidths(NamedTuple):
    hidden_size: int
    head_dim: int
    ffn_expert_size: int


_ALIGNED: dict[_Widths | _ExpertWidths, str] = {
    _Widths(416, 48, 1840): "wikitext103-47m-dense c4-47m-dense pes2o-47m-dense",
    _Widths(416, 208, 2000): "wikitext103-47m-dense-h2 c4-47m-dense-h2 pes2o-47m-dense-h2",
    _Widths(416, 80, 2000): (
        "wikitext103-47m-switchhead c4-47m-switchhead pes2o-47m-switchhead c4-47m-switchhead-shared "
        "wikitext103-47m-switchhead-experts-vo wikitext103-47m-switchhead-experts-kq "
        "wikitext103-47m-switchhead-experts-ko wikitext103-47m-switchhead-experts-qo "
        "wikitext103-47m-switchhead-experts-kv wikitext103-47m-switchhead-experts-qv"
    ),
    _Widths(1024, 64, 4096): (
        "wikitext103-262m-dense c4-262m-dense pes2o-262m-dense wikitext103-244m-dense-rope c4-244m-dense-rope"
    ),
    _Widths(1024, 512, 4096): "wikitext103-262m-dense-h2 wikitext103-244m-dense-rope-h2",
    _Widths(1024, 128, 4224): "wikitext103-262m-switchhead",
    _Widths(1024, 256, 4096): "c4-262m-dense-h4 pes2o-262m-dense-h4",
    _Widths(1024, 112, 4192): "c4-262m-switchhead pes2o-262m-switchhead c4-262m-switchhead-shared",
    _Widths(512, 64, 2048): "enwik8-41m-dense",
    _Widths(512, 256, 2048): "enwik8-41m-dense-h2",
    _Widths(512, 112, 2080): "enwik8-41m-switchhead",
    _Widths(416, 112, 2032): (
        "c4-63m-switchhead-mac-matched wikitext103-47m-switchhead-experts-o wikitext103-47m-switchhead-experts-v "
        "wikitext103-47m-switchhead-experts-k wikitext103-47m-switchhead-experts-q"
    ),
    _Widths(1024, 176, 3904): "c4-376m-switchhead-mac-matched",
    _Widths(416, 80, 2112): (
        "wikitext103-47m-moa-h2 wikitext103-47m-moa-h4 wikitext103-47m-moa-h6 wikitext103-47m-moa-h8"
    ),
    _Widths(1024, 144, 4160): "wikitext103-262m-moa-h2 wikitext103-262m-moa-h4 wikitext103-262m-moa-h8",
    _ExpertWidths(400, 64, 144): "wikitext103-47m-switchall c4-47m-switchall pes2o-47m-switchall",
    _ExpertWidths(1024, 112, 128): "wikitext103-262m-switchall c4-262m-switchall pes2o-262m-switchall",
    _Widths(416, 48, 1888): "wikitext103-45m-dense-rope c4-45m-dense-rope",
    _Widths(416, 208, 2016): "wikitext103-45m-dense-rope-h2",
    _Widths(416, 64, 2064): "wikitext103-45m-switchhead-rope c4-45m-switchhead-rope",
    _Widths(1024, 96, 4224): "wikitext103-244m-switchhead-rope c4-244m-switchhead-rope",
    _Widths(416, 80, 2128): "c4-54m-switchhead-rope-mac-matched",
    _Widths(416, 64, 1952): (
        "wikitext103-47m-switchhead-experts-kvo wikitext103-47m-switchhead-experts-qvo "
        "wikitext103-47m-switchhead-experts-kqo wikitext103-47m-switchhead-experts-kqv"
    ),
    _Widths(416, 48, 2032): "wikitext103-47m-switchhead-experts-kqvo",
}


def _aligned(name: str, widths: _Widths | _ExpertWidths) -> Recipe:
    return get_recipe(name).with_model(**widths._asdict())


for _widths, _names in _ALIGNED.items():
    for _name in _names.split():
        register(
            partial(_aligned, _name, _widths),
            name=_name + ALIGNED,
            note=f"{_name} in widths that are multiples of 16; d_ff of {64 if _widths[2] % 64 == 0 else 16}.",
        )

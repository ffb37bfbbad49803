"""What the paper prints about its models (arXiv 2312.07987), as it prints it."""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """Figures of one model; None where the paper prints none.

    Attributes:
        parameters: in millions.
        macs: multiply-accumulates of one attention layer for one sequence.
        floats: numbers that the layer holds for it.
        quality: perplexity per sub-word token, on Enwik8 bits per character; in the recipe's table.
    """

    parameters: str | None
    macs: str | None
    floats: str | None
    quality: float | None


PUBLISHED: dict[str, Published] = {
    "wikitext103-47m-dense": Published("47M", "453.4M", "3.5M", 12.32),
    "wikitext103-47m-dense-h2": Published("47M", "453M", "1.4M", 12.73),
    "wikitext103-47m-switchhead": Published("47M", "170.4M", "0.8M", 12.31),
    "wikitext103-262m-dense": Published("262M", "5.4G", "21M", 9.8),
    "wikitext103-262m-dense-h2": Published("262M", "5.4G", "6.3M", 10.09),
    "wikitext103-262m-switchhead": Published("262M", "2.0G", "2.9M", 9.77),
    "c4-47m-dense": Published("47M", "453M", "3.5M", 22.71),
    "c4-47m-dense-h2": Published("47M", "453M", "1.4M", 23.71),
    "c4-47m-switchhead": Published("47M", "203M", "0.8M", 22.53),
    "c4-262m-dense": Published("262M", "5.4G", "21M", 16.28),
    "c4-262m-dense-h4": Published("262M", "5.4G", "8.4M", 17.09),
    "c4-262m-switchhead": Published("262M", "2.4G", "5.6M", 16.23),
    "pes2o-47m-dense": Published("47M", "453M", "3.5M", 12.83),
    "pes2o-47m-dense-h2": Published("47M", "453M", "1.4M", 13.37),
    "pes2o-47m-switchhead": Published("47M", "203M", "0.8M", 12.84),
    "pes2o-262m-dense": Published("262M", "5.4G", "21M", 9.78),
    "pes2o-262m-dense-h4": Published("262M", "5.4G", "8.4M", 10.11),
    "pes2o-262m-switchhead": Published("262M", "2.4G", "5.6M", 9.86),
    "enwik8-41m-dense": Published("41M", "1.6G", "10M", 1.1),
    "enwik8-41m-dense-h2": Published("41M", "1.6G", "4.2M", 1.13),
    "enwik8-41m-switchhead": Published("41M", "709M", "2.8M", 1.1),
    "wikitext103-47m-moa-h2": Published("47M", "140.1M", "0.7M", 12.84),
    "wikitext103-47m-moa-h4": Published("47M", "223.5M", "1.3M", 12.6),
    "wikitext103-47m-moa-h6": Published("47M", "306.8M", "1.9M", 12.64),
    "wikitext103-47m-moa-h8": Published("47M", "390.2M", "2.6M", 12.77),
    "wikitext103-262m-moa-h2": Published("262M", "1.1G", "2.7M", 9.87),
    "wikitext103-262m-moa-h4": Published("262M", "1.7G", "5.1M", 9.69),
    "wikitext103-262m-moa-h8": Published("262M", "2.9G", "9.9M", 9.5),
    "wikitext103-47m-switchall": Published("47M", "170M", "0.8M", 12.17),
    "c4-47m-switchall": Published("47M", "202M", "0.8M", 22.09),
    "pes2o-47m-switchall": Published("47M", "202M", "0.8M", 12.56),
    "wikitext103-262m-switchall": Published("259M", "2.4G", "5.6M", 9.81),
    "c4-262m-switchall": Published("259M", "2.4G", "5.6M", 16.45),
    "pes2o-262m-switchall": Published("259M", "2.4G", "5.6M", 9.86),
    "c4-63m-switchhead-mac-matched": Published("63M", None, None, 21.18),
    "c4-376m-switchhead-mac-matched": Published("376M", None, None, 15.43),
    "c4-47m-switchhead-shared": Published("47M", None, None, 22.81),
    "c4-262m-switchhead-shared": Published("262M", None, None, 16.49),
    "wikitext103-45m-dense-rope": Published("45M", "560.9M", "6.1M", 12.78),
    "wikitext103-45m-dense-rope-h2": Published("45M", "560.9M", "1.9M", 12.96),
    "wikitext103-45m-switchhead-rope": Published("45M", "285.6M", "1.3M", 12.75),
    "wikitext103-244m-dense-rope": Published("244M", "6.4G", "37.7M", 10.17),
    "wikitext103-244m-dense-rope-h2": Published("244M", "6.4G", "8.4M", 10.26),
    "wikitext103-244m-switchhead-rope": Published("243M", "4.2G", "18.4M", 10.0),
    "c4-45m-dense-rope": Published("45M", "560.9M", "6.1M", 23.79),
    "c4-45m-switchhead-rope": Published("45M", "285.6M", "1.3M", 23.69),
    "c4-244m-dense-rope": Published("244M", "6.4G", "37.7M", 16.35),
    "c4-244m-switchhead-rope": Published("243M", "4.2G", "18.4M", 16.41),
    "c4-54m-switchhead-rope-mac-matched": Published("54M", None, None, 22.18),
    "wikitext103-47m-switchhead-experts-vo": Published("47M", None, None, 12.27),
    "wikitext103-47m-switchhead-experts-o": Published("47M", None, None, 12.3),
    "wikitext103-47m-switchhead-experts-kvo": Published("47M", None, None, 12.37),
    "wikitext103-47m-switchhead-experts-qvo": Published("47M", None, None, 12.42),
    "wikitext103-47m-switchhead-experts-kqvo": Published("47M", None, None, 12.57),
    "wikitext103-47m-switchhead-experts-kq": Published("47M", None, None, 12.9),
    "wikitext103-47m-switchhead-experts-ko": Published("47M", None, None, 12.36),
    "wikitext103-47m-switchhead-experts-qo": Published("47M", None, None, 12.45),
    "wikitext103-47m-switchhead-experts-kqo": Published("47M", None, None, 12.59),
    "wikitext103-47m-switchhead-experts-v": Published("47M", None, None, 12.45),
    "wikitext103-47m-switchhead-experts-kv": Published("47M", None, None, 12.69),
    "wikitext103-47m-switchhead-experts-qv": Published("47M", None, None, 12.51),
    "wikitext103-47m-switchhead-experts-kqv": Published("47M", None, None, 12.61),
    "wikitext103-47m-switchhead-experts-k": Published("47M", None, None, 12.79),
    "wikitext103-47m-switchhead-experts-q": Published("47M", None, None, 12.75),
}

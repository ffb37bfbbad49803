"""Every figure on resources that the paper prints for its dense and SwitchHead models."""

import pytest

from switchhead.accounting import attention_cost, count_parameters
from switchhead.recipes import get_recipe, recipe_names

# parameters, MACs and floats of an attention layer; None: not printed
PUBLISHED = {
    "wikitext103-47m-dense": ("47M", "453.4M", "3.5M"),
    "wikitext103-47m-dense-h2": ("47M", "453M", None),
    "wikitext103-47m-switchhead": ("47M", "170.4M", "0.8M"),
    "wikitext103-262m-dense": ("262M", "5.4G", "21M"),
    "wikitext103-262m-dense-h2": ("262M", None, None),
    "wikitext103-262m-switchhead": ("262M", "2.0G", "2.9M"),
    "c4-47m-dense": ("47M", "453M", "3.5M"),
    "c4-47m-dense-h2": ("47M", "453M", None),
    "c4-47m-switchhead": ("47M", "203M", "0.8M"),
    "c4-262m-dense": ("262M", "5.4G", "21M"),
    "c4-262m-dense-h4": ("262M", None, None),
    "c4-262m-switchhead": ("262M", "2.4G", "5.6M"),
    "pes2o-47m-dense": ("47M", "453M", "3.5M"),
    "pes2o-47m-dense-h2": ("47M", None, None),
    "pes2o-47m-switchhead": ("47M", "203M", "0.8M"),
    "pes2o-262m-dense": ("262M", "5.4G", "21M"),
    "pes2o-262m-dense-h4": ("262M", None, None),
    "pes2o-262m-switchhead": ("262M", "2.4G", "5.6M"),
    "enwik8-41m-dense": ("41M", "1.6G", "10M"),
    "enwik8-41m-dense-h2": ("41M", None, None),
    "enwik8-41m-switchhead": ("41M", "709M", "2.8M"),
    "c4-63m-switchhead-mac-matched": ("63M", None, None),
    "c4-376m-switchhead-mac-matched": ("376M", None, None),
    "c4-47m-switchhead-shared": ("47M", None, None),
    "c4-262m-switchhead-shared": ("262M", None, None),
    "wikitext103-45m-dense-rope": ("45M", "560.9M", "6.1M"),
    "wikitext103-45m-dense-rope-h2": ("45M", None, None),
    "wikitext103-45m-switchhead-rope": ("45M", "285.6M", "1.3M"),
    "wikitext103-244m-dense-rope": ("244M", "6.4G", "37.7M"),
    "wikitext103-244m-dense-rope-h2": ("244M", None, None),
    "wikitext103-244m-switchhead-rope": ("243M", "4.2G", "18.4M"),
    "c4-45m-dense-rope": ("45M", None, None),
    "c4-45m-switchhead-rope": ("45M", None, None),
    "c4-244m-dense-rope": ("244M", None, None),
    "c4-244m-switchhead-rope": ("243M", None, None),
    "c4-54m-switchhead-rope-mac-matched": ("54M", None, None),
    **{
        f"wikitext103-47m-switchhead-experts-{projections}": ("47M", None, None)
        for projections in ["vo", "o", "kvo", "qvo", "kqvo", "kq", "ko", "qo", "kqo", "v", "kv", "qv", "kqv", "k", "q"]
    },
}
UNITS = {"M": 10**6, "G": 10**9}


def as_printed(number: int, like: str) -> str:
    """A number in the unit and with the decimals of a printed figure."""
    decimals = len(like[:-1].partition(".")[2])
    return f"{number / UNITS[like[-1]]:.{decimals}f}{like[-1]}"


def published_cost(name):
    recipe = get_recipe(name)
    return attention_cost(recipe.model, chunk_length=recipe.training.chunk_length, convention="published")


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_round_to_the_printed_figure(name):
    printed = PUBLISHED[name][0]
    assert as_printed(count_parameters(get_recipe(name).model).total, printed) == printed


@pytest.mark.parametrize("name", [name for name, (_, macs, _) in PUBLISHED.items() if macs])
def test_macs_meet_the_printed_figure_to_its_last_digit(name):
    printed = PUBLISHED[name][1]
    assert as_printed(published_cost(name).macs, printed) == printed


@pytest.mark.parametrize("name", [name for name, (_, _, floats) in PUBLISHED.items() if floats])
def test_floats_meet_the_printed_figure_to_its_last_digit(name):
    printed = PUBLISHED[name][2]
    assert as_printed(published_cost(name).floats, printed) == printed


def test_every_recipe_of_the_paper_is_held_against_it():
    assert set(PUBLISHED) == {name for name in recipe_names() if get_recipe(name).table}


@pytest.mark.parametrize(
    ("name", "dense", "macs", "floats"),
    [("c4-262m-switchhead", "c4-262m-dense", 52.8, 28.8), ("c4-47m-switchhead", "c4-47m-dense", 51.7, None)],
)
def test_counted_alike_switchhead_saves_less_than_printed(name, dense, macs, floats):
    costs = [
        attention_cost(get_recipe(n).model, chunk_length=get_recipe(n).training.chunk_length) for n in (name, dense)
    ]
    assert round(100 * costs[0].macs / costs[1].macs, 1) == macs
    if floats:
        assert round(100 * costs[0].floats / costs[1].floats, 1) == floats


@pytest.mark.parametrize(
    ("name", "dense"),
    [
        ("c4-63m-switchhead-mac-matched", "c4-47m-dense"),
        ("c4-376m-switchhead-mac-matched", "c4-262m-dense"),
    ],
)
def test_mac_matched_models_match_only_as_the_paper_counts(name, dense):
    published = published_cost(name).macs / published_cost(dense).macs
    consistent = [
        attention_cost(get_recipe(n).model, chunk_length=get_recipe(n).training.chunk_length).macs
        for n in (name, dense)
    ]
    assert published == pytest.approx(1, abs=0.03)
    assert consistent[0] / consistent[1] > 1.1

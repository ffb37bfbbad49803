import dataclasses

import pytest

from switchhead.accounting import attention_cost, count_parameters, match_d_ff, match_macs, match_parameters
from switchhead.hf import SwitchHeadConfig
from switchhead.recipes import get_recipe


def parameters_with(config, d_ff):
    return count_parameters(dataclasses.replace(config, intermediate_size=d_ff)).total


@pytest.mark.parametrize("target", [857_345, 900_001, 1_234_567])
def test_no_other_width_comes_closer(target):
    config = get_recipe("tiny-switchhead").model
    d_ff = match_d_ff(config, parameters=target)
    distance = {width: abs(parameters_with(config, width) - target) for width in range(d_ff - 2, d_ff + 3)}
    assert min(distance, key=distance.__getitem__) == d_ff


def test_the_present_width_does_not_matter():
    config = get_recipe("tiny-switchhead").model
    wider = dataclasses.replace(config, intermediate_size=10 * config.intermediate_size)
    assert match_d_ff(config, parameters=900_000) == match_d_ff(wider, parameters=900_000)


def test_a_model_matches_its_own_size():
    config = get_recipe("wikitext103-47m-dense").model
    assert match_d_ff(config, parameters=count_parameters(config).total) == config.intermediate_size


def test_a_target_below_the_attention_is_refused():
    config = get_recipe("tiny-switchhead").model
    with pytest.raises(ValueError, match=r"cannot match 1,000 parameters: without feed-forwards .* fewer heads"):
        match_d_ff(config, parameters=1000)


def test_feed_forward_experts_have_no_width_to_match():
    config = get_recipe("c4-47m-sigma-moe").model
    with pytest.raises(ValueError, match=r"no intermediate_size to match"):
        match_d_ff(config, parameters=47_000_000)


# Every model whose size the paper chose by its rule, its dense twin, and how far its own size is from the twin's.
BY_THE_RULE = [
    ("wikitext103-47m-switchhead", "wikitext103-47m-dense", 0.1),
    ("wikitext103-262m-switchhead", "wikitext103-262m-dense", 0.1),
    ("c4-262m-switchhead", "c4-262m-dense", 0.1),
    ("enwik8-41m-switchhead", "enwik8-41m-dense", 0.2),  # 0.18 % off
    ("c4-45m-switchhead-rope", "c4-45m-dense-rope", 0.1),
    ("c4-244m-switchhead-rope", "c4-244m-dense-rope", 0.1),
    ("wikitext103-47m-switchhead-experts-o", "wikitext103-47m-dense", 0.1),
    ("wikitext103-47m-switchhead-experts-kvo", "wikitext103-47m-dense", 0.1),
    ("wikitext103-47m-switchhead-experts-kqvo", "wikitext103-47m-dense", 0.1),
]


@pytest.mark.parametrize(("name", "dense", "deviation"), BY_THE_RULE)
def test_matching_finds_the_papers_head_widths_and_sizes_closer_than_its_own(name, dense, deviation):
    paper, dense = get_recipe(name).model, get_recipe(dense).model
    target = count_parameters(dense).total
    start = dataclasses.replace(paper, head_dim=1, intermediate_size=dense.intermediate_size)
    matched = match_parameters(start, parameters=target)
    assert matched.head_dim == paper.head_dim
    assert abs(count_parameters(matched).total - target) <= 0.001 * target
    assert abs(count_parameters(matched).total - target) <= abs(count_parameters(paper).total - target)
    assert abs(count_parameters(paper).total - target) <= deviation / 100 * target


def test_the_papers_enwik8_model_is_0_18_percent_off():
    paper, dense = (count_parameters(get_recipe(f"enwik8-41m-{kind}").model).total for kind in ("switchhead", "dense"))
    assert round(100 * (dense - paper) / dense, 2) == 0.18


@pytest.mark.parametrize("grain", [1, 8, 64])
def test_head_widths_are_multiples_of_the_grain(grain):
    config = get_recipe("c4-262m-switchhead").model
    target = count_parameters(get_recipe("c4-262m-dense").model).total
    matched = match_parameters(dataclasses.replace(config, intermediate_size=4110), parameters=target, grain=grain)
    assert matched.head_dim % grain == 0
    assert count_parameters(matched).total == pytest.approx(target, rel=0.001)


# The paper's larger models as costly as dense; d_head by counting like its tables, and like its equations.
MAC_MATCHED = [
    ("c4-63m-switchhead-mac-matched", "c4-47m-dense", 96),
    ("c4-376m-switchhead-mac-matched", "c4-262m-dense", 140),
    ("c4-54m-switchhead-rope-mac-matched", "c4-45m-dense-rope", 80),
]


@pytest.mark.parametrize(("name", "dense", "consistent_width"), MAC_MATCHED)
def test_equal_cost_gives_the_papers_head_widths_only_as_the_paper_counts(name, dense, consistent_width):
    paper, dense = get_recipe(name), get_recipe(dense)
    widths = {}
    for convention in ("published", "consistent"):
        counting = {"chunk_length": dense.training.chunk_length, "convention": convention}
        budget = attention_cost(dense.model, **counting).macs
        matched = match_macs(paper.model, macs=budget, **counting)
        assert 0.95 * budget < attention_cost(matched, **counting).macs <= budget
        widths[convention] = matched.head_dim
    assert widths == {"published": paper.model.head_dim, "consistent": consistent_width}


def test_executed_cost_can_be_matched_too():
    config = SwitchHeadConfig(hidden_size=64, num_experts=4)
    budget = attention_cost(dataclasses.replace(config, head_dim=20), chunk_length=32, convention="executed").macs
    assert match_macs(config, macs=budget, chunk_length=32, convention="executed").head_dim == 20


def test_targets_out_of_reach_are_refused():
    config = get_recipe("c4-47m-switchhead").model
    with pytest.raises(ValueError, match=r"cannot match 20,000,000 parameters: heads of width 4 .* fewer heads"):
        match_parameters(config, parameters=20_000_000)
    with pytest.raises(ValueError, match=r"cannot match 1,000 multiply-accumulates: heads of width 4 .* fewer heads"):
        match_macs(config, macs=1000, chunk_length=256)
    with pytest.raises(ValueError, match="grain must be at least 1; got 0"):
        match_parameters(config, parameters=47_000_000, grain=0)

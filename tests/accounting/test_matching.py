import dataclasses

import pytest

from switchhead.accounting import count_parameters, match_d_ff
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

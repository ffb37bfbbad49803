import pytest

from switchhead.accounting import CONVENTIONS, attention_cost, cost_by_length, feed_forward_cost, model_resources
from switchhead.hf import SwitchHeadConfig

SMALL = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 1, "head_dim": 6, "num_attention_heads": 2}


def test_costs_are_those_of_each_length_with_as_many_chunks_of_memory():
    config = SwitchHeadConfig(**SMALL, num_experts=3, positions="relative", memory_length=16)
    costs = cost_by_length(config, chunk_length=16, lengths=[8, 32], batch_size=2, dtype="bfloat16")
    for length, cost in zip([8, 32], costs, strict=True):
        same = SwitchHeadConfig(**SMALL, num_experts=3, positions="relative", memory_length=length)
        assert cost.chunk_length == length
        assert cost.model == model_resources(same, chunk_length=length, batch_size=2, dtype="bfloat16")
        for convention in CONVENTIONS:
            expected = attention_cost(same, chunk_length=length, convention=convention)
            assert cost.attention[convention] == expected
            expected = feed_forward_cost(same, chunk_length=length, convention=convention)
            assert cost.feed_forward[convention] == expected


def test_attention_grows_faster_than_the_sequence_and_the_feed_forward_with_it():
    costs = cost_by_length(SwitchHeadConfig(**SMALL), chunk_length=16, lengths=[64, 128])
    macs = [cost.attention["executed"].macs for cost in costs]
    assert 2 < macs[1] / macs[0] < 4
    flops = [cost.model.forward_flops * cost.chunk_length for cost in costs]
    assert flops[1] - 2 * flops[0] == pytest.approx(2 * (macs[1] - 2 * macs[0]))

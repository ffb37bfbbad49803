"""Where keys and values of every attention layer come from: caches, memory, context, packed documents."""

import copy
import itertools

import pytest
import torch

from switchhead import Rotary
from switchhead.ops import document_boundaries
from tests.helpers import relative_error
from tests.nn.layers import LAYERS, SOURCES, GrowingCache, every_layer, every_position, inputs


@every_layer
@every_position
def test_cached_decoding_matches_full_forward(make, positions):
    module, x = make(positions=positions).double().eval(), inputs(length=17)
    full, cache = module(x), GrowingCache()
    for t in range(17):
        step = module(x[:, t : t + 1], cache=cache, position_ids=torch.tensor([t]))
        assert relative_error(step, full[:, t : t + 1]) < 1e-12, t


@every_layer
@every_position
def test_a_cached_chunk_of_several_tokens_matches_full_forward(make, positions):
    module, x = make(positions=positions).double().eval(), inputs(length=9)
    full, cache = module(x), GrowingCache()
    for first, last in ((0, 4), (4, 5), (5, 9)):
        part = module(x[:, first:last], cache=cache, position_ids=torch.arange(first, last))
        assert relative_error(part, full[:, first:last]) < 1e-12


WRONG = {
    "heads and tokens changed": lambda k, v: (k.transpose(1, 2), v.transpose(1, 2)),
    "transposed": lambda k, v: (k.mT, v.mT),
    "one sequence": lambda k, v: (k[:1], v[:1]),
    "heads twice": lambda k, v: (torch.cat([k, k], 1), torch.cat([v, v], 1)),
    "a value short": lambda k, v: (k, v[:, :, :-1]),
}


@every_layer
@pytest.mark.parametrize("returned", WRONG.values(), ids=WRONG.keys())
def test_what_a_cache_returns_must_have_the_shape_of_all_keys(returned, make):
    class Cache:
        def update(self, k, v):
            return returned(k, v)

    module, x = make(positions="rotary").double(), inputs(length=5)
    with pytest.raises(ValueError, match=r"cache.update must return keys and values \[2, \d, S, \d\].* got \("):
        module(x, cache=Cache(), position_ids=torch.arange(5))


@every_layer
@every_position
def test_a_chunk_with_memory_matches_one_long_sequence(make, positions):
    module, x = make(positions=positions).double(), inputs(length=8)
    assert relative_error(module(x[:, 5:], memory=x[:, :5]), module(x)[:, 5:]) < 1e-12


@every_layer
@every_position
@pytest.mark.parametrize("causal", [True, False])
def test_an_empty_context_gives_zeros_and_empty_memory_changes_nothing(make, positions, causal):
    module, x = make(positions=positions, causal=causal).double(), inputs()
    assert module(x, context=x[:, :0]).eq(0).all()
    assert relative_error(module(x, memory=x[:, :0]), module(x)) < 1e-14


@every_layer
@every_position
def test_no_tokens_and_no_sequences_behind_a_memory_give_none(make, positions):
    module, x = make(positions=positions).double(), inputs()
    assert module(x[:, :0], memory=x).shape == (2, 0, 12)
    assert module(x[:0], memory=x[:0]).shape == (0, 6, 12)


@every_layer
@every_position
def test_context_and_memory_may_have_other_dtypes_outside_autocast_and_inside(make, positions):
    module, x = make(positions=positions), inputs(dtype=torch.float32)
    other = inputs(dtype=torch.float32)
    exact = {name: copy.deepcopy(module).double()(x.double(), **{name: other.double()}) for name in SOURCES}
    single, brain, half = torch.float32, torch.bfloat16, torch.float16
    mixes = [*itertools.product((single, brain), repeat=3), *itertools.permutations((single, brain, half))]
    for module_dtype, x_dtype, dtype in mixes:
        mixed = copy.deepcopy(module).to(module_dtype)
        for name, expected in exact.items():
            for autocast in (False, True):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    y = mixed(x.to(x_dtype), **{name: other.to(dtype)})
                y.sum().backward()
                assert relative_error(y, expected) < 0.05


def test_explicit_position_ids_shift_nothing_when_all_move_together():
    module, x = LAYERS["switchhead"](positions=Rotary(fraction=0.8)).double(), inputs()
    shifted = module(x, position_ids=torch.arange(6) + 100)
    assert relative_error(shifted, module(x)) < 1e-11
    restarted = module(x, position_ids=torch.tensor([0, 1, 2, 0, 1, 2]))
    assert not torch.allclose(restarted, module(x))


@pytest.mark.parametrize("positions", ["none", "rotary"])
@every_layer
def test_packed_documents_equal_documents_alone(make, positions):
    module, x = make(positions=positions).double(), inputs(batch=2, length=7)
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 0]])
    packed = module(x, position_ids=position_ids, cu_seqlens=document_boundaries(position_ids))
    for row, documents in enumerate([[(0, 3), (3, 7)], [(0, 1), (1, 6), (6, 7)]]):
        for first, last in documents:
            alone = module(x[row : row + 1, first:last])
            assert relative_error(packed[row : row + 1, first:last], alone) < 1e-12


@every_layer
def test_packing_with_what_it_does_not_go_with_is_refused(make):
    x, bounds = inputs(dtype=torch.float32), torch.tensor([0, 6, 12], dtype=torch.int32)
    with pytest.raises(ValueError, match="does not go with memory"):
        make()(x, memory=x, cu_seqlens=bounds)
    with pytest.raises(ValueError, match="does not go with causal=False"):
        make(causal=False)(x, cu_seqlens=bounds)
    with pytest.raises(ValueError, match="does not go with relative positions"):
        make(positions="relative")(x, cu_seqlens=bounds)

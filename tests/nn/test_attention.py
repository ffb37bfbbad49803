"""What every attention layer computes, with every kind of positions: masks, gradients, shapes, what it refuses."""

import pytest
import torch

from switchhead import MultiHeadAttention
from tests.helpers import relative_error
from tests.nn.layers import LAYERS, GrowingCache, every_layer, every_position, inputs


@every_layer
@every_position
def test_left_padding_changes_nothing(make, positions):
    module, x = make(positions=positions).double(), inputs(batch=1, length=10)
    short = x[:, 7:]
    padded = torch.cat([torch.randn(1, 7, 12, dtype=torch.float64), short], 1)
    batch = torch.cat([padded, x])
    mask = torch.zeros(2, 10, dtype=torch.bool)
    mask[0, :7] = True
    ids = torch.stack([torch.arange(10) - 7, torch.arange(10)]).clamp(min=0)
    together = module(batch, key_padding_mask=mask, position_ids=ids)
    assert relative_error(together[0, 7:], module(short)[0]) < 1e-12
    assert relative_error(together[1], module(x)[0]) < 1e-12


@every_layer
@every_position
def test_a_causal_layer_does_not_look_ahead(make, positions):
    module, x = make(positions=positions).double(), inputs()
    changed = x.clone()
    changed[:, 4:] = torch.randn(2, 2, 12, dtype=torch.float64)
    assert torch.equal(module(x)[:, :4], module(changed)[:, :4])
    assert not torch.allclose(module(x)[:, 4:], module(changed)[:, 4:])


@every_layer
@every_position
def test_masks_follow_torchs_conventions(make, positions):
    module, x = make(positions=positions, causal=False).double(), inputs()
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    causal = make(positions=positions).double()
    causal.load_state_dict(module.state_dict())
    expected = causal(x)
    additive = torch.zeros(6, 6, dtype=torch.float64).masked_fill(future, -torch.inf)
    heads = module.n_heads
    for mask in (future, additive, future.expand(2 * heads, 6, 6), additive.expand(2, 1, 6, 6), future[None, None]):
        assert relative_error(module(x, attn_mask=mask), expected) < 1e-12
    bias = torch.randn(2, heads, 6, 6, dtype=torch.float64)
    assert not torch.allclose(module(x, attn_mask=bias), module(x))


@every_layer
@every_position
def test_rows_that_see_nothing_give_zeros_and_finite_gradients_for_three_steps(make, positions, poisoned_allocations):
    module = make(positions=positions).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    mask = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    for _ in range(3):
        x = inputs().requires_grad_()
        y = module(x, key_padding_mask=mask)
        assert y[0].eq(0).all()
        assert y[1, :3].eq(0).all()
        assert y[1, 3:].abs().min() > 0
        optimizer.zero_grad()
        y.square().sum().backward()
        assert torch.isfinite(x.grad).all()
        assert all(torch.isfinite(p.grad).all() for p in module.parameters())
        optimizer.step()


@every_layer
@every_position
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("least", [-torch.inf, torch.finfo(torch.float32).min, torch.finfo(torch.float16).min, -1e9])
def test_additive_masks_of_whole_rows_stay_finite_in_every_dtype(make, positions, dtype, least):
    module = make(positions=positions, causal=False).to(dtype)
    mask = torch.zeros(6, 6)
    mask[0], mask[1, 1] = least, least
    x = inputs(dtype=dtype).requires_grad_()
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = module(x, attn_mask=mask)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.isfinite(y).all()
        assert torch.isfinite(grad).all()
        assert y[:, 0].eq(0).all() or least != -torch.inf


@every_layer
@every_position
def test_a_learned_additive_mask_has_gradients(make, positions):
    module, x = make(positions=positions).double(), inputs(length=3).requires_grad_()
    mask = torch.randn(2 * module.n_heads, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, mask: module(x, attn_mask=mask), (x, mask), fast_mode=True)


@every_layer
@every_position
def test_gradients_of_the_whole_layer_pass_gradcheck(make, positions):
    module, x, memory = make(positions=positions).double(), inputs(1, 4).requires_grad_(), inputs(1, 2).requires_grad_()
    names, parameters = zip(*module.named_parameters(), strict=True)
    padding = torch.tensor([[True, False, False, True, False, False]])

    def function(x, memory, *parameters):
        arguments = dict(memory=memory, key_padding_mask=padding)
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x,), arguments)

    assert torch.autograd.gradcheck(function, (x, memory, *parameters), fast_mode=True)


@every_layer
@every_position
@pytest.mark.parametrize("length", [1, 0])
def test_one_token_and_no_token(make, positions, length):
    module = make(positions=positions)
    x = torch.randn(2, length, 12, requires_grad=True)
    y = module(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert torch.isfinite(x.grad).all()
    assert module(torch.randn(0, 4, 12)).shape == (0, 4, 12)


@every_position
@pytest.mark.parametrize("n_kv_heads", [1, 2])
def test_grouped_queries_equal_heads_with_repeated_keys_and_values(n_kv_heads, positions):
    gqa = LAYERS["gqa"](positions=positions, n_kv_heads=n_kv_heads).double()
    mha = LAYERS["mha"](positions=positions).double()
    state = gqa.state_dict()
    for name in ("k_proj.weight", "v_proj.weight"):
        state[name] = state[name].unflatten(0, (n_kv_heads, 7)).repeat_interleave(4 // n_kv_heads, 0).flatten(0, 1)
    mha.load_state_dict(state)
    x = inputs()
    assert relative_error(gqa(x), mha(x)) < 1e-13


def test_dense_attention_equals_torchs_own():
    ours = MultiHeadAttention(d_model=12, n_heads=3, d_head=4, causal=False).double()
    theirs = torch.nn.MultiheadAttention(12, 3, bias=False, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.q_proj.weight, ours.k_proj.weight, ours.v_proj.weight]))
        theirs.out_proj.weight.copy_(ours.o_proj.weight)
    x, padding = inputs(), torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    mask = torch.rand(6, 6) < 0.3
    mask.fill_diagonal_(False)
    expected, _ = theirs(x, x, x, key_padding_mask=padding, attn_mask=mask)
    assert relative_error(ours(x, key_padding_mask=padding, attn_mask=mask)[:, :4], expected[:, :4]) < 1e-12


@every_layer
def test_bad_inputs_are_named(make):
    module, x = make(positions="rotary"), inputs(dtype=torch.float32)
    cases = [
        (lambda: module(x[0]), r"x must be \[batch, length, d_model=12\]"),
        (lambda: module(x[..., :5]), r"d_model=12"),
        (lambda: module(x.long()), "x must be floating point"),
        (lambda: module(x, context=x.long()), "context must be floating point"),
        (lambda: module(x, memory=x.long()), "memory must be floating point"),
        (lambda: module(x, memory=x, context=x), "exclude each other"),
        (lambda: module(x, memory=x[:1]), r"memory must be \[2, length, 12\]"),
        (lambda: module(x, key_padding_mask=torch.zeros(2, 5, dtype=torch.bool)), r"boolean \[2, 6\]"),
        (lambda: module(x, key_padding_mask=torch.zeros(2, 6)), "must be boolean"),
        (lambda: module(x, attn_mask=torch.zeros(6, 5)), r"attn_mask must be"),
        (lambda: module(x, attn_mask=torch.zeros(6, 6, dtype=torch.long)), r"attn_mask must be boolean"),
        (lambda: module(x, cache=GrowingCache()), "need position_ids"),
        (lambda: module(x, position_ids=torch.arange(5)), r"position_ids must be \[6\]"),
        (lambda: module(x, position_ids=torch.arange(6).expand(3, 6)), r"\[2 or 1, 6\]; got \(3, 6\)"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


def test_head_counts_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="n_kv_heads=3 must divide n_heads=4"):
        MultiHeadAttention(d_model=12, n_heads=4, d_head=7, n_kv_heads=3)


class Adapter(torch.nn.Module):
    """A projection with something added to its output, as adapters for fine-tuning are built."""

    def __init__(self, base):
        super().__init__()
        self.base, self.weight = base, base.weight

    def forward(self, x):
        return self.base(x) + 1


class Reversed(torch.nn.Module):
    def forward(self, weight):
        return weight.flip(-1)


@every_layer
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_an_adapter_in_place_of_a_projection_is_refused_and_one_on_its_weight_has_effect(make, name):
    module, x = make().double(), inputs()
    before = module(x)
    torch.nn.utils.parametrize.register_parametrization(getattr(module, name), "weight", Reversed())
    assert relative_error(module(x), before) > 0.01
    setattr(module, name, Adapter(getattr(module, name)))
    with pytest.raises(TypeError, match=r"Adapter stands in place of a projection .*parametrize"):
        module(x)

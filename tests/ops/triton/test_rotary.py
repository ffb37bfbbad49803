import pytest
import torch

from switchhead.ops.rotary import _rotary_table, rotate
from switchhead.ops.triton.rotary import rotary_table, rotate_heads
from tests.helpers import check_operator, relative_error


@pytest.mark.parametrize("positions", [torch.arange(300), torch.arange(6).view(3, 2).mT, torch.tensor([30_000, 7])])
def test_the_kernel_equals_the_definition(positions, device):
    found = rotary_table(positions.to(device), 20, 10000.0)
    for table, expected in zip(found, _rotary_table(positions, 20, 10000.0, torch.float64), strict=True):
        assert table.shape == expected.shape
        assert relative_error(table, expected) < 1e-7


@pytest.mark.parametrize("half", [0, 3])
@pytest.mark.parametrize("positions", [torch.arange(5), torch.arange(6).view(3, 2).mT, torch.empty(0)])
def test_what_a_compiler_is_told_holds_for_positions_of_any_strides(positions, half, device):
    check_operator(rotary_table, (positions.to(device), half, 10000.0), differentiable=False)


def heads(d, device, dtype):
    """Queries and keys `[B * T, H, d]` of different strides, and the table of T positions."""
    q = torch.randn(12, 2, 3, d, device=device, dtype=dtype)[:, 0]
    k = torch.randn(3, 12, d + 1, device=device, dtype=dtype)[..., 1:].transpose(0, 1)
    return [q, k], rotary_table(torch.arange(6, device=device), 4, 10.0)


@pytest.mark.parametrize("d", [8, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 2])
def test_queries_and_keys_are_rotated_together_as_they_are_alone(n, dtype, d, device, poisoned_allocations):
    x, table = heads(d, device, dtype)
    x = x[:n]
    expected = [rotate(rows.unflatten(0, (2, 6)), *table).flatten(0, 1) for rows in x]
    apart = [rows.new_empty(rows.shape) for rows in x]
    rotate_heads(x, apart, *table, width=d)
    beside = x[0].new_zeros(12, n * 3 * d + 5)
    rotate_heads(x, [beside], *table, width=d)
    for found in (apart, beside[:, : n * 3 * d].view(12, n, 3, d).unbind(1)):
        for rows, wanted in zip(found, expected, strict=True):
            assert relative_error(rows, wanted) < (1e-6 if dtype == torch.float32 else 8e-3)
    assert not beside[:, n * 3 * d :].any()


def test_rotating_back_undoes_a_rotation_and_no_table_copies(device, poisoned_allocations):
    d = 11
    x, table = heads(d, device, torch.float32)
    there, back, copy = ([rows.new_empty(rows.shape) for rows in x] for _ in range(3))
    rotate_heads(x, there, *table, width=d)
    rotate_heads(there, back, *table, width=d, back=True)
    rotate_heads(x, copy, None, None, width=d)
    for original, returned, copied in zip(x, back, copy, strict=True):
        assert relative_error(returned, original) < 1e-6
        assert torch.equal(copied, original)


def test_heads_are_widened_by_zeros_and_narrowed_again(device, poisoned_allocations):
    x, table = heads(11, device, torch.float32)
    wide, alone, back = ([rows.new_empty(*rows.shape[:2], d) for rows in x] for d in (16, 11, 11))
    rotate_heads(x, wide, *table, width=16)
    rotate_heads(x, alone, *table, width=11)
    rotate_heads(wide, back, *table, width=11, back=True)
    for original, widened, plain, returned in zip(x, wide, alone, back, strict=True):
        assert torch.equal(widened[..., :11], plain)
        assert not widened[..., 11:].any()
        assert relative_error(returned, original) < 1e-6


def test_heads_may_be_rotated_in_place(device):
    x, table = heads(11, device, torch.float32)
    here = [rows.clone(memory_format=torch.contiguous_format) for rows in x]
    there = [rows.new_empty(rows.shape) for rows in here]
    rotate_heads(here, there, *table, width=11)
    rotate_heads(here, here, *table, width=11)
    for rows, expected in zip(here, there, strict=True):
        assert torch.equal(rows, expected)

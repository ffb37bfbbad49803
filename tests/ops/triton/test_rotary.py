import pytest
import torch

from switchhead.ops.rotary import _rotary_table
from switchhead.ops.triton.rotary import rotary_table
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

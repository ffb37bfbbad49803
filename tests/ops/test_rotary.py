import pytest
import torch

from switchhead.ops.rotary import _rotary_table, rotary_table


def test_angles_are_positions_times_geometric_frequencies():
    cos, sin = rotary_table(torch.tensor([[0, 3], [7, 1000]]), 2, 100.0, torch.float64)
    angles = torch.tensor([[[0, 0], [3, 0.3]], [[7, 0.7], [1000, 100]]], dtype=torch.float64)
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())


@pytest.mark.parametrize("half", [0, 3])
@pytest.mark.parametrize(
    "positions", [torch.arange(5), torch.arange(6).view(3, 2).mT, torch.arange(4).expand(2, 4), torch.empty(0)]
)
def test_what_a_compiler_is_told_holds_for_positions_of_any_strides(positions, half):
    torch.library.opcheck(_rotary_table, (positions, half, 10000.0, torch.float32))

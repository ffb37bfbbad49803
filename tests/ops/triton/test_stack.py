import pytest
import torch

from switchhead.ops.triton.stack import Weights, stack_weights, unstack_weights
from tests.helpers import of_other_strides

HEADS, EXPERTS, D_MODEL = 2, 3, 70


def weights(d, device):
    shapes = ((HEADS * d, D_MODEL), (HEADS * d, D_MODEL), (HEADS, EXPERTS, D_MODEL, d), (2 * HEADS, EXPERTS, D_MODEL))
    dtypes = (torch.float32, torch.bfloat16, torch.float32, torch.float16)
    return [torch.randn(shape, device=device).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


def padded(rows, size, dtype):
    """`[..., d, D]` as `size` rows of 72 each."""
    return torch.nn.functional.pad(rows.to(dtype), (0, 72 - D_MODEL, 0, size - rows.shape[-2])).flatten(0, -2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("d", [11, 41])
def test_each_weight_has_its_rows_and_the_rest_is_zero(d, contiguous, dtype, device, poisoned_allocations):
    tensors = weights(d, device)
    queries, keys, values, routers = tensors if contiguous else of_other_strides(*tensors)
    heads = [padded(weight.unflatten(0, (HEADS, d)), 48, dtype) for weight in (queries, keys)]
    experts = padded(values.mT, 64, dtype)
    scores = padded(routers.flatten(0, 1), 20, dtype)
    for given, parts in (
        (Weights([queries, keys], values, routers), (*heads, experts, scores)),
        (Weights([queries, keys], values, None), (*heads, experts)),
        (Weights([keys], values, routers), (heads[1], experts, scores)),
    ):
        expected = torch.cat(parts)
        shape = (len(expected), 72)
        assert torch.equal(stack_weights(given, width=48, expert_width=64, shape=shape, dtype=dtype), expected)


@pytest.mark.parametrize("d", [11, 41])
@pytest.mark.parametrize("n", [1, 2])
def test_what_was_stacked_comes_back_from_any_strides(n, d, device, poisoned_allocations):
    *plain, values, routers = weights(d, device)
    given = Weights(plain[:n], values, routers)
    shape = (n * HEADS * 48 + HEADS * EXPERTS * 64 + 20, 72)
    stacked = stack_weights(given, width=48, expert_width=64, shape=shape, dtype=torch.float32)
    for matrix in (stacked, stacked.mT.contiguous().mT):
        found = unstack_weights(matrix, given, width=48, expert_width=64)
        pairs = zip((*found.plain, *found[1:]), (*given.plain, *given[1:]), strict=True)
        for part, original in pairs:
            assert part.is_contiguous()
            assert torch.equal(part, original)

import pytest
import torch

from switchhead.ops.triton.stack import stack_weights
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
    sizes = {"width": 48, "expert_width": 64, "dtype": dtype}

    def check(plain, routers, *parts):
        expected = torch.cat(parts)
        assert torch.equal(stack_weights(plain, values, routers, shape=tuple(expected.shape), **sizes), expected)

    check([queries, keys], routers, *heads, experts, scores)
    check([queries, keys], None, *heads, experts)
    check([keys], routers, heads[1], experts, scores)

"""What several test files need."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from switchhead.routing import Routing


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over norm of the expected; where that is zero, the norm of what was found."""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    size = expected.norm().item()
    return (found - expected).norm().item() / (size or 1.0)


def random_routing(tokens: int, heads: int, experts: int, k: int, *, dtype=torch.float64, skew: float = 0.0) -> Routing:
    """Gates away from 0 and 1, distinct experts; skew > 0 favours the low ones."""
    scores = torch.randn(tokens, heads, experts, dtype=dtype) - skew * torch.arange(experts)
    best, indices = scores.topk(k, dim=-1)
    return Routing(best.sigmoid().requires_grad_(), indices, experts)


def of_other_strides(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same values with the first axis innermost, as leaves that need a gradient where the tensors do."""
    views = (t.detach().transpose(0, -1).contiguous().transpose(0, -1) for t in tensors)
    return tuple(view.requires_grad_(t.requires_grad) for view, t in zip(views, tensors, strict=True))


def check_operator(operator: Callable, arguments: Sequence[object], *, differentiable: bool = True) -> None:
    """What a compiler is told of an operator holds: schema, and shapes, dtypes and strides of its outputs."""
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")[: 3 if differentiable else 2]
    torch.library.opcheck(operator, tuple(arguments), test_utils=tests)


def gradients(output: Tensor, *inputs: Tensor, cotangent: Tensor | None = None) -> tuple[Tensor, ...]:
    """Gradients of `sum(output * cotangent)`; a fixed random cotangent by default."""
    if cotangent is None:
        generator = torch.Generator().manual_seed(1)
        cotangent = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    return torch.autograd.grad(output, inputs, cotangent.to(output))

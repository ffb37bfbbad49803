"""What several test files need."""

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


def gradients(output: Tensor, *inputs: Tensor, cotangent: Tensor | None = None) -> tuple[Tensor, ...]:
    """Gradients of `sum(output * cotangent)`; a fixed random cotangent by default."""
    if cotangent is None:
        generator = torch.Generator().manual_seed(1)
        cotangent = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    return torch.autograd.grad(output, inputs, cotangent.to(output))

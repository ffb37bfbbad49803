"""Errors of the Triton kernels against float64, beside those of plain PyTorch in the same dtype, on a GPU.

    python benchmarks/kernels/check.py [PART PARTS]

Every output and gradient may be twice as wrong as PyTorch's; a second run must repeat the first bit for bit. Most of
the time is compilation: start PARTS processes, each with its PART, to share it.
"""

import itertools
import sys
from typing import NamedTuple

import torch

from switchhead.ops import gated, grouped
from switchhead.ops.triton import moe_linear as module
from switchhead.ops.triton.router import route
from switchhead.routing import Routing

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Case(NamedTuple):
    tokens: int
    heads: int
    experts: int
    k: int
    d_model: int
    d_head: int
    dtype: torch.dtype
    dense_ratio: float = 2.0  # 0: kernels on the chosen experts even where cuBLAS on all of them is the choice


HEADS = [
    Case(1000, 4, 4, 2, 1024, 112, BF16),
    Case(4100, 4, 4, 2, 1024, 112, BF16, 0.0),
    Case(1000, 2, 5, 3, 412, 76, BF16),
    Case(4100, 2, 5, 3, 416, 76, BF16, 0.0),
    Case(1000, 2, 8, 4, 1024, 132, BF16, 0.0),
    Case(2000, 8, 4, 2, 2048, 104, BF16, 0.0),
    Case(1000, 2, 5, 2, 412, 41, FP16),
    Case(65, 3, 4, 1, 416, 100, BF16),
    Case(1000, 2, 4, 2, 416, 64, FP32),
    Case(1000, 1, 1, 1, 1024, 128, BF16),
    Case(1000, 2, 16, 4, 416, 64, BF16),
    Case(63, 2, 16, 16, 416, 41, BF16),
    Case(64, 2, 5, 3, 412, 76, FP16),
    Case(1, 4, 4, 2, 1024, 112, BF16),
    Case(17, 4, 5, 2, 1024, 112, BF16),
]
FEED_FORWARD = [Case(2000, 4, experts, 1, 1024, 128, BF16) for experts in (64, 512)]  # heads: experts of a token


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)).item()


def check(case: Case, reduce: str | None, *, pooled: bool = False) -> bool:
    module._MAX_DENSE_RATIO = case.dense_ratio
    tokens, heads, experts, k = case[:4]
    if pooled and reduce is None:  # one router that chooses `heads` experts
        heads, k = 1, case.heads
    d_in, d_out = (case.d_head, case.d_model) if reduce == "heads" else (case.d_model, case.d_head)
    x = torch.randn(tokens, *([heads] if reduce == "heads" else []), d_in, device="cuda", dtype=case.dtype)
    weight = torch.randn(1 if pooled else heads, experts, d_in, d_out, device="cuda", dtype=case.dtype) / d_in**0.5
    scores = torch.rand(tokens, heads, experts, device="cuda")
    scores[..., 0] += torch.rand(tokens, heads, device="cuda") < 0.5  # skewed
    indices, gates = scores.topk(k, -1).indices, torch.rand(tokens, heads, k, device="cuda")
    shape = {"k": (tokens, heads, d_out), "heads": (tokens, d_out), None: (tokens, heads, k, d_out)}[reduce]
    cotangent = torch.randn(shape, device="cuda", dtype=case.dtype)

    def run(function, dtype: torch.dtype) -> list[torch.Tensor]:
        wide = torch.promote_types(dtype, FP32)
        inputs = [t.to(d, copy=True).requires_grad_() for t, d in ((x, dtype), (weight, dtype), (gates, wide))]
        y = function(*inputs[:2], Routing(inputs[2], indices, experts), reduce=reduce)
        return [y, *torch.autograd.grad(y, inputs[: 2 if reduce is None else 3], cotangent.to(y.dtype))]

    plain_backend = (grouped if pooled else gated).moe_linear
    expected, plain = run(plain_backend, torch.float64), run(plain_backend, case.dtype)
    found, again = run(module.moe_linear, case.dtype), run(module.moe_linear, case.dtype)
    errors = [(relative_error(a, c), relative_error(b, c)) for a, b, c in zip(found, plain, expected, strict=True)]
    good = all(ours <= 2 * theirs + 1e-7 for ours, theirs in errors)
    good &= all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    listed = "  ".join(f"{ours:.1e} ({theirs:.1e})" for ours, theirs in errors)
    print("ok  " if good else "BAD ", reduce, case, listed, flush=True)
    return good


def check_large_offsets() -> bool:
    """More than 2^31 elements in x and in its gradient; the last rows against float32."""
    tokens, d_model, d_head = 2_200_000, 1024, 16
    x = torch.randn(tokens, d_model, device="cuda", dtype=BF16).requires_grad_()
    weight = (torch.randn(1, 3, d_model, d_head, device="cuda", dtype=BF16) / d_model**0.5).requires_grad_()
    indices, gates = torch.randint(3, (tokens, 1, 1), device="cuda"), torch.rand(tokens, 1, 1, device="cuda")
    y = module.moe_linear(x, weight, Routing(gates, indices, 3), reduce="k")
    cotangent = torch.randn_like(y)
    (grad,) = torch.autograd.grad(y, x, cotangent)
    last = slice(tokens - 500, tokens)
    chosen = weight[0, indices[last, 0, 0]].float() * gates[last, 0, :, None]  # [500, d_model, d_head]
    errors = (
        relative_error(y[last, 0], torch.einsum("nd,ndf->nf", x[last].float(), chosen)),
        relative_error(grad[last], torch.einsum("nf,ndf->nd", cotangent[last, 0].float(), chosen)),
    )
    _, expert_indices = route(x.detach(), torch.randn(1, 4, d_model, device="cuda"), 2)
    good = max(errors) < 5e-3 and bool(((expert_indices >= 0) & (expert_indices < 4)).all())
    print("ok  " if good else "BAD ", "offsets beyond 2^31", errors, flush=True)
    return good


def main() -> None:
    part, parts = (int(argument) for argument in sys.argv[1:]) if len(sys.argv) == 3 else (0, 1)
    checks = [(check, (case, reduce), {}) for case, reduce in itertools.product(HEADS, ("k", "heads"))]
    checks += [(check, (case, reduce), {"pooled": True}) for case in FEED_FORWARD for reduce in (None, "heads")]
    checks += [(check_large_offsets, (), {})]
    torch.manual_seed(part)
    results = [function(*arguments, **options) for function, arguments, options in checks[part::parts]]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()

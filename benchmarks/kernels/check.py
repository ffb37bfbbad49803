"""Errors of the Triton kernels against float64, beside those of plain PyTorch in the same dtype, on a GPU.

    python benchmarks/kernels/check.py [PART PARTS]

Every output and gradient may be twice as wrong as PyTorch's; a second run must repeat the first bit for bit, with all
uninitialised memory filled with NaN. Cases cover every pair of levels of the factors in `LEVELS`. Most of the time is
compilation: start PARTS processes, each with its PART, to share it.
"""

import itertools
import os
import random
import sys

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic algorithms ask for

import torch
from torch import Tensor

from switchhead.ops import gated, grouped
from switchhead.ops.relative import relative_attention
from switchhead.ops.triton import moe_linear as module
from switchhead.ops.triton import problem
from switchhead.ops.triton.router import route
from switchhead.routing import Routing

LEVELS = {
    "tokens": (1, 63, 64, 65, 1000, 32768),
    "d_head": (41, 64, 76, 100, 112, 128, 132),
    "d_model": (412, 416, 1024, 2048),
    "experts and k": ((1, 1), (2, 1), (4, 2), (5, 3), (8, 4), (16, 4), (16, 1), (16, 16)),
    "heads": (1, 2, 3, 4),
    "dtype": ("bfloat16", "float16", "float32", "tf32"),
    "routing": ("uniform", "skewed", "same for all"),
    "reduce": ("k", "heads", None),
    "gradient": ("contiguous", "transposed", "expanded"),
    "dense ratio": (2.0, 0.0),  # 0: kernels on the chosen experts even where cuBLAS on all of them is the choice
}
POOLED = [  # sigma-MoE's: one pool of experts for all slots
    {"tokens": 2000, "d_head": 128, "d_model": 1024, "experts and k": (experts, 4), "heads": 1, "dtype": "bfloat16",
     "routing": routing, "reduce": reduce, "gradient": "contiguous", "dense ratio": 2.0}
    for experts, routing, reduce in itertools.product((64, 512), ("uniform", "skewed"), (None, "heads"))
]  # fmt: skip


def covering(levels: dict[str, tuple]) -> list[dict]:
    """Cases in which every pair of levels of two factors occurs, chosen greedily."""
    draw = random.Random(0)
    pairs = itertools.combinations(levels, 2)
    missing = {(a, i, b, j) for a, b in pairs for i in range(len(levels[a])) for j in range(len(levels[b]))}

    def covered(case: dict[str, int]) -> set[tuple]:
        return {(a, case[a], b, case[b]) for a, b in itertools.combinations(levels, 2)} & missing

    cases = []
    while missing:
        a, i, b, j = min(missing)
        tries = [
            {name: draw.randrange(len(values)) for name, values in levels.items()} | {a: i, b: j} for _ in range(60)
        ]
        best = max(tries, key=lambda case: len(covered(case)))
        missing -= covered(best)
        cases.append({name: levels[name][level] for name, level in best.items()})
    return cases


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)).item()


def draw_routing(tokens: int, heads: int, experts: int, k: int, kind: str) -> tuple[Tensor, Tensor]:
    scores = torch.rand(1 if kind == "same for all" else tokens, heads, experts, device="cuda").expand(tokens, -1, -1)
    if kind == "skewed":
        scores[..., 0] += torch.rand(tokens, heads, device="cuda") < 0.8
    return torch.rand(tokens, heads, k, device="cuda"), scores.topk(k, -1).indices


def draw_gradient(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Tensor:
    if layout == "expanded":
        return torch.randn(shape[-1], device="cuda", dtype=dtype).expand(shape)
    if layout == "transposed":
        return torch.randn(shape[::-1], device="cuda", dtype=dtype).permute(*range(len(shape))[::-1])
    return torch.randn(shape, device="cuda", dtype=dtype)


def check(case: dict, *, pooled: bool = False, repeats: int = 1) -> bool:
    tokens, d_head, d_model, (experts, k), heads, dtype, routing, reduce, layout, ratio = case.values()
    problem.MAX_DENSE_RATIO = ratio
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    dtype = getattr(torch, "float32" if dtype == "tf32" else dtype)
    d_in, d_out = (d_head, d_model) if reduce == "heads" else (d_model, d_head)
    per_head = reduce == "heads" and not pooled
    x = torch.randn(tokens, *([heads] if per_head else []), d_in, device="cuda", dtype=dtype)
    weight = torch.randn(1 if pooled else heads, experts, d_in, d_out, device="cuda", dtype=dtype) / d_in**0.5
    gates, indices = draw_routing(tokens, heads, experts, k, routing)
    shape = {"k": (tokens, heads, d_out), "heads": (tokens, d_out), None: (tokens, heads, k, d_out)}[reduce]
    cotangent = draw_gradient(shape, dtype, layout)

    def run(function, dtype: torch.dtype) -> list[Tensor]:
        wide = torch.promote_types(dtype, torch.float32)
        inputs = [t.to(d, copy=True).requires_grad_() for t, d in ((x, dtype), (weight, dtype), (gates, wide))]
        y = function(*inputs[:2], Routing(inputs[2], indices, experts), reduce=reduce)
        return [y, *torch.autograd.grad(y, inputs[: 2 if reduce is None else 3], cotangent.to(y.dtype))]

    plain_backend = (grouped if pooled else gated).moe_linear
    expected, plain = run(plain_backend, torch.float64), run(plain_backend, dtype)
    found = run(module.moe_linear, dtype)
    errors = [(relative_error(a, c), relative_error(b, c)) for a, b, c in zip(found, plain, expected, strict=True)]
    # Of a few numbers PyTorch's may come out right by chance: there some roundings of float32 are allowed.
    luck = [5e-7 if t.numel() < 8 else 1e-7 for t in expected]
    good = all(ours <= 2 * theirs + more for (ours, theirs), more in zip(errors, luck, strict=True))
    for _ in range(repeats):
        good &= all(torch.equal(a, b) for a, b in zip(found, run(module.moe_linear, dtype), strict=True))
    listed = "  ".join(f"{ours:.1e} ({theirs:.1e})" for ours, theirs in errors)
    print("ok  " if good else "BAD ", *case.values(), "" if not pooled else "pooled", listed, flush=True)
    return good


def check_repeats() -> bool:
    """Twenty runs of the published layer's shapes."""
    case = dict.fromkeys(LEVELS) | {
        "tokens": 32768,
        "d_head": 112,
        "d_model": 1024,
        "experts and k": (4, 2),
        "heads": 4,
    }
    case |= {"dtype": "bfloat16", "routing": "skewed", "gradient": "contiguous", "dense ratio": 2.0}
    results = [check(case | {"reduce": reduce}, repeats=20) for reduce in ("k", "heads")]
    return all(results)


def check_decoding() -> bool:
    """One token and sixteen: the definition's result, reading the chosen experts alone."""
    good = True
    for tokens, reduce in itertools.product((1, 16), ("k", "heads", None)):
        d_in, d_out = (112, 1024) if reduce == "heads" else (1024, 112)
        x = torch.randn(tokens, *([4] if reduce == "heads" else []), d_in, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(4, 4, d_in, d_out, device="cuda") / d_in**0.5
        routing = Routing(
            torch.rand(tokens, 4, 2, device="cuda"), torch.arange(2, device="cuda").expand(tokens, 4, 2), 4
        )
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            expected = gated.moe_linear(x.double(), weight.double(), routing, reduce=reduce)
            weight[:, 2:] = torch.nan
            error = relative_error(module.moe_linear(x, weight, routing, reduce=reduce), expected)
        good &= error < 5e-3
        print("ok  " if error < 5e-3 else "BAD ", "decoding", tokens, reduce, f"{error:.1e}", flush=True)
    return good


def check_capture() -> bool:
    """Relative attention, forward and backward, as a CUDA graph."""
    shapes = [(2, 4, 128, 112), (2, 4, 256, 112), (2, 4, 256, 112), (4, 256, 112)]
    q, k, v, r = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes)

    def run() -> tuple[Tensor, ...]:
        y = relative_attention(q, k, v, r, scale=0.1, causal=True, backend="triton")
        return y, *torch.autograd.grad(y, (q, k, v, r), torch.ones_like(y))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # no gradient may be tied to the legacy stream
        expected = run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    graph.replay()
    good = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    print("ok  " if good else "BAD ", "relative attention as a CUDA graph", flush=True)
    return good


def check_large_offsets() -> bool:
    """More than 2^31 elements in x and in its gradient; the last rows against float32."""
    tokens, d_model, d_head = 2_200_000, 1024, 16
    x = torch.randn(tokens, d_model, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(1, 3, d_model, d_head, device="cuda", dtype=x.dtype) / d_model**0.5).requires_grad_()
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
    checks = [(check_large_offsets, (), {}), (check_repeats, (), {}), (check_decoding, (), {}), (check_capture, (), {})]
    checks += [(check, (case,), {"pooled": True}) for case in POOLED]
    checks += [(check, (case,), {}) for case in covering(LEVELS)]
    torch.manual_seed(part)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    results = [function(*arguments, **options) for function, arguments, options in checks[part::parts]]
    print(f"{sum(results)} of {len(results)} good")
    sys.exit(not all(results))


if __name__ == "__main__":
    main()

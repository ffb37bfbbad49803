"""Times of the six expert passes and of the router against cuBLAS on the same active arithmetic.

    python benchmarks/kernels/passes.py [--tokens 32768]

Medians of CUDA graph replays with a cold L2 cache, which include about 4.5 us of replay. Every pass is timed as the
layer runs it, with its sort, the cast of its weights and the scaling of its rows.
"""

import argparse
from collections.abc import Callable

import torch
import triton

from switchhead.ops.triton.grouping import group_rows
from switchhead.ops.triton.moe_linear import _backward, _forward
from switchhead.ops.triton.problem import Problem
from switchhead.ops.triton.router import _route, _route_backward

CONFIGURATIONS = {  # d_model, n_heads, d_head, n_experts, k
    "262M": (1024, 4, 112, 4, 2),
    "47M": (416, 2, 76, 5, 3),
    "262M, 2 heads": (1024, 2, 132, 8, 4),
    "1.3B": (2048, 8, 104, 4, 2),
}
ROUTINGS = ["uniform", "one expert takes 80 %"]


def milliseconds(function: Callable[[], object]) -> float:
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return triton.testing.do_bench(graph.replay, warmup=10, rep=100, return_mode="median")


def passes(tokens: int, d_model: int, heads: int, d: int, experts: int, k: int, routing: str):
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    x, a, grad_values, grad_out = (
        random(tokens, d_model),
        *(random(tokens, heads, d) for _ in range(2)),
        random(tokens, d_model),
    )
    values = torch.randn(heads, experts, d_model, d, device="cuda") / d_model**0.5
    outputs = torch.randn(heads, experts, d, d_model, device="cuda") / d**0.5
    scores = torch.rand(tokens, heads, experts, device="cuda")
    if routing != "uniform":
        scores[..., 0] += torch.rand(tokens, heads, device="cuda") < 0.8
    gates, indices = scores.topk(k, -1)
    indices = indices.int()
    _, kept = _forward(x, values, gates, indices, "k", torch.bfloat16, True)

    def backward(grad, x, weight, kept, reduce, *needs):
        return lambda: _backward(grad, x, weight, gates, indices, kept, reduce, torch.bfloat16, *needs)

    none = x.new_empty(0)
    yield "V forward", lambda: _forward(x, values, gates, indices, "k", torch.bfloat16, True)
    yield "V input and gate gradients", backward(grad_values, x, values, kept, "k", True, False, True)
    yield "V weight gradient", backward(grad_values, x, values, kept, "k", False, True, False)
    yield "O forward", lambda: _forward(a, outputs, gates, indices, "heads", torch.bfloat16, False)
    yield "O input and gate gradients", backward(grad_out, a, outputs, none, "heads", True, False, True)
    yield "O weight gradient", backward(grad_out, a, outputs, none, "heads", False, True, False)

    both = torch.randn(2 * heads, experts, d_model, device="cuda") / d_model**0.5
    problem = Problem.of(x, values, indices)

    def route_and_group():
        _, chosen, _ = _route(x, both, k, False, None)
        for side in chosen.split(heads, 1):
            group_rows(side, problem.project_rows())

    yield "router and sort, two sides", route_and_group
    router_gates, router_indices, rest = _route(x, both, k, False, None)
    grad = torch.randn_like(router_gates)
    yield (
        "router backward",
        lambda: _route_backward(grad, x, both, router_gates, router_indices, rest, False, True, True),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768)
    tokens = parser.parse_args().tokens
    for name, (d_model, heads, d, experts, k) in CONFIGURATIONS.items():
        left = torch.randn(tokens, d_model, device="cuda", dtype=torch.bfloat16)
        right = torch.randn(d_model, heads * k * d, device="cuda", dtype=torch.bfloat16)
        unit = milliseconds(lambda left=left, right=right: left @ right)
        print(f"{name}: d_model {d_model}, {heads} x {d}, E={experts}, k={k}; cuBLAS: {unit:.3f} ms")
        for routing in ROUTINGS:
            for label, function in passes(tokens, d_model, heads, d, experts, k, routing):
                time = milliseconds(function)
                print(f"  {routing:24}{label:30}{time:8.3f} ms  {unit / time:5.0%}")


if __name__ == "__main__":
    main()

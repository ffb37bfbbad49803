"""Expert projections and whole layers on a CPU: which backend is faster, and what SwitchHead costs beside dense.

python benchmarks/cpu.py [--threads 2]
"""

import argparse
import time

import torch

from switchhead import MultiHeadAttention, SwitchHeadAttention
from switchhead.ops import choose_backend, moe_linear, route

# d_model, d_head, heads, experts, k, tokens
SHAPES = [
    (128, 24, 2, 4, 2, 2048),
    (412, 76, 2, 5, 3, 4096),
    (412, 76, 2, 5, 2, 4096),
    (412, 76, 2, 8, 2, 4096),
    (1024, 112, 4, 4, 2, 2048),
    (1024, 132, 2, 8, 4, 2048),
    (412, 128, 1, 16, 4, 2048),
]


def milliseconds(function, repeats=7):
    """Least of several runs after one to warm up; the least is what other work on the machine disturbs last."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def projections():
    print("| d_model | d_head | heads | E | k | values: gated | grouped | outputs: gated | grouped | auto |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for d_model, d_head, heads, experts, k, tokens in SHAPES:
        x, a = torch.randn(tokens, d_model, requires_grad=True), torch.randn(tokens, heads, d_head, requires_grad=True)
        w_v = (torch.randn(heads, experts, d_model, d_head) / d_model**0.5).requires_grad_()
        w_o = (torch.randn(heads, experts, d_head, d_model) / d_head**0.5).requires_grad_()
        routing = route(torch.randn(tokens, d_model), torch.randn(heads, experts, d_model), k)
        routing.gates.requires_grad_()
        times = []
        for operands, reduce in (((x, w_v), "k"), ((a, w_o), "heads")):
            for backend in ("gated", "grouped"):

                def step(operands=operands, reduce=reduce, backend=backend, routing=routing):
                    moe_linear(*operands, routing, reduce=reduce, backend=backend).sum().backward()

                times.append(milliseconds(step))
        auto = choose_backend(x, w_v, routing).backend
        print(
            f"| {d_model} | {d_head} | {heads} | {experts} | {k} |",
            " | ".join(f"{t:.0f}" for t in times),
            f"| {auto} |",
        )


def layer(batch=8, length=512, d_model=412):
    x = torch.randn(batch, length, d_model, requires_grad=True)
    layers = {
        "dense 10 x 41": MultiHeadAttention(d_model=d_model, n_heads=10, d_head=41, positions="rotary"),
        "dense 10 x 48 (padded)": MultiHeadAttention(d_model=d_model, n_heads=10, d_head=48, positions="rotary"),
        "SwitchHead 2 x 76": SwitchHeadAttention(
            d_model=d_model, n_heads=2, d_head=76, n_experts=5, k=3, positions="rotary"
        ),
    }
    times = {}
    for name, module in layers.items():
        module.compile(fullgraph=True)
        times[name] = milliseconds(lambda m=module: m(x).sum().backward(), repeats=15)
        print(f"layer {batch} x {length} x {d_model}, {name}: {times[name]:.0f} ms")
    *dense, ours = times.values()
    print(f"SwitchHead / faster dense: {ours / min(dense):.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only-layer", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if not arguments.only_layer:
        projections()
    layer()

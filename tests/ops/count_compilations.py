"""Prints how often compiled code of a layer's operators was compiled for ten lengths; run by test_compilations.py.

Kernels are neither interpreted nor launched, on a CPU: `torch.compile` sees them as on a GPU. Private here:
`JITFunction.run`, which launches, does nothing, and Triton's driver is a stand-in.
"""

import json
import sys

import torch
import triton
from torch._inductor.compile_fx import compile_fx
from torch.nn import functional as F
from triton.runtime.jit import JITFunction

from switchhead.ops.triton.inputs import project_inputs
from switchhead.ops.triton.moe_linear import moe_linear
from tests.ops.compile_for_gpu import NEWEST, StandIn

LENGTHS = (17, 24, 40, 300, 600, 33, 1024, 1100, 2048, 130)
CASES = {  # heads, experts, k, d_head, d_model, dtype, rotated, training
    "sets": (4, 4, 2, 16, 64, torch.bfloat16, True, True),
    "inference": (4, 4, 2, 16, 64, torch.bfloat16, True, False),
    "odd widths": (2, 5, 2, 11, 60, torch.float16, True, True),
    "single slots": (1, 12, 4, 16, 64, torch.float32, False, True),
}


def compilations(heads, experts, k, d, d_model, dtype, rotated, training):
    graphs = []

    def backend(graph, inputs):  # all of the compiler up to where it writes code
        graphs.append(graph)
        return compile_fx(graph, inputs, inner_compile=lambda graph, inputs, **_: graph.forward)

    @torch.compile(backend=backend, fullgraph=True)
    def layer(x, cos, sin, queries, keys, routers, values, outputs):
        rows, rotation, width = x.flatten(0, 1), (cos, sin) if rotated else None, -(-d // 8) * 8
        *heads_of, routings = project_inputs(
            rows, queries, keys, routers, values, k, rotation=rotation, dtype=dtype, width=width
        )
        q, k_, v = (part.unflatten(0, x.shape[:2]).transpose(1, 2) for part in heads_of)
        y = F.scaled_dot_product_attention(q, k_, v, is_causal=True).transpose(1, 2).flatten(0, 1)
        return moe_linear(y[..., :d], outputs, routings[0], reduce="heads").float().sum()

    shapes = ((heads * d, d_model), (heads * d, d_model), (2 * heads, experts, d_model), (heads, experts, d_model, d))
    weights = [torch.zeros(shape, requires_grad=training) for shape in (*shapes, (heads, experts, d, d_model))]
    for length in LENGTHS:
        tables = [torch.zeros(length, d // 2) for _ in range(2)]
        loss = layer(torch.zeros(2, length, d_model, requires_grad=training), *tables, *weights)
        if training:
            loss.backward()
    return len(graphs)


if __name__ == "__main__":
    triton.runtime.driver.set_active(StandIn(NEWEST))
    JITFunction.run = lambda self, *args, **kwargs: None
    json.dump(compilations(*CASES[sys.argv[1]]), sys.stdout)

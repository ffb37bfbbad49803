"""How long the host takes to launch one compiled layer, forward and backward, when the GPU is never what it waits for.

    python benchmarks/host.py

Few tokens, so that kernels are shorter than their launches. Backward in PyTorch's thread of its own, as usual, and in
the calling one. Set TORCHINDUCTOR_CPP_WRAPPER=1 for Inductor's C++ wrapper.
"""

import statistics
import time

import torch
from torch import nn

from switchhead import MultiHeadAttention, SwitchHeadAttention

LAYERS = {
    "dense": lambda: MultiHeadAttention(d_model=1024, n_heads=16, d_head=64, positions="rotary"),
    "SwitchHead": lambda: SwitchHeadAttention(
        d_model=1024, n_heads=4, d_head=112, n_experts=4, k=2, positions="rotary"
    ),
}


def measure(layer: nn.Module, x: torch.Tensor, steps: int = 100, warmup: int = 10) -> tuple[float, float]:
    """Median microseconds of forward and of backward until the host goes on."""
    cotangent = torch.randn_like(x, dtype=torch.bfloat16)
    seconds = []
    for _ in range(warmup + steps):
        x.grad = None
        layer.zero_grad(set_to_none=True)
        start = time.perf_counter()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = layer(x)
        middle = time.perf_counter()
        y.backward(cotangent)
        seconds.append((middle - start, time.perf_counter() - middle))
    forward, backward = zip(*seconds[warmup:], strict=True)
    return 1e6 * statistics.median(forward), 1e6 * statistics.median(backward)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/host.py measures launches on a CUDA device, and there is none here")
    print("layer        backward in   forward us   backward us")
    for name, make in LAYERS.items():
        layer = make().cuda()
        layer.compile(fullgraph=True)
        x = torch.randn(4, 512, 1024, device="cuda").requires_grad_()
        for thread in ("own thread", "the caller"):
            with torch.autograd.set_multithreading_enabled(thread == "own thread"):
                forward, backward = measure(layer, x)
            print(f"{name:12} {thread:12} {forward:11.0f} {backward:13.0f}", flush=True)


if __name__ == "__main__":
    main()

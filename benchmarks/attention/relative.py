"""Time and memory of relative attention on one GPU, beside attention without positions.

    python benchmarks/attention/relative.py

Forward and backward in bfloat16 over 32,768 tokens, medians. The yardsticks work on the same queries, keys and values:
flash attention with the same visible pairs (causal, aligned to the last key), and cuDNN over all pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench

from switchhead.ops.relative import relative_attention

TOKENS = 32_768


def draw(heads: int, width: int, queries: int) -> list[Tensor]:
    """Queries, keys and values as a layer makes them (`[B, T, H, d]` transposed), with memory, and positions."""
    batch, keys = TOKENS // queries, 2 * queries
    shapes = [(batch, queries, heads, width), *[(batch, keys, heads, width)] * 2, (heads, keys, width)]
    q, k, v, r = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    return [*(x.transpose(1, 2) for x in (q, k, v)), r]


def step(function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Callable[[], object]:
    """Forward and backward."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    cotangent = torch.randn_like(function(*leaves))
    return lambda: torch.autograd.grad(function(*leaves), leaves, cotangent)


def time_ms(run: Callable[[], object]) -> float:
    return do_bench(run, warmup=10, rep=50, return_mode="median")


def kernel_times(run: Callable[[], object]) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.device_time_total)
    return ", ".join(f"{event.key[:24]} {event.device_time_total / 1e3:.2f}" for event in events[:4])


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v)


def main() -> None:
    print("heads x width     T   fused ms   flash, same pairs   cuDNN, all pairs   fused / flash")
    for heads, width in ((16, 64), (4, 112), (10, 41), (2, 76)):
        tensors = draw(heads, width, 512)
        mask = causal_lower_right(512, 1024)
        run = step(lambda q, k, v, r: relative_attention(q, k, v, r, scale=0.1, backend="triton"), tensors)
        fused = time_ms(run)
        tensors = [torch.nn.functional.pad(x, (0, -width % 8)) for x in tensors[:3]]  # an honest yardstick
        flash = time_ms(step(lambda q, k, v, mask=mask: scaled_dot_product_attention(q, k, v, mask), tensors))
        dense = time_ms(step(cudnn, tensors))
        print(
            f"{heads:5d} x {width:<5d} {512:5d}   {fused:8.2f}   {flash:17.2f}   {dense:16.2f}   {fused / flash:13.2f}"
            f"   ({kernel_times(run)})"
        )

    print("\n16 x 64        T   fused ms   MiB above inputs")
    for queries in (512, 2048, 8192):
        run = step(
            lambda q, k, v, r: relative_attention(q, k, v, r, scale=0.1, backend="triton"), draw(16, 64, queries)
        )
        run()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        print(f"{queries:16d}   {time_ms(run):8.2f}   {peak:16.0f}")


if __name__ == "__main__":
    main()

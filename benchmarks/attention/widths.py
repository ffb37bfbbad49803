"""Time of causal attention by PyTorch's kernels on one GPU, by the width of heads: which widths cost what.

    python benchmarks/attention/widths.py

Forward and backward in bfloat16, 32,768 tokens in sequences of 2,048 to 32,768, medians.
"""

from __future__ import annotations

import torch
from relative import step, time_ms
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

HEADS = ((16, 128), *((8, width) for width in (128, 120, 112, 104, 96, 88, 80, 72, 64, 56, 48, 40)))
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/attention/widths.py times a CUDA device, and there is none here")
    print("length   heads x width   " + "   ".join(f"{name} ms" for name in BACKENDS))
    for length in (2048, 8192, 32768):
        for heads, width in HEADS:
            shape = (32768 // length, length, heads, width)
            tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
            times = []
            for name, backend in BACKENDS.items():
                with sdpa_kernel(backend):
                    times.append(f"{time_ms(step(attend, tensors)):{len(name) + 3}.2f}")
            print(f"{length:6d}   {heads:5d} x {width:<5d}   " + "   ".join(times), flush=True)


if __name__ == "__main__":
    main()

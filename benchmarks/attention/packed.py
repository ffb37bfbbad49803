"""Time of packed documents on one GPU, beside plain causal attention over the row.

    python benchmarks/attention/packed.py

Forward and backward in bfloat16, 4 rows of 8,192 tokens, documents of 1,024 tokens on average (geometric), medians.
"""

from __future__ import annotations

import torch
from relative import step, time_ms
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from switchhead.ops.packed import document_boundaries, packed_attention


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=True)


def main() -> None:
    starts = torch.rand(4, 8192, generator=torch.Generator().manual_seed(1)) < 1 / 1024
    cu_seqlens = document_boundaries((~starts).long()).cuda()  # positions other than 0 need not be right
    print(f"{len(cu_seqlens) - 1} documents, the longest of {cu_seqlens.diff().max().item()} tokens")
    print("heads x width   packed ms   causal (cuDNN) ms   packed / causal")
    for heads, width in ((16, 64), (4, 112), (10, 41)):
        shape = (4, 8192, heads, width)
        tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
        packed = time_ms(step(lambda q, k, v: packed_attention(q, k, v, cu_seqlens=cu_seqlens, scale=0.1), tensors))
        plain = time_ms(step(causal, [pad(x, (0, -width % 8)) for x in tensors]))
        print(f"{heads:5d} x {width:<5d}   {packed:9.2f}   {plain:17.2f}   {packed / plain:15.2f}")


if __name__ == "__main__":
    main()

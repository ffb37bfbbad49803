"""What a device could do, and what a process holds of it."""

from __future__ import annotations

import resource
import sys

import torch

from switchhead.accounting import model_resources
from switchhead.hf import SwitchHeadConfig

# Dense peaks in FLOP/s by a part of the device's name, from the vendors' data sheets: 16-bit matrix units with 32-bit
# accumulation, and float32 as PyTorch computes it by default (without TF32). The first match counts.
PEAKS: dict[str, tuple[float, float]] = {
    "B200": (2250e12, 75e12),
    "GH200": (989e12, 67e12),
    "H200": (989e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "H100 NVL": (835e12, 60e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "V100": (125e12, 15.7e12),  # float16 only
    "RTX 4090": (165e12, 82.6e12),
    "RTX 3090": (71e12, 35.6e12),
}


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Most FLOP/s of a device in matrix products, for inputs of "float32", "bfloat16" or "float16"; None: not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for part, (half, single) in PEAKS.items():
        if part in name:
            return single if dtype == "float32" else half
    return None


def peak_tokens_per_second(
    model: SwitchHeadConfig, *, chunk_length: int, device: torch.device, dtype: str
) -> float | None:
    """Tokens/s of training on a device that does nothing but the model's matrix products, at its peak; None: not known.

    What a run reaches of it is its model FLOPs utilisation. Recomputed activations do not count, nor padding, nor
    experts that no token uses.
    """
    peak = peak_flops(device, dtype)
    if peak is None:
        return None
    resources = model_resources(model, chunk_length=chunk_length, device="cpu")
    return peak / (resources.forward_flops + resources.backward_flops)


def peak_memory(device: torch.device) -> int:
    """Most bytes that this process has held: allocated on a GPU, or resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

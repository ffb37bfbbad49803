"""What this machine has, and which implementation would run on it and why."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend

import switchhead
from switchhead.ops import choose_backend
from switchhead.routing import Routing

# Everything beyond the core is optional; this is what each package is for.
OPTIONAL_PACKAGES = {
    "transformers": "language models (switchhead.hf)",
    "triton": "GPU kernels",
    "tyro": "the switchhead command",
    "rich": "progress display",
    "tensorboard": "training curves",
    "matplotlib": "plots",
}
_CORE_PACKAGES = ("torch", "numpy", "safetensors", "jaxtyping")
_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Device:
    """One processor that models can run on."""

    name: str
    description: str
    capability: str | None
    memory_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What `backend="auto"` would run for one operation, device and dtype."""

    operation: str
    device: str
    dtype: str
    backend: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """Result of `examine`.

    Attributes:
        python: version of the interpreter.
        platform: operating system and processor.
        packages: installed version of every package that is used, None where it is missing.
        compiler: C++ compiler that `torch.compile` needs on a CPU, None where there is none.
        devices: processors, the CPU first.
        backends: choices for a layer of the paper's 262M model.
    """

    python: str
    platform: str
    packages: dict[str, str | None]
    compiler: str | None
    devices: list[Device]
    backends: list[Chosen]


def examine() -> Report:
    """Look at the machine. Takes a moment, allocates a few megabytes on each kind of device, runs no kernel."""
    devices = _devices()
    kinds = dict.fromkeys(device.name.split(":")[0] for device in devices)
    return Report(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        packages={
            "switchhead": switchhead.__version__,
            **{name: _version(name) for name in (*_CORE_PACKAGES, *OPTIONAL_PACKAGES)},
        },
        compiler=_cpp_compiler(),
        devices=devices,
        backends=[
            choice
            for kind in kinds
            for dtype in _DTYPES
            for choice in (_expert_projections(kind, dtype), _attention(kind, dtype))
        ],
    )


def render(report: Report) -> str:
    """The report as text for people."""
    lines = [f"python {report.python} on {report.platform}", "", "packages"]
    for name, version in report.packages.items():
        purpose = OPTIONAL_PACKAGES.get(name)
        missing = f"not installed; needed for: {purpose}" if purpose else "not installed"
        lines.append(f"  {name:<14} {version or missing}")
    compiler = report.compiler or "none found: install g++ to use torch.compile on the CPU"
    lines += [f"  {'C++ compiler':<14} {compiler}", "", "devices"]
    for device in report.devices:
        facts = [device.description]
        if device.capability is not None:
            facts.append(f"capability {device.capability}")
        if device.memory_bytes is not None:
            facts.append(f"{device.memory_bytes / 2**30:.1f} GiB")
        lines.append(f"  {device.name:<14} {', '.join(facts)}")
    lines += ["", "what runs here (a layer of the paper's 262M model)"]
    for chosen in report.backends:
        lines.append(f"  {chosen.operation}, {chosen.device}, {chosen.dtype}: {chosen.backend}")
        lines.append(f"      {chosen.reason}")
    return "\n".join(lines)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpp_compiler() -> str | None:
    """The compiler that PyTorch's CPU code generator would find first."""
    candidates = (os.environ.get("CXX"), "g++", "clang++")
    return next((path for name in candidates if name and (path := shutil.which(name))), None)


def _devices() -> list[Device]:
    threads = torch.get_num_threads()
    cpu = f"{platform.processor() or platform.machine()}, {threads} thread{'s' * (threads != 1)}"
    devices = [Device(name="cpu", description=cpu, capability=None, memory_bytes=None)]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            devices.append(
                Device(
                    name=f"cuda:{index}",
                    description=properties.name,
                    capability=f"{properties.major}.{properties.minor}",
                    memory_bytes=properties.total_memory,
                )
            )
    return devices


def _expert_projections(device: str, dtype: torch.dtype) -> Chosen:
    tokens, heads, n_experts, k, d_model, d_head = 512, 4, 4, 2, 1024, 112
    x = torch.empty(tokens, d_model, device=device, dtype=dtype)
    weight = torch.empty(heads, n_experts, d_model, d_head, device=device, dtype=dtype)
    routing = Routing(
        gates=torch.empty(tokens, heads, k, device=device),
        expert_indices=torch.zeros(tokens, heads, k, device=device, dtype=torch.int64),
        n_experts=n_experts,
    )
    choice = choose_backend(x, weight, routing)
    return _chosen("expert projections", device, dtype, choice.backend, choice.reason)


def _attention(device: str, dtype: torch.dtype) -> Chosen:
    q = torch.empty(1, 4, 512, 112, device=device, dtype=dtype)  # [B, H, T, d_head]
    choice = torch._fused_sdp_choice(q, q, q, is_causal=True)  # pyright: ignore[reportPrivateImportUsage]
    backend = SDPBackend(choice)
    return _chosen(
        "causal attention", device, dtype, backend.name.lower(), "what scaled_dot_product_attention prefers here"
    )


def _chosen(operation: str, device: str, dtype: torch.dtype, backend: str, reason: str) -> Chosen:
    name = str(dtype).removeprefix("torch.")
    return Chosen(operation=operation, device=device, dtype=name, backend=backend, reason=reason)

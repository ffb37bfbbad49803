"""Which kernels a GPU's time goes to in training steps of a recipe, or in forward and backward of a layer.

    python benchmarks/breakdown.py step c4-45m-switchhead-rope-aligned [--rows 40]
    python benchmarks/breakdown.py layer 1.3b [--length 2048]

Microseconds and launches per step or pass; compiled, bfloat16, a step replayed as a CUDA graph, on random tokens.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from switchhead import SwitchHeadAttention
from switchhead.bench.layer import LAYERS
from switchhead.bench.step import random_batches
from switchhead.recipes import get_recipe
from switchhead.train.trainer import Trainer


def training_step(name: str) -> Callable[[], object]:
    recipe = get_recipe(name).with_training(dtype="bfloat16", compile=True, cuda_graphs=True)
    batches = random_batches(recipe.model, recipe.training)
    return Trainer(recipe.model, recipe.training, batches, torch.device("cuda")).train_step


def layer_passes(name: str, length: int | None, tokens: int = 32768) -> Callable[[], object]:
    config = LAYERS[name]
    length = length or config.lengths[0]
    layer = SwitchHeadAttention(
        d_model=config.d_model, n_heads=config.n_heads, d_head=config.d_head, n_experts=config.n_experts, k=config.k,
        positions="rotary",
    ).cuda()  # fmt: skip
    layer.compile(fullgraph=True)
    x = torch.randn(tokens // length, length, config.d_model, device="cuda").requires_grad_()
    cotangent = torch.randn_like(x, dtype=torch.bfloat16)

    def run() -> None:
        x.grad = None
        layer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = layer(x)
        y.backward(cotangent)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("step", "layer"))
    parser.add_argument("name", help="of a recipe, or of a layer of `switchhead bench layer`")
    parser.add_argument("--length", type=int, help="of a layer's sequences")
    parser.add_argument("--rows", type=int, default=40, help="kernels to print")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/breakdown.py watches kernels on a CUDA device, and there is none here")
    if options.what == "layer" and options.name not in LAYERS:
        parser.error(f"layer {options.name} unknown; use {', '.join(LAYERS)}")
    run = training_step(options.name) if options.what == "step" else layer_passes(options.name, options.length)
    for _ in range(8):
        run()
    torch.cuda.synchronize()
    repeats = 5
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
        wall = time.perf_counter() - start
    kernels = [event for event in profiler.key_averages() if event.device_type == DeviceType.CUDA]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in kernels) / repeats
    launches = sum(event.count for event in kernels) / repeats
    print(f"{options.name}: {1e6 * wall / repeats:.0f} us, of which kernels {busy:.0f} us in {launches:.0f} launches")
    for event in kernels[: options.rows]:
        print(f"{event.self_device_time_total / repeats:9.1f} us {event.count / repeats:6.1f} x  {event.key[:110]}")


if __name__ == "__main__":
    main()

"""Training steps on one and on several GPUs: weak scaling of a recipe under DDP or FSDP2.

    torchrun --nproc-per-node 1 benchmarks/scaling.py --parallel ddp
    torchrun --nproc-per-node 2 benchmarks/scaling.py --parallel ddp
    torchrun --nproc-per-node 2 benchmarks/scaling.py --parallel fsdp

The first rank prints one JSON line; the efficiency of n GPUs is their tokens/s over n times those of one.
"""

import argparse
import dataclasses
import json

import torch

from switchhead.bench import bench_steps
from switchhead.recipes import get_recipe
from switchhead.runs import choose_device
from switchhead.train.distributed import join_world


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="c4-262m-switchhead")
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--rows", type=int, default=64, help="sequences in a step, on each rank")
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    device = choose_device(options.device)
    with join_world(device) as world:
        recipe = get_recipe(options.recipe).with_training(
            batch_size=options.rows * world.size,
            micro_batch_size=options.micro_batch_size,
            dtype=options.dtype,
            compile=options.compile,
        )
        models = [(recipe.name, recipe.model, recipe.training)]
        (row,) = bench_steps(models, world.place(device), steps=options.steps, world=world, parallel=options.parallel)
        if world.is_first:
            here = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
            setting = {**vars(options), "ranks": world.size, "device": here, "torch": torch.__version__}
            print(json.dumps({**setting, **dataclasses.asdict(row)}), flush=True)


if __name__ == "__main__":
    main()

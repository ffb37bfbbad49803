"""Peak memory of a training step on a GPU, beside what `switchhead.accounting.model_resources` says of it.

    python benchmarks/memory.py
    python benchmarks/memory.py c4-45m-switchhead-rope c4-45m-dense-rope --batch-size 64 --length 512

Prints a JSON line for each recipe. `measured` is the most that PyTorch's allocator has given out during forward and
backward, with parameters and Adam's averages in place, as `predicted` counts; `with_optimizer` is that of the whole
step.
"""

import argparse
import dataclasses
import json

import torch

from switchhead.accounting import model_resources
from switchhead.hf import SwitchHeadConfig, SwitchHeadForCausalLM
from switchhead.recipes import get_recipe

RECIPES = (
    "c4-45m-switchhead-rope", "c4-45m-dense-rope", "c4-244m-switchhead-rope", "c4-244m-dense-rope", "c4-47m-switchhead",
    "c4-47m-dense", "c4-47m-switchall", "wikitext103-47m-moa-h2", "modern-47m-switchhead",
)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, help="tokens of a sequence; otherwise the recipe's")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU; in CI the CPU's allocator is asked, see tests/accounting/test_model.py")
    for name in options.recipes:
        recipe = get_recipe(name)
        length = options.length or recipe.training.chunk_length
        model = dataclasses.replace(recipe.model, max_position_embeddings=length)
        shape = {"chunk_length": length, "batch_size": options.batch_size, "dtype": options.dtype}
        predicted = model_resources(model, **shape).peak_bytes
        measured, with_optimizer = measure(model, **shape)
        row = {"recipe": name, **shape, "predicted": predicted, "measured": measured, "with_optimizer": with_optimizer}
        here = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        print(json.dumps({**row, "predicted_over_measured": round(predicted / measured, 4), **here}), flush=True)


def measure(config: SwitchHeadConfig, *, chunk_length: int, batch_size: int, dtype: str) -> tuple[int, int]:
    """Peak bytes of forward and backward, and of the whole step, when all kernels have run before."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = SwitchHeadForCausalLM(config).train()
        tokens = torch.randint(config.vocab_size, (batch_size, chunk_length))
        memory = None
        if config.memory_length:
            rows = (batch_size, config.memory_length, config.hidden_size)
            memory = tuple(torch.randn(rows) for _ in range(config.num_hidden_layers))
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    autocast = torch.autocast("cuda", getattr(torch, dtype), enabled=dtype != "float32")
    peaks = (0, 0)
    for _ in range(3):
        optimizer.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        with autocast:
            loss = model(tokens, shift_labels=tokens, memory=memory).loss
        loss.backward()
        before = torch.cuda.max_memory_allocated()
        optimizer.step()
        peaks = before, torch.cuda.max_memory_allocated()
    return peaks


if __name__ == "__main__":
    main()

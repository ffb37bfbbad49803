"""How long BLiMP takes: a recipe's model with random weights (time does not depend on them), every pair or the first.

python benchmarks/blimp.py --task-data DIR --tokenizer DIR [--recipe c4-47m-switchhead] [--limit 5] [--device cuda]

DIR of the tokenizer: a Hugging Face tokenizer, such as the `tokenizer` of a prepared directory. Prints one JSON line
with the wall-clock and CPU seconds, and both for all 134,000 sentences.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from switchhead.data import load_tokenizer
from switchhead.eval import LanguageModel, Settings, evaluate_tasks
from switchhead.hf import SwitchHeadForCausalLM
from switchhead.recipes import get_recipe
from switchhead.runs import choose_device

SENTENCES = 134_000

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--task-data", type=Path, required=True)
parser.add_argument("--tokenizer", required=True)
parser.add_argument("--recipe", default="c4-47m-switchhead")
parser.add_argument("--limit", type=int, help="pairs of each paradigm")
parser.add_argument("--batch-size", type=int)
parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
parser.add_argument("--device", default="auto")
parser.add_argument("--threads", type=int, help="CPU threads of PyTorch")
arguments = parser.parse_args()

if arguments.threads:
    torch.set_num_threads(arguments.threads)
vocabulary = load_tokenizer(arguments.tokenizer)
config = get_recipe(arguments.recipe).model
config.vocab_size = vocabulary.size
torch.manual_seed(0)
model = SwitchHeadForCausalLM(config).to(choose_device(arguments.device)).eval()
language_model = LanguageModel(name=arguments.recipe, model=model, vocabulary=vocabulary)


def seconds(limit):
    settings = Settings(
        task_data=arguments.task_data, limit=limit, batch_size=arguments.batch_size, dtype=arguments.dtype
    )
    wall, cpu = time.perf_counter(), time.process_time()
    (result,) = evaluate_tasks(language_model, ["blimp"], settings)
    return time.perf_counter() - wall, time.process_time() - cpu, result


seconds(1)  # starts threads, compiles kernels
wall, cpu, result = seconds(arguments.limit)
factor = SENTENCES / (2 * result.examples)
print(
    json.dumps(
        {
            "recipe": arguments.recipe,
            "device": torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "dtype": arguments.dtype,
            "sentences": 2 * result.examples,
            "wall_seconds": round(wall, 2),
            "cpu_seconds": round(cpu, 2),
            "wall_seconds_for_all": round(wall * factor, 1),
            "cpu_seconds_for_all": round(cpu * factor, 1),
            "accuracy": result.scores["accuracy"].value,
        }
    )
)

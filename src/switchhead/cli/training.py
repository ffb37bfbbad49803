"""`switchhead train`."""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import tyro

from switchhead.cli.common import Chosen, Device, Json, RecipeName, arguments_of_the_user, find_recipe, print_json
from switchhead.cli.evaluation import score_lines, scores

if TYPE_CHECKING:
    from switchhead.train import TrainingConfig

Setting = TypeVar("Setting")
OfRecipe = Annotated[Setting, tyro.conf.arg(help_behavior_hint="(default: the recipe's)")]


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """What the command line can change of a recipe's `TrainingConfig`; None: as the recipe has it."""

    steps: OfRecipe[int | None] = None
    """optimizer steps."""
    batch_size: OfRecipe[int | None] = None
    """sequences in a step, over all ranks."""
    micro_batch_size: OfRecipe[int | None] = None
    """sequences that a rank runs at once; the gradients of a step are summed over them."""
    chunk_length: OfRecipe[int | None] = None
    """tokens of a sequence."""
    learning_rate: OfRecipe[float | None] = None
    """the highest, after the warm-up."""
    warmup_steps: OfRecipe[int | None] = None
    """steps until it is reached."""
    weight_decay: OfRecipe[float | None] = None
    """decoupled, on matrices only."""
    grad_clip: OfRecipe[float | Literal["off"] | None] = None
    """largest norm of the gradient."""
    seed: OfRecipe[int | None] = None
    """of initial weights, dropout and the order of the text."""
    dtype: OfRecipe[Literal["float32", "bfloat16", "float16"] | None] = None
    """of the computation; bfloat16 and float16 are autocast over float32 weights, float16 with loss scaling."""
    compile: OfRecipe[Literal["on", "off"] | None] = None
    """run the model through torch.compile."""
    cuda_graphs: OfRecipe[Literal["on", "off"] | None] = None
    """replay forward and backward of a step as a CUDA graph."""
    loss_chunk_length: OfRecipe[int | None] = None
    """positions whose scores over the vocabulary exist at once."""
    mask_documents: OfRecipe[Literal["on", "off"] | None] = None
    """keep documents in one window from seeing each other."""
    skip_nonfinite: OfRecipe[int | None] = None
    """pass over so many steps whose loss or gradient is not finite."""
    eval_every: OfRecipe[int | None] = None
    """steps between validations."""
    validation_tokens: OfRecipe[int | None] = None
    """tokens of the validation text that are scored."""
    save_every: OfRecipe[int | None] = None
    """steps between checkpoints."""
    usage_every: OfRecipe[int | None] = None
    """steps between measurements of how experts are used."""

    def apply(self, training: TrainingConfig) -> TrainingConfig:
        """The configuration with these settings.

        Raises:
            UsageError: a value that does not fit.
        """
        changes = {name: value for name, value in vars(self).items() if value is not None}
        for name in ("compile", "cuda_graphs", "mask_documents"):
            if name in changes:
                changes[name] = changes[name] == "on"
        if self.grad_clip == "off":
            changes["grad_clip"] = None
        with arguments_of_the_user():
            return dataclasses.replace(training, **changes)


def train(
    recipe: RecipeName,
    /,
    *,
    data: str,
    valid: Chosen[str | None] = None,
    out: Chosen[Path | None] = None,
    resume: bool = False,
    allow_changes: bool = False,
    device: Device = "auto",
    parallel: Literal["ddp", "fsdp"] = "ddp",
    tracker: Chosen[Literal["wandb", "trackio"] | None] = None,
    settings: Annotated[TrainingSettings, tyro.conf.arg(name="")] = TrainingSettings(),
    as_json: Json = False,
) -> None:
    """Train a recipe's model on text, into a run directory.

    On several devices: torchrun --nproc-per-node N -m switchhead train ...

    Args:
        data: training text: a directory made by `switchhead prepare`, text:FILE|GLOB, jsonl:GLOB#field or
            parquet:GLOB#column.
        valid: validation text; otherwise the prepared directory's own, or the tail of the training text.
        out: the run directory; otherwise runs/RECIPE.
        resume: go on from the newest checkpoint of the run directory; where there is none, say so and begin.
        allow_changes: resume although recipe, settings or text are not the run's.
        parallel: how the processes of torchrun share the model: ddp keeps it whole in each, fsdp shards it.
        tracker: a service that shows the run, besides metrics.jsonl and TensorBoard; otherwise none.
    """
    _tell_that_it_begins(recipe)
    from switchhead.train import train

    chosen = find_recipe(recipe)
    training = settings.apply(chosen.training)
    result = train(
        model=chosen.model,
        training=training,
        data=data,
        valid=valid,
        out=out or Path("runs") / chosen.name,
        recipe=chosen.name,
        resume=resume,
        allow_changes=allow_changes,
        device=device,
        parallel=parallel,
        tracker=tracker,
    )
    if result.rank:  # the first process speaks for all
        return
    validation = result.validation
    if as_json:
        print_json(
            {
                "run": str(result.run),
                "step": result.step,
                "finished": result.finished,
                "validation": validation and {"step": result.validation_step, **scores(validation)},
                "tokens_per_second": result.tokens_per_second,
            }
        )
        return
    if result.finished and result.tokens_per_second is None:  # no step was left
        print(f"{result.run}: was finished already, at step {result.step} of {training.steps}; nothing was done")
        return
    print(f"{result.run}: step {result.step} of {training.steps}")
    if validation is not None:
        print(f"validation text at step {result.validation_step}: {score_lines(validation)}")
    if not result.finished:
        print("stopped early; the same command with --resume goes on from here")


def _tell_that_it_begins(recipe: str) -> None:
    """Loading libraries takes seconds, which somebody at a terminal waits for; elsewhere an error is the only line."""
    if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":  # torchrun's number of the process
        print(f"{recipe}  loading PyTorch and the text", file=sys.stderr)

"""Training of one configuration after the other, each in its run directory, and what came of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from switchhead.accounting import attention_cost, count_parameters, key_value_numbers
from switchhead.errors import RunError
from switchhead.hf import SwitchHeadConfig
from switchhead.recipes import Recipe
from switchhead.runs import open_run
from switchhead.train import train
from switchhead.train.metrics import read_metrics


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trained configuration.

    Attributes:
        name: of the configuration.
        run: its run directory, below that of the report.
        attention: kind of attention.
        heads: attention matrices in a layer.
        experts: experts of a projection and head; None without experts.
        k: experts that a token uses.
        expert_projections: which of q, k, v, o have experts.
        head_dim: width of a head.
        intermediate_size: width of the feed-forward.
        parameters: of the model, with the vocabulary of the text.
        active_parameters: those that a token uses.
        macs: multiply-accumulates of one attention layer for one sequence, in the consistent convention.
        macs_published: the same as the paper counts.
        floats: numbers that the layer holds, in the consistent convention.
        cache_numbers: numbers in the key-value cache for each token, all layers.
        loss: of the last validation, in nats a token.
        perplexity: its exponential.
    """

    name: str
    run: str
    attention: str
    heads: int
    experts: int | None
    k: int | None
    expert_projections: str | None
    head_dim: int
    intermediate_size: int
    parameters: int
    active_parameters: int
    macs: int
    macs_published: int
    floats: int
    cache_numbers: int
    loss: float
    perplexity: float


class Interrupted(Exception):
    """A signal ended a training early."""


def make_trainer(
    out: Path, *, data: str, valid: str | None, resume: bool, device: str, progress: bool
) -> Callable[[Recipe], Trial]:
    """A function that trains a recipe in `out/NAME`, or goes on where that run stands, and says what came of it.

    It raises `Interrupted` when a signal ended the training, and what `train` raises.

    Args:
        out: directory of all runs.
        data: training text, as for `train`.
        valid: validation text, as for `train`.
        resume: go on with runs that are there.
        device: as for `train`.
        progress: show that of each training on standard error.
    """

    def run(recipe: Recipe) -> Trial:
        is_begun = (out / recipe.name / "config.json").exists()  # a search that goes on has runs yet to begin
        result = train(
            model=recipe.model,
            training=recipe.training,
            data=data,
            valid=valid,
            out=out / recipe.name,
            recipe=recipe.name,
            resume=resume and is_begun,
            device=device,
            progress=progress,
        )
        if not result.finished:
            raise Interrupted
        return _read_trial(recipe, result.run)

    return run


def _read_trial(recipe: Recipe, path: Path) -> Trial:
    """A finished run's last validation, and the resources of its model."""
    run = open_run(path)
    validations = [line for line in read_metrics(run.metrics) if line.get("validation_loss") is not None]
    if not validations:
        raise RunError(f"{run.metrics} has no validation with a finite loss; train {recipe.name} anew")
    config = SwitchHeadConfig(**run.config["model"])  # with the vocabulary of the text
    parameters, length = count_parameters(config), recipe.training.chunk_length
    is_mixed = config.attention != "switchhead" or config.expert_projections
    cost = attention_cost(config, chunk_length=length)
    return Trial(
        name=recipe.name,
        run=path.name,
        attention=config.attention,
        heads=config.num_attention_heads,
        experts=config.num_experts if is_mixed else None,
        k=config.num_experts_per_tok if is_mixed else None,
        expert_projections=config.expert_projections if config.attention == "switchhead" else None,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        parameters=parameters.total,
        active_parameters=parameters.active,
        macs=cost.macs,
        macs_published=attention_cost(config, chunk_length=length, convention="published").macs,
        floats=cost.floats,
        cache_numbers=key_value_numbers(config) * config.num_hidden_layers,
        loss=validations[-1]["validation_loss"],
        perplexity=validations[-1]["validation_perplexity"],
    )

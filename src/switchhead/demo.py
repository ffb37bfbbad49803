"""Train a SwitchHead and its dense twins on English that Python brings along, and compare them side by side."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import platform
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from switchhead.accounting import attention_cost, count_parameters, key_value_numbers
from switchhead.errors import DataError, RunError
from switchhead.eval import generate
from switchhead.recipes import Recipe, get_recipe
from switchhead.train import TrainingResult, load_run, train
from switchhead.train.metrics import read_metrics

RECIPES = ("tiny-switchhead", "tiny-dense", "tiny-dense-h2")
PROMPT = "When a function "
MARKER = "demo.json"


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """What the models read; it differs from one Python version to the next."""

    description: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ModelResult:
    """What became of one recipe.

    Attributes:
        recipe: its name.
        description: the attention in words.
        parameters: of the model.
        perplexities: per byte on the validation text, one a seed.
        attention_macs: multiply-accumulates of one attention layer for one sequence.
        attention_floats: numbers that the layer holds for it.
        cache_numbers: numbers in the key-value cache for each token, all layers.
        tokens_per_second: of training, here, now; the median over seeds.
        sample: what the first seed's model makes of `PROMPT`.
        runs: run directories, one a seed.
    """

    recipe: str
    description: str
    parameters: int
    perplexities: tuple[float, ...]
    attention_macs: int
    attention_floats: int
    cache_numbers: int
    tokens_per_second: float
    sample: str
    runs: tuple[str, ...]

    @property
    def perplexity(self) -> float:
        """Mean over seeds."""
        return statistics.fmean(self.perplexities)

    @property
    def spread(self) -> float:
        """Highest minus lowest over seeds."""
        return max(self.perplexities) - min(self.perplexities)


@dataclass(frozen=True, kw_only=True)
class DemoReport:
    """Everything the demo shows."""

    text: TextSource
    steps: int
    tokens_per_step: int
    seeds: int
    models: tuple[ModelResult, ...]
    conclusion: str
    plot: str


def demo(
    *,
    out: str | Path = "demo-run",
    seeds: int = 1,
    steps: int | None = None,
    device: str = "auto",
    progress: bool = True,
) -> DemoReport:
    """Train the three models with equal steps on the same data in the same order, and compare them.

    Every run directory in `out` is an ordinary one, for `switchhead eval` and `generate`.

    Args:
        out: where everything goes; an earlier demo there is replaced.
        seeds: runs of each model; the time grows with it.
        steps: of each run; default: the recipes'.
        device: as for `train`.
        progress: show it on standard error.

    Raises:
        RunError: `out` holds something that is no demo.
        ValueError: `seeds` or `steps` below 1.
    """
    if seeds < 1:
        raise ValueError(f"seeds is {seeds}; it must be at least 1")
    out = Path(out)
    recipes = [_recipe(name, steps) for name in RECIPES]
    documents = _python_topics()
    _start_over(out)
    source = _write_text(documents, out / "text.jsonl")
    results: dict[str, list[TrainingResult]] = {recipe.name: [] for recipe in recipes}
    with _one_thread():
        for seed in range(seeds):
            for recipe in recipes:
                result = train(
                    model=recipe.model,
                    training=recipe.with_training(seed=seed).training,
                    data=f"jsonl:{out / 'text.jsonl'}#text",
                    out=out / (recipe.name if seed == 0 else f"{recipe.name}-seed{seed}"),
                    recipe=recipe.name,
                    device=device,
                    progress=progress,
                )
                if not result.finished:
                    raise KeyboardInterrupt
                results[recipe.name].append(result)
        models = tuple(_summarise(recipe, results[recipe.name], device) for recipe in recipes)
    _plot({recipe.name: results[recipe.name][0].run for recipe in recipes}, out / "loss.png")
    training = recipes[0].training
    report = DemoReport(
        text=source,
        steps=training.steps,
        tokens_per_step=training.batch_size * training.chunk_length,
        seeds=seeds,
        models=models,
        conclusion=_conclude(models),
        plot=str(out / "loss.png"),
    )
    return report


def render(report: DemoReport) -> str:
    """The report as text: one table, what can be read from it, and a sample of each model."""
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("model", no_wrap=True)
    spread = " ± half the spread" if report.seeds > 1 else ""
    for column in (
        "parameters",
        f"validation perplexity{spread}",
        "attention MACs",
        "attention floats",
        "KV cache",
        "tokens/s",
    ):
        table.add_column(column, justify="right")
    for model in report.models:
        table.add_row(
            f"{model.recipe}: {model.description}",
            f"{model.parameters:,}",
            f"{model.perplexity:.3f}" + (f" ± {model.spread / 2:.3f}" if report.seeds > 1 else ""),
            f"{model.attention_macs / 1e6:.1f}M",
            f"{model.attention_floats / 1e3:.0f}K",
            f"{model.cache_numbers}",
            f"{model.tokens_per_second:,.0f}",
        )
    buffer = io.StringIO()
    Console(file=buffer, width=140, highlight=False).print(table)
    samples = "\n\n".join(f"--- {model.recipe} ---\n{model.sample}" for model in report.models)
    return f"""{buffer.getvalue()}
Each trained for {report.steps} steps of {report.tokens_per_step:,} bytes, in the same order, on
{report.text.description}
({report.text.bytes:,} bytes, SHA-256 {report.text.sha256[:16]}; it differs between Python versions).
Perplexity is per byte. MACs and floats are those of one attention layer for one sequence; the cache is numbers per
token over all layers.

{report.conclusion}

Loss curves: {report.plot}

{samples}"""


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Models this small gain nothing from a second core, and lose much where another program wants it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _recipe(name: str, steps: int | None) -> Recipe:
    recipe = get_recipe(name)
    return recipe if steps is None else recipe.with_training(steps=steps)


def _python_topics() -> Sequence[str]:
    """The language reference that `help()` shows, topic by topic."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "this Python comes without pydoc_data.topics, the demo's text; use a full installation"
        ) from error
    return [topics[name] for name in sorted(topics)]


def _start_over(out: Path) -> None:
    """Make `out` a directory that holds nothing but the mark of a demo."""
    if out.exists() and not (out / MARKER).exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out} holds something that is no demo: choose another directory")
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    (out / MARKER).write_text(json.dumps({"format": 1, "models": RECIPES}) + "\n", encoding="utf-8")


def _write_text(documents: Sequence[str], path: Path) -> TextSource:
    content = "".join(json.dumps({"text": document}) + "\n" for document in documents)
    path.write_text(content, encoding="utf-8")
    raw = "".join(documents).encode()
    return TextSource(
        description=f"the topics of Python {platform.python_version()}'s own reference (pydoc_data.topics)",
        bytes=len(raw),
        sha256=hashlib.sha256(raw).hexdigest(),
    )


def _summarise(recipe: Recipe, results: Sequence[TrainingResult], device: str) -> ModelResult:
    run = load_run(results[0].run, device=device)
    config = run.model.config
    cost = attention_cost(config, chunk_length=recipe.training.chunk_length)
    continuation = generate(run.model, run.vocabulary, PROMPT, max_new_tokens=300, temperature=0.8)
    heads = f"{config.num_attention_heads} heads"
    experts = f" of {config.num_experts} experts, {config.num_experts_per_tok} at work"
    return ModelResult(
        recipe=recipe.name,
        description=heads + experts if config.attention == "switchhead" else f"dense, {heads}",
        parameters=count_parameters(config).total,
        perplexities=tuple(result.validation.perplexity for result in results if result.validation),
        attention_macs=cost.macs,
        attention_floats=cost.floats,
        cache_numbers=key_value_numbers(config) * config.num_hidden_layers,
        tokens_per_second=statistics.median(result.tokens_per_second or 0.0 for result in results),
        sample=PROMPT + continuation,
        runs=tuple(str(result.run) for result in results),
    )


def _conclude(models: Sequence[ModelResult]) -> str:
    """What the perplexities say about the attentions, and what they do not."""
    limits = (
        "Minutes on half a megabyte show that all of it works and what it costs; they do not rank architectures, and\n"
        "tokens/s of models this small, on one core, measure overheads, not what happens at scale."
    )
    if len(models[0].perplexities) == 1:
        return f"{limits}\nWith one seed no difference can be told from chance (--seeds 3 measures it): no ordering."
    spread = max(model.spread for model in models)
    ours, claims = models[0], []
    for other in models[1:]:
        difference = ours.perplexity - other.perplexity
        if abs(difference) > spread:
            better = "lower" if difference < 0 else "higher"
            claims.append(f"{ours.recipe} is {abs(difference):.3f} {better} than {other.recipe}")
        else:
            claims.append(f"{ours.recipe} and {other.recipe} differ by {abs(difference):.3f}, which is no ordering")
    return f"{limits}\nOver {len(ours.perplexities)} seeds the largest spread is {spread:.3f}: {'; '.join(claims)}."


def _plot(runs: Mapping[str, Path], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for index, (name, run) in enumerate(runs.items()):
        lines = read_metrics(run / "metrics.jsonl")
        training = [line["loss"] for line in lines if "loss" in line]
        smooth = _running_mean(training, window=max(1, len(training) // 30))
        axes.plot(range(1, len(training) + 1), smooth, color=f"C{index}", label=f"{name}, training")
        validation = [(line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line]
        axes.plot(*zip(*validation, strict=True), "o--", color=f"C{index}", label=f"{name}, validation")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Equal parameters, steps and data")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    return [statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]

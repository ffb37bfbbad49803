"""What a search or an ablation came to, as JSON, Markdown and a plot."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from switchhead.errors import RunError
from switchhead.recipes import Recipe
from switchhead.search.trials import Trial


@dataclass(frozen=True, kw_only=True)
class Report:
    """Configurations that were trained alike.

    Attributes:
        kind: what was asked.
        recipe: name of the recipe it started from.
        data: training text.
        valid: validation text; None: the tail of the training text.
        steps: of every training.
        tokens_per_step: of every training.
        seed: of every training.
        reference: the configuration that the others are held against; None: there is none.
        tolerance: how much worse than the reference, relatively, is as good.
        chosen: of a search, the first configuration as good as the reference, None where none was; of an ablation, the
            best.
        finished: whether everything was tried that had to be.
        trials: in the order in which they were trained.
    """

    kind: Literal["search", "ablation"]
    recipe: str
    data: str
    valid: str | None
    steps: int
    tokens_per_step: int
    seed: int
    reference: str | None = None
    tolerance: float | None = None
    chosen: str | None = None
    finished: bool = False
    trials: tuple[Trial, ...] = ()

    @property
    def pareto_front(self) -> tuple[str, ...]:
        """Configurations that no other beats in perplexity without costing more multiply-accumulates."""
        return tuple(trial.name for trial in self.trials if not any(_dominates(other, trial) for other in self.trials))


def describe(
    kind: Literal["search", "ablation"],
    recipe: Recipe,
    *,
    data: str,
    valid: str | None,
    reference: str | None = None,
    tolerance: float | None = None,
) -> Report:
    """The report before the first training."""
    training = recipe.training
    return Report(
        kind=kind,
        recipe=recipe.name,
        data=data,
        valid=valid,
        steps=training.steps,
        tokens_per_step=training.batch_size * training.chunk_length,
        seed=training.seed,
        reference=reference,
        tolerance=tolerance,
    )


def check_directory(report: Report, out: Path) -> None:
    """Refuse a directory whose report is of something else, which this one would replace.

    Raises:
        RunError: it is.
    """
    try:
        there = json.loads((out / "report.json").read_text(encoding="utf-8"))
        kind, recipe = there["kind"], there["recipe"]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{out / 'report.json'} is no report of a search or an ablation; choose another --out"
        ) from error
    if (kind, recipe) != (report.kind, report.recipe):
        raise RunError(f"{out} holds the report on {kind} from {recipe}; choose another --out")


def speaks_for_all() -> bool:
    """Whether this is the first of the processes that `torchrun` started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def write_report(report: Report, out: Path) -> None:
    """Write `report.json`, `report.md` and `pareto.png`; with several processes the first one does.

    Raises:
        RunError: they cannot be written.
    """
    if not speaks_for_all():
        return
    content = {**dataclasses.asdict(report), "pareto_front": report.pareto_front}
    try:
        out.mkdir(parents=True, exist_ok=True)
        _replace(out / "report.json", json.dumps(content, indent=2) + "\n")
        _replace(out / "report.md", as_markdown(report))
        if report.trials:
            _plot(report, out / "pareto.png")
    except OSError as error:
        raise RunError(f"cannot write the report in {out}: {error.strerror}") from error


def as_markdown(report: Report) -> str:
    """The report for people."""
    lines = [
        f"# {report.kind.capitalize()} from {report.recipe}",
        "",
        f"Each trained for {report.steps:,} steps of {report.tokens_per_step:,} tokens of {report.data}, seed "
        f"{report.seed}. Multiply-accumulates and floats are those of one attention layer for one sequence.",
        "",
        _conclusion(report),
        "",
        "| model | heads | E | k | experts for | d_head | d_ff | parameters | MACs | as published | floats | cache "
        "| perplexity | Pareto |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    front = report.pareto_front
    for trial in _in_order(report):
        cells = (
            trial.name,
            trial.heads,
            trial.experts or "",
            trial.k or "",
            trial.expert_projections or "",
            trial.head_dim,
            trial.intermediate_size,
            f"{trial.parameters:,}",
            f"{trial.macs / 1e6:,.1f}M",
            f"{trial.macs_published / 1e6:,.1f}M",
            f"{trial.floats / 1e6:,.2f}M",
            f"{trial.cache_numbers:,}",
            f"{trial.perplexity:.4f}",
            "yes" if trial.name in front else "",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, "", "![perplexity over multiply-accumulates](pareto.png)", ""])


def _conclusion(report: Report) -> str:
    if not report.finished:
        return "Not finished: resume it."
    if report.kind == "ablation":
        return f"The best is {report.chosen}."
    limit = f"within {100 * (report.tolerance or 0):g} % of {report.reference}'s perplexity"
    if report.chosen is None:
        return f"No configuration comes {limit}."
    return f"The first {limit} is {report.chosen}."


def _in_order(report: Report) -> Sequence[Trial]:
    """As they were tried; of an ablation, the best first."""
    return sorted(report.trials, key=lambda trial: trial.perplexity) if report.kind == "ablation" else report.trials


def _dominates(one: Trial, other: Trial) -> bool:
    better = one.perplexity < other.perplexity or one.macs < other.macs
    return better and one.perplexity <= other.perplexity and one.macs <= other.macs


def _replace(path: Path, content: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(content, encoding="utf-8")
    os.replace(temporary, path)


def _plot(report: Report, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.add_subplot()
    front = sorted((trial for trial in report.trials if trial.name in report.pareto_front), key=lambda t: t.macs)
    axes.plot([trial.macs / 1e6 for trial in front], [trial.perplexity for trial in front], "k--", label="Pareto front")
    for index, trial in enumerate(report.trials):
        short = trial.name.removeprefix(f"{report.recipe}-")
        axes.plot(trial.macs / 1e6, trial.perplexity, "os^D"[index // 10 % 4], color=f"C{index % 10}", label=short)
    axes.set(
        xlabel="multiply-accumulates of an attention layer (millions)",
        ylabel="validation perplexity",
        title=f"{report.kind} from {report.recipe}",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    temporary = path.with_name("pareto.tmp.png")
    figure.savefig(temporary, dpi=120)
    os.replace(temporary, path)

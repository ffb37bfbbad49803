"""`switchhead resources`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from switchhead.cli.common import Chosen, Json, UsageError, arguments_of_the_user, find_recipe, print_json, table

if TYPE_CHECKING:
    from switchhead.accounting import LengthCost
    from switchhead.recipes import Recipe


@dataclass(frozen=True, kw_only=True)
class Counting:
    """What a recipe is counted for."""

    lengths: Annotated[str | None, tyro.conf.arg(metavar="N,N,...", help_behavior_hint="")] = None
    """tokens of a sequence; otherwise the recipe's own."""
    batch_size: int = 1
    """sequences in a training step."""
    dtype: Chosen[Literal["float32", "bfloat16", "float16"] | None] = None
    """of the computation; otherwise the recipe's own."""
    device: Literal["cuda", "cpu"] = "cuda"
    """whose memory is counted; none is needed."""
    plot: Chosen[Path | None] = None
    """draw how cost grows with the length, beside the dense twin, into this image file; otherwise no plot."""


AS_THE_RECIPE = Counting()


def resources(
    recipe: Annotated[
        tyro.conf.Positional[str] | None,
        tyro.conf.arg(metavar="[RECIPE]", help="count this one", help_behavior_hint=""),
    ] = None,
    /,
    *,
    paper: bool = False,
    counting: Annotated[Counting, tyro.conf.arg(name="")] = AS_THE_RECIPE,
    as_json: Json = False,
) -> None:
    """Count parameters, operations and memory of a recipe, or hold all of the paper's against its figures.

    Args:
        paper: every model of the paper beside the printed figures.
    """
    from switchhead.accounting import cost_by_length, plot_growth
    from switchhead.recipes import dense_twin

    if recipe is not None and paper:
        raise UsageError("--paper counts all of the paper's recipes: leave out the recipe, or --paper")
    if recipe is None and not paper:
        raise UsageError("name a recipe (`switchhead recipes` lists them), or give --paper")
    if paper and counting != AS_THE_RECIPE:
        raise UsageError("--paper counts each model as the paper does: it goes with --json alone")
    plot = counting.plot
    if plot is not None and not plot.parent.is_dir():
        raise UsageError(f"--plot {plot}: there is no directory {plot.parent}")
    if recipe is None:
        _show_paper(as_json=as_json)
        return
    chosen = find_recipe(recipe)
    curves: dict[str, Sequence[LengthCost]] = {}
    with arguments_of_the_user():
        twin = dense_twin(chosen)
        for counted in (chosen, twin):
            if counted.name not in curves:
                curves[counted.name] = cost_by_length(
                    counted.model,
                    chunk_length=counted.training.chunk_length,
                    lengths=[chosen.training.chunk_length] if counting.lengths is None else _numbers(counting.lengths),
                    batch_size=counting.batch_size,
                    dtype=counting.dtype or chosen.training.dtype,
                    device=counting.device,
                )
        if plot is not None:
            plot_growth(curves, plot)
    _show_recipe(chosen, twin, curves, device=counting.device, as_json=as_json)


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise UsageError(f"--lengths {text!r} is not a list of numbers like 256,1024") from None


def _show_paper(*, as_json: bool) -> None:
    from switchhead.recipes import compare_with_paper

    rows = compare_with_paper()
    if as_json:
        print_json([dataclasses.asdict(row) for row in rows])
        return
    header = ("", "", "attention MACs", "", "", "of dense, %", "", "floats", "", "", "of dense, %", "", "")
    names = ("recipe", "size", "paper", "published", "consistent", "published", "consistent")
    names += ("paper", "published", "consistent", "published", "consistent", "met")
    lines = [
        (
            row.name,
            row.parameters_printed or "",
            row.macs_printed or "",
            _short(row.macs_published),
            _short(row.macs_consistent),
            _percent(row.macs_ratio_published),
            _percent(row.macs_ratio_consistent),
            row.floats_printed or "",
            _short(row.floats_published),
            _short(row.floats_consistent),
            _percent(row.floats_ratio_published),
            _percent(row.floats_ratio_consistent),
            "yes" if row.meets_paper else "NO",
        )
        for row in rows
    ]
    print(table(header, [names, *lines], right_aligned=range(1, 12)))
    met = sum(row.meets_paper for row in rows)
    print(
        f"\n{met} of {len(rows)} models meet every printed figure to its last digit, counted as the paper counts.\n"
        "docs/accounting.md says why the others do not."
    )


def _show_recipe(
    recipe: Recipe, twin: Recipe, curves: Mapping[str, Sequence[LengthCost]], *, device: str, as_json: bool
) -> None:
    from switchhead.accounting import CONVENTIONS, count_parameters

    costs, twin_costs = curves[recipe.name], curves[twin.name]
    parameters = count_parameters(recipe.model)
    if as_json:
        print_json(
            {
                "name": recipe.name,
                "dense_twin": twin.name,
                "parameters": parameters.total,
                "active_parameters": parameters.active,
                "parts": {name: part._asdict() for name, part in parameters.parts.items()},
                "lengths": [_flat(cost) for cost in costs],
                "lengths_of_dense_twin": [_flat(cost) for cost in twin_costs],
            }
        )
        return
    parts = [(name, f"{part.total:,}", f"{part.active:,}") for name, part in parameters.parts.items()]
    parts.append(("all", f"{parameters.total:,}", f"{parameters.active:,}"))
    print(table(("parameters", recipe.name, "active"), parts, right_aligned=(1, 2)))
    lines = [
        (
            f"{cost.chunk_length:,}",
            convention,
            f"{own.macs:,}",
            _percent(own.macs / dense.macs),
            f"{own.floats:,}",
            _percent(own.floats / dense.floats),
            f"{cost.feed_forward[convention].macs:,}",
        )
        for cost, twin_cost in zip(costs, twin_costs, strict=True)
        for convention in CONVENTIONS
        for own, dense in [(cost.attention[convention], twin_cost.attention[convention])]
    ]
    header = ("tokens", "counted as", "attention MACs", f"% of {twin.name}", "floats", "% of it", "feed-forward MACs")
    print("\n" + table(header, lines, right_aligned=(0, 2, 3, 4, 5, 6)))
    header = ("tokens", "model", "FLOPs/token", "backward", "parameters", "optimizer")
    header += ("activations", "peak", "cache/token")
    lines = [
        (
            f"{cost.chunk_length:,}",
            name,
            _short(cost.model.forward_flops),
            _short(cost.model.backward_flops),
            _bytes(cost.model.parameter_bytes),
            _bytes(cost.model.optimizer_bytes),
            _bytes(cost.model.activation_bytes),
            _bytes(cost.model.peak_bytes),
            _bytes(cost.model.cache_bytes),
        )
        for name, counted in curves.items()
        for cost in counted
    ]
    print("\n" + table(header, lines, right_aligned=(0, *range(2, 9))))
    model = costs[0].model
    machine = "a GPU" if device == "cuda" else "a CPU"
    print(
        f"\nA training step of {model.batch_size} x the tokens in {model.dtype}, forward and backward.\n"
        f"Activations and peak are those of {machine}, without the step of the optimizer."
    )


def _flat(cost: LengthCost) -> dict[str, Any]:
    macs = {f"macs_{name}": attention.macs for name, attention in cost.attention.items()}
    floats = {f"floats_{name}": attention.floats for name, attention in cost.attention.items()}
    feed_forward = {f"feed_forward_macs_{name}": layer.macs for name, layer in cost.feed_forward.items()}
    return {**macs, **floats, **feed_forward, **dataclasses.asdict(cost.model)}


def _short(number: float) -> str:
    unit, divisor = ("G", 1e9) if number >= 1e9 else ("M", 1e6) if number >= 1e5 else ("K", 1e3)
    return f"{number / divisor:.4g}{unit}"


def _bytes(number: float) -> str:
    unit, divisor = ("GB", 1e9) if number >= 1e9 else ("MB", 1e6) if number >= 1e6 else ("kB", 1e3)
    return f"{number / divisor:.4g} {unit}"


def _percent(ratio: float) -> str:
    return f"{round(100 * ratio, 9):.1f}"  # 0.2875 is 28.8, though 100 times the nearest float is a little less

"""`switchhead bench`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import tyro

from switchhead.cli.common import (
    Chosen,
    Device,
    Json,
    RecipeName,
    UsageError,
    arguments_of_the_user,
    find_recipe,
    print_json,
)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Time a layer, forward and backward, against dense and grouped-query attention; needs a CUDA device."""

    layers: Chosen[tuple[str, ...]] = ()
    """out of 47m, 262m, 262m-h2, 1.3b; otherwise all."""
    lengths: Chosen[tuple[int, ...]] = ()
    """of sequences; otherwise the layer's own."""
    routings: Chosen[tuple[str, ...]] = ()
    """out of uniform, skewed, trained; otherwise all."""
    positions: Literal["rotary", "none", "relative"] = "rotary"
    """of all layers."""
    passes: Chosen[bool] = True
    """leave out the passes of the expert projections, each timed beside cuBLAS."""
    as_json: Json = False

    def run(self) -> None:
        """Measure and print."""
        from switchhead.bench import LAYERS, NAMES, as_table, bench_layer, bench_passes, passes_as_table

        for given, known in ((self.layers, LAYERS), (self.routings, NAMES)):
            if unknown := set(given) - set(known):
                raise UsageError(f"{', '.join(sorted(unknown))} unknown; use {', '.join(known)}")
        layers, routings = self.layers or tuple(LAYERS), self.routings or NAMES
        measured = bench_layer(layers, lengths=self.lengths or None, routings=routings, positions=self.positions)
        rows = _collect(measured, as_table)
        passes = _collect(bench_passes(layers, routings=routings), passes_as_table) if self.passes else []
        if self.as_json:
            print_json({"layers": list(map(dataclasses.asdict, rows)), "passes": list(map(dataclasses.asdict, passes))})
        else:
            print(as_table(rows))
            if passes:
                print(f"\n{passes_as_table(passes)}")


def _collect(rows: Iterable[T], render: Callable[[list[T]], str]) -> list[T]:
    """All rows; each is shown as soon as it is there."""
    collected = []
    for row in rows:
        collected.append(row)
        print(render([row]).splitlines()[-1], file=sys.stderr, flush=True)
    return collected


@dataclass(frozen=True, kw_only=True)
class Step:
    """Time whole training steps (forward, backward, clipping, optimizer) of a recipe and of its dense twin."""

    recipe: RecipeName
    twin: Chosen[str | None] = None
    """recipe to compare with; otherwise the one named "dense" where this one is named "switchhead"."""
    steps: int = 20
    """that are timed."""
    batch_size: Chosen[int | None] = None
    """sequences in a step; otherwise the recipe's."""
    chunk_length: Chosen[int | None] = None
    """tokens of a sequence; otherwise the recipe's."""
    dtype: Chosen[Literal["float32", "bfloat16", "float16"] | None] = None
    """of the computation; otherwise the recipe's."""
    compile: Chosen[Literal["on", "off"] | None] = None
    """whether through torch.compile; otherwise as the recipe says."""
    cuda_graphs: Chosen[Literal["on", "off"] | None] = None
    """whether by replaying CUDA graphs; otherwise as the recipe says."""
    device: Device = "auto"
    as_json: Json = False

    def run(self) -> None:
        """Measure and print."""
        from switchhead.bench import bench_steps, steps_as_table
        from switchhead.runs import choose_device

        if self.steps < 1:
            raise UsageError(f"steps is {self.steps}; it must be at least 1")
        recipes = [find_recipe(self.recipe), find_recipe(self._twin())]
        settings = {name: getattr(self, name) for name in ("batch_size", "chunk_length", "dtype")}
        changes = {name: value for name, value in settings.items() if value is not None}
        for name in ("compile", "cuda_graphs"):
            if (choice := getattr(self, name)) is not None:
                changes[name] = choice == "on"
        with arguments_of_the_user():
            models = [(recipe.name, recipe.model, recipe.with_training(**changes).training) for recipe in recipes]
        rows = list(bench_steps(models, choose_device(self.device), steps=self.steps))
        if self.as_json:
            print_json([dataclasses.asdict(row) for row in rows])
        else:
            print(steps_as_table(rows))

    def _twin(self) -> str:
        if self.twin is not None:
            return self.twin
        for kind in ("switchhead", "switchall", "moa"):
            if kind in self.recipe:
                return self.recipe.replace(kind, "dense")
        raise UsageError(f"{self.recipe} names no twin: give one with --twin RECIPE")


What = (
    Annotated[Layer, tyro.conf.subcommand("layer", prefix_name=False)]
    | Annotated[Step, tyro.conf.subcommand("step", prefix_name=False)]
)


def bench(what: Annotated[What, tyro.conf.arg(name="")]) -> None:
    """Time a layer, or whole training steps, against dense twins."""
    what.run()

"""`switchhead bench`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, TextIO, TypeVar

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
Twin = Annotated[
    Chosen[str | None],
    tyro.conf.arg(help='recipe to compare with; otherwise the one named "dense" where this one is named "switchhead"'),
]


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


def _collect(rows: Iterable[T], render: Callable[[list[T]], str], stream: TextIO | None = None) -> list[T]:
    """All rows; each is shown as soon as it is there, on standard error unless another stream is given."""
    collected = []
    for row in rows:
        collected.append(row)
        print(*render([row]).splitlines()[2:], sep="\n", file=stream or sys.stderr, flush=True)  # without its head
    return collected


def twin_name(recipe: str, chosen: str | None) -> str:
    """The recipe to compare with: the chosen one, or else the dense one of the same name."""
    if chosen is not None:
        return chosen
    for kind in ("switchhead", "switchall", "moa"):
        if kind in recipe:
            return recipe.replace(kind, "dense")
    raise UsageError(f"{recipe} names no twin: give one with --twin RECIPE")


@dataclass(frozen=True, kw_only=True)
class Step:
    """Time whole training steps (forward, backward, clipping, optimizer) of a recipe and of its dense twin."""

    recipe: RecipeName
    twin: Twin = None
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
        recipes = [find_recipe(self.recipe), find_recipe(twin_name(self.recipe, self.twin))]
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


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Time reading a prompt, and decoding with a static cache, of a recipe's model and of its dense twin, untrained."""

    recipe: RecipeName
    twin: Twin = None
    lengths: tuple[int, ...] = (512, 2048, 8192)
    """of prompts, and of what the cache holds before decoding."""
    prompts: tuple[int, ...] = (1, 8)
    """how many are read at once; nothing after it: no prefill."""
    batch_sizes: tuple[int, ...] = (1, 8, 64)
    """sequences that are decoded at once; nothing after it: no decoding."""
    dtype: Chosen[Literal["float32", "bfloat16", "float16"] | None] = None
    """of parameters, computation and cache; otherwise bfloat16 on a GPU, float32 on a CPU."""
    compile: Literal["on", "off"] = "off"
    """whether through torch.compile, for every row anew, which takes longer than measuring it."""
    repeats: int = 10
    """that are timed; in decoding of 16 tokens each."""
    device: Device = "auto"
    as_json: Json = False

    def run(self) -> None:
        """Measure and print."""
        from switchhead.bench import bench_generation, generation_as_table
        from switchhead.errors import SwitchHeadError
        from switchhead.runs import choose_device

        for name, values in (
            ("lengths", self.lengths),
            ("prompts", self.prompts),
            ("batch-sizes", self.batch_sizes),
            ("repeats", (self.repeats,)),
        ):
            if any(value < 1 for value in values):
                raise UsageError(f"--{name} {' '.join(map(str, values))}: every number must be at least 1")
        ours, twin = find_recipe(self.recipe), find_recipe(twin_name(self.recipe, self.twin))
        device = choose_device(self.device)
        with arguments_of_the_user():
            measured = bench_generation(
                ours.model, twin.model, device, dtype=self.dtype, lengths=self.lengths, prompts=self.prompts,
                batch_sizes=self.batch_sizes, compile=self.compile == "on", repeats=self.repeats,
            )  # fmt: skip
        if self.as_json:
            rows = _collect(measured, generation_as_table)
            print_json([dataclasses.asdict(row) for row in rows])
        else:
            print(f"ours: {ours.name}, twin: {twin.name}\n\n{generation_as_table([])}", flush=True)
            rows = _collect(measured, generation_as_table, sys.stdout)
        if failed := sum(row.failure is not None for row in rows):
            raise SwitchHeadError(f"{failed} of {len(rows)} rows failed: each says why")


What = (
    Annotated[Layer, tyro.conf.subcommand("layer", prefix_name=False)]
    | Annotated[Step, tyro.conf.subcommand("step", prefix_name=False)]
    | Annotated[Generate, tyro.conf.subcommand("generate", prefix_name=False)]
)


def bench(what: Annotated[What, tyro.conf.arg(name="")]) -> None:
    """Time a layer, whole training steps, or generation against dense twins."""
    what.run()

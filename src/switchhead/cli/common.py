"""What all commands share: argument types, errors, output."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

if TYPE_CHECKING:
    from switchhead.recipes import Recipe

Value = TypeVar("Value")
Chosen = Annotated[Value, tyro.conf.arg(help_behavior_hint="")]  # the help says what is done without it

Json = Annotated[bool, tyro.conf.arg(name="json", help="print JSON instead of text")]
Device = Annotated[str, tyro.conf.arg(help="auto (a GPU if there is one), cpu, cuda, cuda:1, ...")]
RecipeName = Annotated[
    tyro.conf.Positional[str],
    tyro.conf.arg(metavar="RECIPE", help="see `switchhead recipes`; FILE.py:NAME is one of your own"),
]
ModelName = Annotated[
    str,
    tyro.conf.arg(
        metavar="MODEL",
        help="a run directory, checkpoints/step-N inside one, a saved Hugging Face model, or its name on the hub",
    ),
]


class UsageError(Exception):
    """The arguments cannot be meant; exit code 2."""


@contextlib.contextmanager
def arguments_of_the_user() -> Iterator[None]:
    """Blame a `ValueError` on the arguments: what is called here takes them as they are."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def find_recipe(name: str) -> Recipe:
    """The recipe of a name, or of `FILE.py:NAME`, which runs the file first: its recipes then have names too.

    Raises:
        UsageError: there is no such recipe, or the file or the recipe fails.
    """
    from switchhead.recipes import UnknownRecipeError, get_recipe

    if name.endswith(".py"):
        raise UsageError(f"{name} says not which recipe: expected {name}:NAME")
    file, _, name = name.rpartition(":")
    if file:
        _run_file(Path(file))
    try:
        return get_recipe(name)
    except (UnknownRecipeError, ValueError) as error:
        raise UsageError(str(error)) from error


def _run_file(path: Path) -> None:
    if path.suffix != ".py" or not path.is_file():
        raise UsageError(f"there is no Python file {path}: RECIPE is a name, or FILE.py:NAME of one's own")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except Exception as error:
        raise UsageError(f"{path} fails with {type(error).__name__}: {error} (--debug shows where)") from error


def print_json(value: Any) -> None:
    """A result for programs."""
    print(json.dumps(value, indent=2))


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right_aligned: Sequence[int]) -> str:
    """Columns separated by two spaces, as readable in a terminal as in a pipe."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in right_aligned else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )

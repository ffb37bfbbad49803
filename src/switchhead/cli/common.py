"""What all commands share: argument types, errors, output."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

if TYPE_CHECKING:
    from switchhead.recipes import Recipe

Value = TypeVar("Value")
Chosen = Annotated[Value, tyro.conf.arg(help_behavior_hint="")]  # the help says what is done without it

Json = Annotated[bool, tyro.conf.arg(name="json", help="print JSON instead of text")]
Device = Annotated[str, tyro.conf.arg(help="auto (a GPU if there is one), cpu, cuda, cuda:1, ...")]
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
    """The recipe that the user names; a `UsageError` where there is none."""
    from switchhead.recipes import UnknownRecipeError, get_recipe

    try:
        return get_recipe(name)
    except UnknownRecipeError as error:
        raise UsageError(str(error)) from error


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

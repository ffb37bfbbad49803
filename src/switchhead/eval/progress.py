"""How far an evaluation is: on standard error where a person waits for it, or told to who asks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")
_SHOWN: ContextVar[bool] = ContextVar("shown", default=False)
SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def shown_progress() -> Iterator[None]:
    """Inside, everything that is scored shows how much of it is done."""
    token = _SHOWN.set(True)
    try:
        yield
    finally:
        _SHOWN.reset(token)


def tracked(
    parts: Iterable[T],
    *,
    total: int,
    size: Callable[[T], int],
    unit: str,
    report: Callable[[float], None] | None = None,
) -> Iterator[T]:
    """The parts as they are, which together have `total` units; a part counts when the next one is asked for.

    `report` is told after each part what share of the units is done.
    """
    interval = 0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES  # in a file every report is a line
    done = 0
    with tqdm(
        total=total, unit=f" {unit}", unit_scale=True, leave=False, mininterval=interval, disable=not _SHOWN.get()
    ) as bar:
        for part in parts:
            yield part
            n = size(part)
            done += n
            bar.update(n)
            if report is not None:
                report(done / total)

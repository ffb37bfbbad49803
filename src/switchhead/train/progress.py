"""What a person sees of a run in progress: a bar on a terminal, now and then a line elsewhere.

A run outlives its terminal, and the reader of its standard error: what can no longer be shown is not.
"""

from __future__ import annotations

import contextlib
import sys
import time
from abc import ABC, abstractmethod
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10.0


class ProgressDisplay(ABC):
    """Shows a run of `total` steps on standard error; a context manager."""

    def __init__(self, total: int, done: int, title: str) -> None:
        self.total, self.first, self.title = total, done, title
        self.started = time.monotonic()
        self.validation = ""

    @abstractmethod
    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        """A step is done."""

    @abstractmethod
    def validating(self, step: int, share: float) -> None:
        """So much of a validation is done."""

    def validated(self, step: int, perplexity: float) -> None:
        """A validation is done."""
        self.validation = f"  validation perplexity {perplexity:.3f} (step {step})"

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:  # noqa: B027 (most displays have nothing to close)
        """Leave the last state on the screen."""


def say(title: str, what: str) -> None:
    """A line on standard error."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{title}  {what}\n")  # in one piece, also where torchrun has several processes write
        sys.stderr.flush()


def make_progress(total: int, done: int, title: str, *, show: bool) -> ProgressDisplay:
    """The display that fits standard error."""
    if not show:
        return _Silent(total, done, title)
    return _Bar(total, done, title) if sys.stderr.isatty() else _Lines(total, done, title)


class _Silent(ProgressDisplay):
    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        pass

    def validating(self, step: int, share: float) -> None:
        pass


class _Bar(ProgressDisplay):
    def __init__(self, total: int, done: int, title: str) -> None:
        super().__init__(total, done, title)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}  {task.fields[numbers]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task(title, total=total, completed=done, numbers="")

    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        numbers = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s{self.validation}"
        self._progress.update(self._task, completed=step, numbers=numbers)

    def validating(self, step: int, share: float) -> None:
        self._progress.update(self._task, completed=step, numbers=f"validation {share:.0%}")

    def __enter__(self) -> ProgressDisplay:
        self._progress.start()
        return self

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._progress.stop()


class _Lines(ProgressDisplay):
    def __init__(self, total: int, done: int, title: str) -> None:
        super().__init__(total, done, title)
        self._last = self.started

    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        if not self._is_due() and step != self.total:
            return
        left = (time.monotonic() - self.started) / (step - self.first) * (self.total - step)
        self._print(step, f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s{self.validation}  {left:.0f} s left")

    def validating(self, step: int, share: float) -> None:
        if self._is_due():
            self._print(step, f"validation {share:.0%}")

    def _is_due(self) -> bool:
        return time.monotonic() - self._last >= SECONDS_BETWEEN_LINES

    def _print(self, step: int, numbers: str) -> None:
        self._last = time.monotonic()
        say(self.title, f"step {step}/{self.total}  {numbers}")

"""What a run measured: one JSON object a line in `metrics.jsonl`, and the same numbers for TensorBoard and trackers."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from switchhead.data.files import flush_to_disk
from switchhead.errors import RunError
from switchhead.train.trackers import Tracker

logger = logging.getLogger(__name__)


class MetricsLog:
    """Appends measurements of a run that stands at `step`; what an interrupted process wrote beyond it is dropped.

    Every line is handed to the operating system at once: a killed process loses none.

    Args:
        path: the file of lines.
        tensorboard: directory of TensorBoard's files.
        step: where the run stands.
        trackers: services that are told as well; closed with the log.

    Raises:
        RunError: (by every method) the files cannot be written.
    """

    def __init__(self, path: Path, tensorboard: Path, *, step: int, trackers: Sequence[Tracker] = ()) -> None:
        self._directory, self._trackers = path.parent, trackers
        with self._writing():
            _drop_after(path, step)
            self._file = path.open("a", encoding="utf-8", buffering=1)
            self._events = _EventFile(tensorboard, first_step=step + 1)

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        """Add one line; numbers that JSON cannot say become null.

        TensorBoard and trackers get the numbers of nested mappings too, as "outer/inner"; lists are for the line only.
        """
        numbers = dict(_numbers(values))
        with self._writing():
            self._file.write(json.dumps({"step": step, **_finite(values)}) + "\n")
            self._events.write(step, numbers)
        for tracker in self._trackers:
            tracker.log(step, numbers)

    def flush(self) -> None:
        """Put everything so far on the disk; before a checkpoint, so that none is ahead of its metrics."""
        with self._writing():
            os.fsync(self._file.fileno())

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failed write closing fails again, for the same reason.
        with contextlib.suppress(OSError) if error else self._writing():
            try:
                self._file.close()
            finally:
                self._events.close()
        for tracker in self._trackers:
            tracker.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"cannot write the metrics of {self._directory}: {error.strerror}") from error


class NoMetrics(MetricsLog):
    """The log of ranks that keep none: the first one speaks for all."""

    def __init__(self) -> None:
        """Open nothing."""

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        """Drop it."""

    def flush(self) -> None:
        """Nothing to do."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; one that a kill cut short is left out, and with a warning what else is broken."""
    if not path.exists():
        return []
    lines, broken = [], []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                break
            values = None
            with contextlib.suppress(ValueError):
                values = json.loads(line)
            if isinstance(values, dict) and "step" in values:
                lines.append(values)
            else:
                broken.append(number)
    if broken and broken[0] <= len(lines):  # not only at the end, where a machine that lost its power leaves anything
        logger.warning("%s: lines that cannot be read are left out: %s", path, ", ".join(map(str, broken)))
    return lines


def _finite(value: Any) -> Any:
    """The same with None for numbers that JSON cannot say."""
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", float(value)


def _drop_after(path: Path, step: int) -> None:
    kept = [line for line in read_metrics(path) if line["step"] <= step]
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    flush_to_disk(temporary)
    os.replace(temporary, path)


class _EventFile:
    """A TensorBoard event file, written at once: torch's writer has a thread, which loses events when the process is
    killed and prints its own traceback when the disk is full."""

    def __init__(self, directory: Path, *, first_step: int) -> None:
        # Imported here because it takes a second, and only training needs it.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        # Protobuf makes its classes at import, where type checkers do not see them.
        self._event: Any = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]
        self._summary: Any = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)  # pyright: ignore[reportAttributeAccessIssue]
        directory.mkdir(exist_ok=True)
        now = time.time()
        self._file = (directory / f"events.out.tfevents.{now:.6f}.{os.getpid()}").open("xb", buffering=0)
        self._records = RecordWriter(self._file)
        self._add(self._event(wall_time=now, file_version="brain.Event:2"))
        # Has TensorBoard forget what an interrupted process wrote from this step on.
        self._add(self._event(wall_time=now, step=first_step, session_log=start))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        summary = self._summary(
            value=[self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        self._add(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._records.close()

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

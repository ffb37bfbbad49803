"""What a run measured: one JSON object a line in `metrics.jsonl`, and the same numbers for TensorBoard."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from switchhead.errors import RunError


class MetricsLog:
    """Appends measurements of a run that stands at `step`; what an interrupted process wrote beyond it is dropped.

    Every line is handed to the operating system at once: a killed process loses none.

    Raises:
        RunError: (by every method) the files cannot be written.
    """

    def __init__(self, path: Path, tensorboard: Path, *, step: int) -> None:
        self._directory = path.parent
        with self._writing():
            _drop_after(path, step)
            self._file = path.open("a", encoding="utf-8", buffering=1)
            self._events = _EventFile(tensorboard, first_step=step + 1)

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Add one line; numbers that JSON cannot say become null."""
        content = {name: value if math.isfinite(value) else None for name, value in values.items()}
        with self._writing():
            self._file.write(json.dumps({"step": step, **content}) + "\n")
            self._events.write(step, values)

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

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"cannot write the metrics of {self._directory}: {error.strerror}") from error


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a `metrics.jsonl`; one that a kill cut short is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _drop_after(path: Path, step: int) -> None:
    kept = [line for line in read_metrics(path) if line["step"] <= step]
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
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

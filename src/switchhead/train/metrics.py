"""What a run measured: one JSON object a line in `metrics.jsonl`, and the same numbers for TensorBoard."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType


class MetricsLog:
    """Appends measurements of a run that stands at `step`; what an interrupted process wrote beyond it is dropped.

    Every line is handed to the operating system at once: a killed process loses none.
    """

    def __init__(self, path: Path, tensorboard: Path, *, step: int) -> None:
        # Takes a second to import and is needed by nothing else here.
        from torch.utils.tensorboard.writer import SummaryWriter

        _drop_after(path, step)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._tensorboard = SummaryWriter(str(tensorboard), purge_step=step + 1)

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Add one line; numbers that JSON cannot say become null."""
        content = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **content}) + "\n")
        for name, value in values.items():
            self._tensorboard.add_scalar(name, value, step)

    def flush(self) -> None:
        """Put everything so far on the disk; before a checkpoint, so that none is ahead of its metrics."""
        os.fsync(self._file.fileno())
        self._tensorboard.flush()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._tensorboard.close()


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

"""Training: configuration, loop, checkpoints, run directories."""

from switchhead.runs import Run, load_run
from switchhead.train.config import TrainingConfig
from switchhead.train.loop import TrainingResult, train

__all__ = ["Run", "TrainingConfig", "TrainingResult", "load_run", "train"]

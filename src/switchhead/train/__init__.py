"""Training: configuration, loop, checkpoints, run directories."""

from switchhead.train.config import TrainingConfig
from switchhead.train.loop import TrainingResult, train
from switchhead.train.run import Run, load_run

__all__ = ["Run", "TrainingConfig", "TrainingResult", "load_run", "train"]

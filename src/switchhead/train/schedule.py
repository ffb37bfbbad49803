"""Learning rate over the steps of a run."""

from __future__ import annotations

import math

from switchhead.train.config import TrainingConfig


def learning_rate_at(step: int, config: TrainingConfig) -> float:
    """Learning rate of step 1, 2, ..., `config.steps`: linear warm-up, then half a cosine towards zero.

    The highest rate is reached in step `warmup_steps` (step 1 without a warm-up); zero would be that of the step
    after the last.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    first = max(config.warmup_steps, 1)
    done = (step - first) / (config.steps + 1 - first)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * done))

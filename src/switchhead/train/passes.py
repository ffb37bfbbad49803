"""Forward and backward passes of a training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from switchhead.train.distributed import Parallelism

Memory = tuple[Tensor, ...] | None  # of a micro-batch, by layer
Part = tuple[dict[str, Any], float, Memory]  # arguments of the model's forward, share of the batch's loss, memory


@dataclass(frozen=True)
class Passes:
    """Forward and backward of all micro-batches of a step, which leave gradients in the parameters.

    Attributes:
        parallelism: the model on its ranks.
        n_ranks: how many they are.
        autocast: makes the precision that forward runs in.
    """

    parallelism: Parallelism
    n_ranks: int
    autocast: Callable[[], AbstractContextManager]

    def __call__(self, parts: Sequence[Part], scale: Tensor) -> tuple[Tensor, dict[str, Tensor], list[Memory]]:
        """This rank's part of the batch's cross-entropy and auxiliary losses, and the new memory of each micro-batch.

        Args:
            parts: the micro-batches.
            scale: what the losses are multiplied with before backward, a float32 number.
        """
        losses, auxiliary, new_memory = [], [], []
        for index, (arguments, share, memory) in enumerate(parts):
            with self.parallelism.synchronised(last=index == len(parts) - 1):
                with self.autocast():
                    output = self.parallelism.forward(**arguments, memory=memory)
                # Gradients become means over ranks, where the loss is a sum of shares.
                (output.loss * (scale * (share * self.n_ranks))).backward()
            losses.append(_cross_entropy(output) * share)
            auxiliary.append({name: value.detach() * share for name, value in (output.aux_losses or {}).items()})
            new_memory.append(output.memory if share else None)
        return _sum(losses), {name: _sum([part[name] for part in auxiliary]) for name in auxiliary[0]}, new_memory


def _cross_entropy(output: Any) -> Tensor:
    loss = output.loss.detach()
    return loss if output.aux_loss is None else loss - output.aux_loss.detach()


def _sum(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(tuple(values)).sum()

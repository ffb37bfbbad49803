"""Loss scaling, which keeps small float16 gradients from vanishing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GROWTH_INTERVAL = 2000


@dataclass
class LossScale:
    """A factor of the loss that doubles after `GROWTH_INTERVAL` finite gradients and halves after one that is not.

    The rule is that of `torch.amp.GradScaler`. That class judges gradients rank by rank, on the device; here the norm
    of the whole gradient, which all ranks share and which is needed anyway, has already judged.

    Attributes:
        scale: the factor; 1 for all of float32 and bfloat16.
        grows: whether it ever changes.
        finite_steps: finite gradients since it last did.
    """

    scale: float = 1.0
    grows: bool = False
    finite_steps: int = 0

    @classmethod
    def of(cls, dtype: str) -> LossScale:
        """The scale that training in a dtype starts with."""
        return cls(scale=2.0**16, grows=True) if dtype == "float16" else cls()

    def overflowed(self, *, finite: bool) -> bool:
        """Whether a gradient that is not finite only says that the scale is too high."""
        return not finite and self.grows and self.scale > 1

    def update(self, *, finite: bool) -> None:
        """Learn from a step's gradient."""
        if not self.grows:
            return
        self.finite_steps = self.finite_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, 1.0)
        elif self.finite_steps == GROWTH_INTERVAL:
            self.scale, self.finite_steps = self.scale * 2, 0

    def state(self) -> dict[str, Any]:
        """JSON values of a checkpoint."""
        return dataclasses.asdict(self)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a checkpoint's; one of a run that did (or did not) scale its losses says nothing to one that does
        not (or does)."""
        if state["grows"] == self.grows:
            self.scale, self.finite_steps = state["scale"], state["finite_steps"]

"""A recipe: everything that decides an experiment, apart from where its text lies."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

from switchhead.hf import SwitchHeadConfig
from switchhead.train.config import TrainingConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model, how it is trained, and on what.

    Attributes:
        model: the architecture.
        training: optimisation and batches.
        dataset: corpus that the experiment is about; the text itself is given to `switchhead.train.train`.
        name: how the command line calls it.
        table: table of arXiv 2312.07987 that reports it, None where none does.
        note: what is particular about it, in a line or two.
    """

    model: SwitchHeadConfig
    training: TrainingConfig
    dataset: str
    name: str = "custom"
    table: str | None = None
    note: str = ""

    def with_model(self, **changes: Any) -> Recipe:
        """The same recipe with other fields of `model`.

        Another kind of attention comes with its own default `gating`, if none is given.

        Raises:
            ValueError: an unknown field, or a value that does not fit; see `SwitchHeadConfig`.
        """
        if changes.get("attention", self.model.attention) != self.model.attention:
            changes = {"gating": None} | changes
        return dataclasses.replace(self, model=dataclasses.replace(self.model, **changes))

    def with_training(self, **changes: Any) -> Recipe:
        """The same recipe with other fields of `training`.

        Raises:
            ValueError: an unknown field, or a value that does not fit; see `TrainingConfig`.
        """
        known = [field.name for field in dataclasses.fields(TrainingConfig)]
        for name in (name for name in changes if name not in known):
            similar = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {similar[0]!r}?" if similar else f"there are {', '.join(known)}"
            raise ValueError(f"unknown field {name!r}; {hint}")
        return dataclasses.replace(self, training=dataclasses.replace(self.training, **changes))

    def on(self, dataset: str) -> Recipe:
        """The same recipe for another corpus."""
        return dataclasses.replace(self, dataset=dataset)

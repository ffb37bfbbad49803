"""Services that show runs: Weights & Biases and trackio, where they are installed and asked for."""

from __future__ import annotations

import hashlib
import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

from switchhead.errors import RunError
from switchhead.runs import RunDirectory

Service = Literal["wandb", "trackio"]
PROJECT = "switchhead"
logger = logging.getLogger(__name__)


def load_service(service: Service) -> Any:
    """The module of a service.

    Raises:
        RunError: it is not installed.
    """
    try:
        return importlib.import_module(service)
    except ImportError as error:
        raise RunError(f"--tracker {service} needs the package {service!r}: pip install {service}") from error


class Tracker:
    """A run shown by a service; one that is resumed goes on under its name.

    Args:
        service: "wandb" or "trackio", whose `init`, `log` and `finish` are alike.
        run: what to show.

    Raises:
        RunError: the service is not installed, or does not start.
    """

    def __init__(self, service: Service, run: RunDirectory) -> None:
        self._service, self._name, self._failed = load_service(service), service, False
        settings: dict[str, Any] = {"project": PROJECT, "name": run.path.name, "resume": "allow"}
        if service == "wandb":  # finds a run to resume by its id, not its name
            place = f"{run.path.resolve()} {run.fingerprint}"
            settings |= {"id": hashlib.sha256(place.encode()).hexdigest()[:16], "dir": str(run.path)}
        try:
            self._service.init(config=dict(run.config), **settings)
        except Exception as error:  # whatever the service raises: a run should not start without what was asked for
            raise RunError(f"{service} did not start: {error}") from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show measurements of a step; a service that fails is told no more, since training does not depend on it."""
        self._try(lambda: self._service.log(dict(values), step=step))

    def close(self) -> None:
        """Send what is left."""
        self._try(self._service.finish)

    def _try(self, action: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            action()
        except Exception as error:  # whatever the service raises
            self._failed = True
            logger.warning("%s failed and is told no more: %s", self._name, error)

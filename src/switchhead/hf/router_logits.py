"""Scores of all routers, observed from outside."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from switchhead.nn import Router


class RouterLogits:
    """Context in which the layers run; afterwards the scores by which their routers chose, with their gradients.

    Args:
        layers: modules that hold routers.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._routers = [module for layer in layers for module in layer.modules() if isinstance(module, Router)]
        self._inputs: list[tuple[Router, Tensor]] = []
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> None:
        def note(router: Router, args: tuple[Tensor, ...]) -> None:
            self._inputs.append((router, args[0]))

        self._handles = [router.register_forward_pre_hook(note) for router in self._routers]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def of_batch(self, batch: int) -> tuple[Float[Tensor, "batch tokens heads experts"], ...]:
        """Scores of every router call, in the order of the calls; float32 or better."""
        return tuple(router.scores(tokens).unflatten(0, (batch, -1)) for router, tokens in self._inputs)

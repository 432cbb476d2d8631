"""Hidden states captured in a model's forward and injected into another's: see `leading_layers`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any


class LayerStates:
    """Layer outputs that one model's forward pass hands to another model's forward pass.

    Layers are numbered from 0. The attribute `captured` maps numbers to outputs, which are None
    before the run. `injected` is a layer's number (-1: none) and its output in another model: this
    layer and earlier ones return it instead of running.
    """

    def __init__(self, captured: Iterable[int] = (), injected: tuple[int, Any] = (-1, None)):
        self.captured: dict[int, Any] = dict.fromkeys(captured)
        self.calls: list[int] = []  # numbers of finished layers
        self.injected = injected

    def output_of(self, number: int, run: Callable[[], Any]) -> Any:
        """Return and record the output of layer `number`: the injected one, or else ``run()``."""
        last, output = self.injected
        if number > last:
            output = run()
        if number in self.captured:
            self.captured[number] = output
        self.calls.append(number)
        return output

    def skips(self, number: int) -> bool:
        """Tell whether layer `number` may be skipped because a later layer's output is injected."""
        return number < self.injected[0]


current_states: ContextVar[LayerStates | None] = ContextVar("current_states", default=None)

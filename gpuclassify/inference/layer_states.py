"""Hidden states captured in one model's forward pass, and injected into another's.

See `gpuclassify.inference.leading_layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any


class LayerStates:
    """Outputs of some layers, captured for other models' forward passes or injected from them.

    `captured` has the outputs of the layers of these numbers, as soon as they have run. Layers up
    to the number of `injected` are not run: each gives the output beside it.
    """

    def __init__(self, captured: Iterable[int] = (), injected: tuple[int, Any] = (-1, None)):
        self.captured: dict[int, Any] = dict.fromkeys(captured)
        self.calls: list[int] = []  # layers that are done
        self.injected = injected

    def output_of(self, number: int, run: Callable[[], Any]) -> Any:
        """Return the output of the layer of this number; run it unless its output is injected."""
        last, output = self.injected
        if number > last:
            output = run()
        if number in self.captured:
            self.captured[number] = output
        self.calls.append(number)
        return output

    def skips(self, number: int) -> bool:
        """Tell whether the output of a later layer is injected, so that nobody needs this one."""
        return number < self.injected[0]


current_states: ContextVar[LayerStates | None] = ContextVar("current_states", default=None)

"""Hidden states captured in one model's forward pass, and injected into another's.

See `gpuclassify.inference.leading_layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any


class LayerStates:
    """Layer outputs that one model's forward pass hands to another model's forward pass.

    Layers are numbered from 0. `captured` are the numbers of layers whose outputs are kept; the
    attribute maps them to the outputs, which are None before the run. `injected` is a layer's
    number and the output of that layer in another model: this layer and earlier ones return it
    instead of running. The number -1 means that nothing is injected.
    """

    def __init__(self, captured: Iterable[int] = (), injected: tuple[int, Any] = (-1, None)):
        self.captured: dict[int, Any] = dict.fromkeys(captured)
        self.calls: list[int] = []  # numbers of finished layers
        self.injected = injected

    def output_of(self, number: int, run: Callable[[], Any]) -> Any:
        """Return the output of layer `number`: the injected output, or else ``run()``.

        An injected output replaces the outputs of its own layer and of earlier layers. The number
        is appended to `calls`, and the output is kept in `captured` if that has the number.
        """
        last, output = self.injected
        if number > last:
            output = run()
        if number in self.captured:
            self.captured[number] = output
        self.calls.append(number)
        return output

    def skips(self, number: int) -> bool:
        """Tell whether layer `number` may be skipped, because a later layer's output is injected.

        False for the injected layer itself, whose output `output_of` returns.
        """
        return number < self.injected[0]


current_states: ContextVar[LayerStates | None] = ContextVar("current_states", default=None)

"""What a module is tried with before it runs, and whether running changes it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

# Words in the names of settings that say how far attention or a convolution reaches.
_REACHES = ("window", "chunk", "block_size", "local_attention", "stride")
_WITHOUT_REACH = 16
_BEYOND_REACH = (23, 7)
_SHORT = 5
# Kinds of rotary positions whose frequencies follow from the longest row of a batch.
_SCALED_BY_LENGTH = {"dynamic", "longrope"}


def config_of(module: nn.Module) -> Any:
    """The configuration of the transformers model within a module; None if there is none."""
    models = (part for part in module.modules() if isinstance(part, PreTrainedModel))
    return next((model.config for model in models), None)


def probe_lengths(config: Any, most: int) -> list[int]:
    """Lengths of texts that go beyond every local reach that a text of `most` tokens exceeds.

    Two long ones and a short one.
    """
    reaches = [
        value
        for name, value in _settings(config)
        if isinstance(value, int) and 0 < value < most and any(word in name for word in _REACHES)
    ]
    farthest = max(reaches, default=_WITHOUT_REACH)
    return [min(farthest + more, most) for more in _BEYOND_REACH] + [min(_SHORT, most)]


def scales_positions(config: Any) -> bool:
    """Whether a row's positions mean something else beside a longer row."""
    return any(
        name in ("rope_type", "type") and value in _SCALED_BY_LENGTH
        for name, value in _settings(config)
    )


def fresh_copy(module: nn.Module) -> Any:
    """The module, to be changed by running it; weights and buffers are shared."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


def makeup_of(module: nn.Module) -> Any:
    """Equal as long as running a module changes neither its parts nor its configuration."""
    return [(type(part), getattr(part, "config", None)) for part in module.modules()]


def _settings(config: Any) -> Iterator[tuple[str, Any]]:
    """Name and value of every setting, of those within others too."""
    pending = [] if config is None else list(config.to_dict().items())
    for name, value in pending:
        if isinstance(value, dict):
            pending.extend(value.items())
        elif isinstance(value, list | tuple):
            pending.extend((name, item) for item in value)
        else:
            yield str(name), value

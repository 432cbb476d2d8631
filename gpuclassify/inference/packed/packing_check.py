"""Whether a loaded model gives the same outputs when its layers run without padding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from gpuclassify.inference.packed.packed_layers import NotPackableError, PackedLayers
from gpuclassify.workers.device_errors import is_broken_device, is_out_of_memory

# Root mean squares, in parts of the outputs' size and of how far the states of tokens lie apart.
_TOLERANCE = 1e-4
_HALF_PRECISION_TOLERANCE = 0.1
# In parts of the states' size: where tokens lie closer together, rounding alone moves them so far.
_ROUNDING = 1e-5
_HALF_PRECISION_ROUNDING = 1e-2
_FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)

Forward = Callable[[slice], torch.Tensor]


def find_packed_layers(
    module: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    lengths: np.ndarray,
    forward: Forward,
) -> PackedLayers:
    """The module's layers, if texts run packed as they run alone.

    Both what comes out of the last layer and what comes out of the module are compared.

    Parameters
    ----------
    module : nn.Module
    device : torch.device
    dtype : torch.dtype
        Of the states.
    lengths : ndarray of int64, shape (texts,)
        Of ragged texts padded on the right.
    forward : callable
        Outputs (texts, outputs) of these rows of the batch, one row without its padding.

    Raises
    ------
    NotPackableError
        They differ, or a layer cannot be run that way.
    """
    packed = PackedLayers(module)
    is_single = dtype == torch.float32
    tolerance = _TOLERANCE if is_single else _HALF_PRECISION_TOLERANCE
    rounding = _ROUNDING if is_single else _HALF_PRECISION_ROUNDING
    outputs, states = _run_alone(packed, len(lengths), forward)
    try:
        with packed.running(lengths, int(lengths.max()), device), packed.watching() as seen:
            together = forward(slice(0, len(lengths)))
        own = [seen[-1][row, :length] for row, length in enumerate(lengths)]
        is_equal = len(seen) == packed.calls and _are_close(together, outputs, tolerance)
        for found, expected in zip(own, states, strict=True):
            most = max(tolerance * _spread(expected), rounding * _rms(expected))
            is_equal &= _rms(found - expected) <= most
    except _FAILURES as err:
        if is_out_of_memory(err) or is_broken_device(err):
            raise
        raise NotPackableError(f"its layers take no packed texts ({err})") from err
    if not is_equal:
        raise NotPackableError("its layers let packed texts see each other, or lose positions")
    packed.is_first_enough = bool(packed.after_attention)
    packed.is_first_enough &= _is_still_close(packed, lengths, device, forward, outputs, tolerance)
    return packed


def _run_alone(
    packed: PackedLayers, texts: int, forward: Forward
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs of the texts, and of each the last layer's states (tokens, size)."""
    outputs, states = [], []
    for row in range(texts):
        with packed.watching() as seen:
            outputs.append(forward(slice(row, row + 1)))
        if not seen:
            raise NotPackableError("it does not call its layers one by one")
        packed.calls = len(seen)
        states.append(seen[-1][0])
    return torch.cat(outputs), states


def _is_still_close(
    packed: PackedLayers,
    lengths: np.ndarray,
    device: torch.device,
    forward: Forward,
    expected: torch.Tensor,
    tolerance: float,
) -> bool:
    try:
        with packed.running(lengths, int(lengths.max()), device):
            return _are_close(forward(slice(0, len(lengths))), expected, tolerance)
    except _FAILURES as err:
        if is_out_of_memory(err) or is_broken_device(err):
            raise
        return False


def _are_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return _rms(found - expected) <= tolerance * (1 + float(expected.abs().max()))


def _rms(values: torch.Tensor) -> float:
    return float(values.float().square().mean().sqrt())


def _spread(states: torch.Tensor) -> float:
    """How far apart tokens lie: some dimensions are large in all of them and would hide errors."""
    return _rms(states.float() - states.float().mean(0))

"""Tokens of a block on the device that will run them, from which batches are cut there."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from gpuclassify.tokenizing.token_batch import TokenBatch


@dataclass(frozen=True)
class StagedTokens:
    """A TokenBatch on a device; what sizes batches stays on the host.

    Attributes
    ----------
    ids : Tensor of int32, shape (tokens,)
    offsets : ndarray of int64, shape (texts + 1,)
        Text i has ``ids[offsets[i]:offsets[i + 1]]``.
    type_ids : Tensor of int32, shape (tokens,), optional
    """

    ids: torch.Tensor
    offsets: np.ndarray
    type_ids: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each text, int64 (texts,)."""
        return np.diff(self.offsets)


def stage(tokens: TokenBatch, device: torch.device) -> StagedTokens:
    """Bring `tokens` to the device, beside what it is running."""
    if not tokens.is_on_host:
        return StagedTokens(_for_current_stream(tokens.ids).to(device), tokens.offsets)
    types = None if tokens.type_ids is None else to_device(tokens.type_ids, device)
    return StagedTokens(to_device(tokens.ids, device), tokens.offsets, types)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a tensor on the device, without waiting for it.

    On CUDA it goes through page-locked memory, which torch keeps for the next copy, on a stream of
    its own: on the stream of the model it would start only after all that is queued there. With an
    allocator in torch's place it does, since the memory could be given out again too early.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    if torch.cuda.get_allocator_backend() == "pluggable":
        # Such an allocator, RMM's among them, knows nothing of `record_stream` below.
        return tensor.pin_memory().to(device, non_blocking=True)
    side, current = _copy_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(side):
        copied = tensor.pin_memory().to(device, non_blocking=True)
    current.wait_stream(side)
    copied.record_stream(current)  # its memory is given out again only after the model's reads
    return copied


def _for_current_stream(ids: torch.Tensor) -> torch.Tensor:
    """The ids, which the default stream of their device has made or is about to make."""
    if ids.is_cuda:
        current = torch.cuda.current_stream(ids.device)
        current.wait_stream(torch.cuda.default_stream(ids.device))
        ids.record_stream(current)
    return ids


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)

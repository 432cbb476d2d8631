"""Base classes for mappers that apply rules to texts, without a model."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import numpy as np

from gpuclassify.hub import Identity
from gpuclassify.mapping.pinned_model import PinnedModel
from gpuclassify.mapping.runners import Runner
from gpuclassify.mapping.token_lengths import TokenLengths


class RuleModel(PinnedModel):
    """Stand-in for a model, because rules have no files.

    A subclass sets both `identity` and `checkpoint` to an `Identity` with a name and a version
    (`revision`) of its rules. The version changes when the rules give other results.
    """

    repositories = identities = ()  # type: ignore[assignment]
    weights_files: ClassVar[dict[Identity, str]] = {}
    unpinned = ""


class RuleRunner(Runner):
    """Base class of runners that apply rules to texts, on the CPU."""

    def token_lengths(self, texts: list[str]) -> TokenLengths:
        """Return counts of 0 tokens in one window for each text, because rules read no tokens."""
        none, ones = np.zeros(len(texts), np.int64), np.ones(len(texts), np.int64)
        return TokenLengths(none, none, ones, None)

    def lease(self, device: object, dtype: object) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that yields None, because there is no model to load."""
        return contextlib.nullcontext()

    def device_and_dtype(self) -> tuple[Any, Any]:
        """Return "cpu" and NumPy's float32, without importing torch."""
        return "cpu", np.dtype(np.float32)

    def batch_bytes(self) -> int:
        """Return 0, the bytes of the largest batch, because rules need no batches."""
        return 0

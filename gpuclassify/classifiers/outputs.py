"""From logits to probabilities to Arrow arrays."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

SCORES = pa.list_(pa.float32())


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities of each row, float32, from float32 (texts, classes)."""
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
    return shifted / shifted.sum(axis=1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Independent probabilities, float32; in a form that overflows on neither side."""
    small = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1 / (1 + small), small / (1 + small)).astype(np.float32)


def list_array(values: np.ndarray) -> pa.Array:
    """An Arrow list<float32> array from float32 (texts, classes)."""
    offsets = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
    return pa.ListArray.from_arrays(offsets, pa.array(values.ravel(), pa.float32()))

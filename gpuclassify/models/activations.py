"""Functions of a network's outputs: float32 in, float32 out."""

from __future__ import annotations

import numpy as np


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities of each row, float32, from float32 (texts, classes)."""
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
    return shifted / shifted.sum(axis=1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Return independent probabilities, float32; in a form that overflows on neither side."""
    small = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1 / (1 + small), small / (1 + small)).astype(np.float32)


def relu(values: np.ndarray) -> np.ndarray:
    """Return each number, or 0 if it is negative."""
    return np.maximum(values, 0)

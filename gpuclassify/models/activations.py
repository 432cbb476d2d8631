"""Activation functions on float32 numpy arrays."""

from __future__ import annotations

import numpy as np


def softmax(logits: np.ndarray) -> np.ndarray:
    """Convert logits, float32 (texts, classes), to probabilities that sum to 1 in each row."""
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
    return shifted / shifted.sum(axis=1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Apply the logistic function to each logit, without overflow; float32, of the same shape."""
    small = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1 / (1 + small), small / (1 + small)).astype(np.float32)


def relu(values: np.ndarray) -> np.ndarray:
    """Return an array with negative numbers replaced by 0."""
    return np.maximum(values, 0)

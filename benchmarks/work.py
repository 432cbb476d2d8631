"""How much arithmetic a model needs, and how much the machine can do."""

import time
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F

from benchmarks.models import Shape

PEAK_ROWS = (512, 2_048)
PEAK_REPEATS = 5
_OPERATIONS_A_TIMING = 4e9  # tens of milliseconds on a small machine
_MOST_CALLS = 50  # of the tiny layers of a smoke run


def forward_operations(lengths: Iterable[int], shape: Shape) -> int:
    """Floating-point operations of one forward pass over the real tokens of documents.

    Counted as in Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM" (2021), appendix: only matrix products, two operations for each multiply
    and add. A layer of width d and feed-forward width f needs ``8 d^2 + 4 d f`` a token for its
    linear layers, and ``4 n^2 d`` a document of n tokens for scores and weighted sums. That is
    their ``24 B s h^2 (1 + s / 6 h)``, with f = 4 h and without the vocabulary's share.

    DeBERTa (He et al., 2021) adds two relative-position scores, each ``2 n m d`` a document, where
    m, the positions that occur, is the smaller of ``2 n - 1`` and twice the number of buckets.
    Projecting the positions themselves does not depend on the text and is not counted.

    Parameters
    ----------
    lengths : iterable of int
        Tokens of each document: no padding, nothing beyond the model's limit.
    shape : Shape

    Returns
    -------
    int
    """
    width, layers = shape.hidden_size, shape.layers
    token = 8 * width**2 + 4 * width * shape.intermediate_size
    total = 0
    for length in lengths:
        layer = length * token + 4 * length**2 * width
        if shape.position_buckets:
            positions = min(2 * length - 1, 2 * shape.position_buckets)
            layer += 2 * (2 * length * positions * width)
        total += layers * layer
    return total


def matmul_peak(shape: Shape, device: str) -> float:
    """Operations a second of the fastest of the model's own linear layers, float32.

    Each weight shape is multiplied with several numbers of rows, and the fastest timing of all
    counts: disturbances make a peak too low, which would flatter every share of it.

    Parameters
    ----------
    shape : Shape
    device : str

    Returns
    -------
    float
    """
    return max(_matmul_speeds(shape, device))


def _matmul_speeds(shape: Shape, device: str) -> Iterator[float]:
    width, inner = shape.hidden_size, shape.intermediate_size
    with torch.inference_mode():
        for outputs, inputs in ((width, width), (inner, width), (width, inner)):
            weight = torch.randn(outputs, inputs, device=device)
            for rows in PEAK_ROWS:
                activations = torch.randn(rows, inputs, device=device)
                operations = 2 * rows * inputs * outputs
                calls = min(_MOST_CALLS, max(1, round(_OPERATIONS_A_TIMING / operations)))
                yield operations * calls / _least_seconds(activations, weight, calls)


def _least_seconds(activations: torch.Tensor, weight: torch.Tensor, calls: int) -> float:
    timings = []
    for _ in range(PEAK_REPEATS):
        started = time.perf_counter()
        for _ in range(calls):
            F.linear(activations, weight)
        if activations.is_cuda:
            torch.cuda.synchronize(activations.device)
        timings.append(time.perf_counter() - started)
    return min(timings)

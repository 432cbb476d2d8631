"""How much arithmetic a model needs, and how much the machine can do: products, and tokens."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.inputs import Shape
from gpuclassify.tokenizing.prefetch import tokenizer_threads
from gpuclassify.tokenizing.text_tokenizer import TextTokenizer

PEAK_REPEATS = 5
TRIES = 3  # of a tokenizer
_MOST_CALLS = 50  # of the tiny layers of a smoke run

Kernel = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Effort:
    """Rows of activations, and operations of one timing, that show a device's peak: tens of ms."""

    rows: tuple[int, ...]
    operations: float


EFFORTS = {"cpu": Effort((512, 2_048), 4e9), "cuda": Effort((8_192, 65_536), 1e13)}


def forward_operations(lengths: Iterable[int], shape: Shape) -> int:
    """Count floating-point operations of one forward pass over the real tokens of documents.

    Counted as in Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM" (2021), appendix: only matrix products, two operations for each multiply
    and add. A layer of width d and feed-forward width f needs ``8 d^2 + 4 d f`` a token for its
    linear layers, and ``4 n^2 d`` a document of n tokens for scores and weighted sums. That is
    their ``24 B s h^2 (1 + s / 6 h)``, with f = 4 h and without the vocabulary's share.

    DeBERTa (He et al., 2021) adds two relative-position scores, each ``2 n m d`` a document, where
    m, the positions that occur, is the smaller of ``2 n - 1`` and twice the number of buckets.
    Projecting the positions themselves does not depend on the text and is not counted.
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


def matmul_peaks(shape: Shape, device: str, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Measure operations a second of the fastest of the model's own linear layers, by kernel.

    Each weight shape is multiplied with several numbers of rows, the kernels taking turns, and the
    fastest timing of all counts: disturbances make a peak too low, which would flatter every share
    of it.

    ``linear`` is `torch.nn.functional.linear`; ``prepacked``, where this torch has it, oneDNN's
    linear layer on weights that were rearranged before.
    """
    peaks: dict[str, float] = {}
    for operations, timings in _timed_layers(shape, device, dtype):
        for kernel, seconds in timings.items():
            peaks[kernel] = max(peaks.get(kernel, 0.0), operations / seconds)
    return peaks


def _timed_layers(
    shape: Shape, device: str, dtype: torch.dtype
) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield operations, and the least seconds that each kernel takes for them."""
    width, inner = shape.hidden_size, shape.intermediate_size
    effort = EFFORTS[torch.device(device).type]
    with torch.inference_mode():
        for outputs, inputs in ((width, width), (inner, width), (width, inner)):
            weight = torch.randn(outputs, inputs, device=device, dtype=dtype)
            kernels = _kernels(weight)
            for rows in effort.rows:
                activations = torch.randn(rows, inputs, device=device, dtype=dtype)
                operations = 2 * rows * inputs * outputs
                calls = min(_MOST_CALLS, max(1, round(effort.operations / operations)))
                yield operations * calls, _least_seconds(kernels, activations, calls)


def _kernels(weight: torch.Tensor) -> dict[str, Kernel]:
    """Return ways to multiply activations (rows, inputs) with a weight (outputs, inputs)."""
    kernels: dict[str, Kernel] = {"linear": lambda activations: F.linear(activations, weight)}
    if weight.device.type != "cpu":
        return kernels
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        multiply = torch.ops.mkldnn._linear_pointwise
        multiply(weight[:1], packed, None, "none", [], "")
    except (AttributeError, RuntimeError):  # another torch, or one without oneDNN
        return kernels
    kernels["prepacked"] = lambda states: multiply(states, packed, None, "none", [], "")
    return kernels


def _least_seconds(
    kernels: dict[str, Kernel], activations: torch.Tensor, calls: int
) -> dict[str, float]:
    timings: dict[str, list[float]] = {name: [] for name in kernels}
    for _ in range(PEAK_REPEATS):
        for name, multiply in kernels.items():
            started = time.perf_counter()
            for _ in range(calls):
                multiply(activations)
            if activations.is_cuda:
                torch.cuda.synchronize(activations.device)
            timings[name].append(time.perf_counter() - started)
    return {name: min(seconds) for name, seconds in timings.items()}


def tokenizer_speed(texts: Sequence[str], tokenizer: Any) -> dict[str, Any]:
    """Measure documents and real tokens a second of the host's tokenizer alone, by all its threads.

    No way that tokenizes on the host can be faster. Nobody else may use the tokenizer.
    """
    tokenize = TextTokenizer(tokenizer, tokenizer.model_max_length, counts_rest=False)
    return timed(lambda: tokenize(texts), len(texts))[1] | {"threads": tokenizer_threads()}


def timed(tokenize: Callable[[], Any], documents: int) -> tuple[Any, dict[str, Any]]:
    """Time `tokenize`, and return its tokens, which have `offsets`, and its speed."""
    timings = []
    for _ in range(TRIES):
        started = time.perf_counter()
        tokens = tokenize()
        timings.append(time.perf_counter() - started)
    count, seconds = int(tokens.offsets[-1]), min(timings)
    return tokens, {
        "seconds": timings,
        "tokens": count,
        "documents_per_second": documents / seconds,
        "tokens_per_second": count / seconds,
    }

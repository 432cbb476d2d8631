"""Checkpoints with random weights in the sizes of published models: speed does not need others."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.texts import docstrings
from tests.replicas import write_sequence_classifier


@dataclass(frozen=True)
class Shape:
    """Sizes of an encoder.

    Attributes
    ----------
    architecture : str
        Name in transformers.
    hidden_size, intermediate_size, heads, layers : int
    initializer_range : float
        Wide enough for answers to depend on the text, through random layers.
    position_buckets : int
        Of relative positions; 0 for absolute ones.
    """

    architecture: str
    hidden_size: int = 768
    intermediate_size: int = 3_072
    heads: int = 12
    layers: int = 12
    initializer_range: float = 0.05
    position_buckets: int = 0


SHAPES = {
    "bert": Shape("bert"),
    "deberta": Shape("deberta-v2", position_buckets=256),
    "minilm": Shape("bert", hidden_size=384, intermediate_size=1_536, layers=6),
}
TINY_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "heads": 4,
    "layers": 2,
    "initializer_range": 0.3,
}


def write_model(directory: Path, shape: Shape) -> Path:
    """Write a sequence classifier of three labels and 512 positions, float32.

    Its tokenizer is trained on docstrings and has about a thousand pieces, fewer than the published
    ones; lengths are prescribed in its own tokens.
    """
    sizes: dict[str, Any] = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "initializer_range": shape.initializer_range,
    }
    if shape.position_buckets:
        sizes["position_buckets"] = shape.position_buckets
    return write_sequence_classifier(
        directory, shape.architecture, texts=docstrings()[:500], **sizes
    )

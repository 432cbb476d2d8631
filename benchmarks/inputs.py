"""Documents of prescribed lengths, and random checkpoints that classify them.

Documents are made of words that every Python installation has. Speed does not need other weights
than random ones, in the sizes of published models.
"""

import argparse
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from examples.demo.corpus import collect_documents
from tests.replicas import write_sequence_classifier

MAX_TOKENS = 512
LONG = "long"


@dataclass(frozen=True)
class Lengths:
    """A lognormal distribution of tokens a document; `sigma` is the logarithm's deviation."""

    median_tokens: float
    sigma: float

    def sample(self, count: int) -> list[int]:
        """Return `count` lengths in tokens at evenly spaced quantiles, without random draws."""
        logarithm = NormalDist(math.log(self.median_tokens), self.sigma)
        quantiles = ((number + 0.5) / count for number in range(count))
        return [max(4, round(math.exp(logarithm.inv_cdf(quantile)))) for quantile in quantiles]


# With this deviation a third of the web documents is longer than 512 tokens.
LENGTHS = {
    "web": Lengths(350, 0.883),
    "short": Lengths(60, 0.75),
    "sentences": Lengths(32, 0.1),
    LONG: Lengths(4_000, 0.35),  # 95% are between 2,000 and 8,000
}
LONG_MAX_TOKENS = 8_192


@functools.lru_cache(maxsize=1)
def docstrings() -> tuple[str, ...]:
    """Return docstrings of the installed packages."""
    return tuple(document.text for document in collect_documents(max_documents=2_000))


def texts_of_lengths(lengths: Sequence[int], tokenizer: Any, seed: int = 0) -> list[str]:
    """Return a document for each length in tokens, special ones included, in random order.

    They are a few tokens shorter where a word would not fit. The tokenizer must split at white
    space first, so that lengths of words add up; `seed` is of the order and of where texts begin.
    """
    rng = np.random.default_rng(seed)
    words = " ".join(docstrings()).split()
    distinct = list(dict.fromkeys(words))
    encoded = tokenizer(distinct, add_special_tokens=False)["input_ids"]
    tokens_of = {word: len(ids) for word, ids in zip(distinct, encoded, strict=True)}
    tokens = [tokens_of[word] for word in words]
    words, ends = words * 2, np.cumsum(tokens * 2)  # documents may run over the end
    special = tokenizer.num_special_tokens_to_add()
    texts = []
    for length in rng.permutation(lengths):
        start = int(rng.integers(len(tokens)))
        stop = int(np.searchsorted(ends, ends[start] + length - special, side="right"))
        texts.append(" ".join(words[start + 1 : stop]))
    return texts


@dataclass(frozen=True)
class Shape:
    """Sizes of an encoder, of an architecture in transformers.

    `initializer_range` is so wide that answers depend on the text, through random layers;
    `position_buckets` are those of relative positions, 0 for absolute ones. `max_tokens` is the
    longest text, to which longer ones are cut.
    """

    architecture: str
    hidden_size: int = 768
    intermediate_size: int = 3_072
    heads: int = 12
    layers: int = 12
    initializer_range: float = 0.05
    position_buckets: int = 0
    max_tokens: int = MAX_TOKENS


SHAPES = {
    "bert": Shape("bert"),
    "deberta": Shape("deberta-v2", position_buckets=256),
    "minilm": Shape("bert", hidden_size=384, intermediate_size=1_536, layers=6),
    "modernbert": Shape("modernbert", intermediate_size=1_152, layers=22),
    "xlm-roberta": Shape("xlm-roberta"),
}
TINY_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "heads": 4,
    "layers": 2,
    "initializer_range": 0.3,
}


def shape_of(options: argparse.Namespace) -> Shape:
    """Return the shape of ``options.model``, which reads texts of ``options.lengths`` whole."""
    shape = SHAPES[options.model]
    return replace(shape, max_tokens=LONG_MAX_TOKENS) if options.lengths == LONG else shape


def write_model(
    directory: Path, shape: Shape, write: Callable[..., Path] = write_sequence_classifier
) -> Path:
    """Write a random classifier, float32: of texts with three labels, or by `write`.

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
    if shape.max_tokens != MAX_TOKENS:
        is_offset = shape.architecture == "xlm-roberta"  # its positions begin at 2
        sizes["max_position_embeddings"] = shape.max_tokens + 2 * is_offset
    if shape.position_buckets:
        sizes["position_buckets"] = shape.position_buckets
    return write(directory, shape.architecture, texts=docstrings()[:500], **sizes)

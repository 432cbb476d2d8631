"""Documents of prescribed lengths, made of words that every Python installation has."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from examples.demo.corpus import collect_documents


@dataclass(frozen=True)
class Lengths:
    """A lognormal distribution of tokens a document.

    Attributes
    ----------
    median_tokens : float
    sigma : float
        Standard deviation of the logarithm.
    """

    median_tokens: float
    sigma: float

    def sample(self, count: int) -> list[int]:
        """`count` lengths in tokens at evenly spaced quantiles: no draw is luckier than another."""
        logarithm = NormalDist(math.log(self.median_tokens), self.sigma)
        quantiles = ((number + 0.5) / count for number in range(count))
        return [max(4, round(math.exp(logarithm.inv_cdf(quantile)))) for quantile in quantiles]


# With this deviation a third of the web documents is longer than 512 tokens.
LENGTHS = {"web": Lengths(350, 0.883), "short": Lengths(60, 0.75)}


@functools.lru_cache(maxsize=1)
def docstrings() -> tuple[str, ...]:
    """Docstrings of the installed packages."""
    return tuple(document.text for document in collect_documents(max_documents=2_000))


def texts_of_lengths(lengths: Sequence[int], tokenizer: Any, seed: int = 0) -> list[str]:
    """One document for each length, in random order.

    Parameters
    ----------
    lengths : sequence of int
        Tokens of each document, special tokens included.
    tokenizer : transformers tokenizer
        One that splits at white space first, so that lengths of words add up.
    seed : int
        Of the order and of where in the text each document begins.

    Returns
    -------
    list of str
        Of the lengths asked for, or a few tokens less where a word would not fit.
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

"""Exact duplicates: documents whose texts, or normalized texts, have equal bytes."""

from __future__ import annotations

import dask.dataframe as dd
import numpy as np
import pandas as pd

from gpuclassify.corpus.dedup.corpus import Corpus, document_numbers, shuffle
from gpuclassify.corpus.dedup.duplicates import (
    Keep,
    TextDuplicates,
    accepts_old_spellings,
    group_hashes,
)
from gpuclassify.frames import Frame, backend_of
from gpuclassify.settings.declared import declared


@accepts_old_spellings("exact")
@declared
class ExactDuplicates(TextDuplicates):
    """Documents whose texts, or normalized texts, have equal bytes.

    A call lists these duplicates, `remove` drops them, and `summarize` counts them. Texts are
    compared by the MD5 of their UTF-8 bytes: among 10^10 documents, the probability that any two
    different texts have the same MD5 is 10^-19.

    Examples
    --------
    >>> ExactDuplicates(id_field="id").remove(ddf)  # doctest: +SKIP
    """

    def find_components(self, corpus: Corpus, keep: Keep) -> dd.DataFrame:
        """Link documents with equal `exact_keys` to the smallest document number among them."""
        columns = self.signature_fields
        meta = exact_keys(corpus.empty(columns), 0, self)
        keys = keep("signatures", corpus.map(exact_keys, columns, settings=self, meta=meta))
        moved = shuffle(keys, "key")
        components = moved.map_partitions(first_of_equal, meta=first_of_equal(meta))
        return keep("components", components)


def exact_keys(frame: Frame, partition: int, settings: TextDuplicates) -> pd.DataFrame:
    """Return a partition's ``document`` numbers, and 128-bit hashes of texts in two int64 columns.

    ``key`` and ``key_low`` are the halves of the text's MD5, each XORed with the hash of the column
    `by`. Null and empty texts have no row.
    """
    compared = settings.compared(frame, settings.text_field)
    digests, has_text = backend_of(compared).text_digests(compared, settings.text_field)
    keys = digests ^ group_hashes(frame, settings.by)[:, None]
    columns = {
        "document": document_numbers(partition, len(frame)),
        "key": keys[:, 0],
        "key_low": keys[:, 1],
    }
    return pd.DataFrame({name: column[has_text] for name, column in columns.items()})


def first_of_equal(keys: pd.DataFrame) -> pd.DataFrame:
    """Return the documents whose 128-bit key occurs more than once.

    `keys` are results of `exact_keys`, with all rows of each key. Columns of the result are
    ``document`` and ``root``, the smallest document number with the same key, which has a row, too.
    """
    document, key, low = (keys[name].to_numpy() for name in ("document", "key", "key_low"))
    order = np.lexsort((document, low, key))
    document, key, low = document[order], key[order], low[order]
    is_first = np.ones(len(order), bool)
    is_first[1:] = (key[1:] != key[:-1]) | (low[1:] != low[:-1])
    starts = np.flatnonzero(is_first)
    sizes = np.diff(starts, append=len(order))
    components = pd.DataFrame({"document": document, "root": np.repeat(document[starts], sizes)})
    return components[np.repeat(sizes > 1, sizes)].reset_index(drop=True)

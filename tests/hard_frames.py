"""Frames of every dtype of text, and of partitions that are empty or all null."""

import dask
import dask.dataframe as dd
import pandas as pd
import pyarrow as pa

from tests.replicas import sample_texts

TEXTS = sample_texts(24, seed=3, max_words=40)
STRING_DTYPES = {
    "str": "str",
    "string[pyarrow]": "string[pyarrow]",
    "string[python]": "string[python]",
    "object": object,
    "large_string": pd.ArrowDtype(pa.large_string()),
    "arrow string": pd.ArrowDtype(pa.string()),
}


def documents(texts=TEXTS, dtype="str", **columns):
    return pd.DataFrame({"text": pd.Series(texts, dtype=dtype), **columns})


def with_hard_parts(frame):
    """Ordinary rows, then an empty partition, an all-null one, and one with a single row."""
    nulls = frame.assign(text=pd.Series(None, index=frame.index, dtype=frame.dtypes.text))
    parts = [frame, frame.iloc[:0], nulls, frame.iloc[:1]]
    return dd.from_map(lambda part: part, parts, meta=frame.iloc[:0])


def assert_meta_is_true(result):
    parts = dask.compute(*result.to_delayed(), scheduler="sync")
    for part in parts:
        assert list(part.columns) == list(result.columns)
        assert dict(part.dtypes) == dict(result.dtypes)
    return parts

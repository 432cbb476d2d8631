"""Classify a Dask DataFrame: ``python examples/frame.py [MODEL]``."""

import sys

import dask.dataframe as dd
import pandas as pd

from gpuclassify import DomainClassifier

TEXTS = ["Stocks rose on Friday after the bank cut its rates.", "The match ended in a draw.", None]


def main(model: str = "nvidia/domain-classifier") -> pd.DataFrame:
    """Return the frame with its labels."""
    ddf = dd.from_pandas(pd.DataFrame({"text": TEXTS, "id": range(3)}), npartitions=2)
    classifier = DomainClassifier(model=model, confidence_field="confidence")
    return ddf.pipe(classifier).compute()  # lazy until here


if __name__ == "__main__":
    print(main(*sys.argv[1:]).drop(columns="text"))

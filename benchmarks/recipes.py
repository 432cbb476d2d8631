"""The ways to classify a lazy frame of texts that are compared.

The functions that workers run live here, in a module that is imported: from a script they would
be shipped by value, and what they hold would be lost between partitions.
"""

import functools
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import torch
from transformers import pipeline

from gpuclassify import DistributedDataClassifier

PIPELINE_BATCH_SIZE = 25


def new_pipeline(directory: str, device: str) -> Any:
    """A text classification pipeline, float32."""
    return pipeline(
        "text-classification", model=directory, device=torch.device(device), dtype=torch.float32
    )


held_pipeline = functools.lru_cache(maxsize=1)(new_pipeline)


def pipeline_partition(
    texts: pd.Series, directory: str, device: str, *, is_held: bool
) -> pd.Series:
    """Probabilities in label order, a list for each text: the body of the published recipe."""
    classify = (held_pipeline if is_held else new_pipeline)(directory, device)
    results = classify(
        texts.to_list(),
        batch_size=PIPELINE_BATCH_SIZE,
        padding="longest",
        truncation=True,
        top_k=None,
    )
    rows = [[row["score"] for row in sorted(result, key=_label)] for result in results]
    return pd.Series(rows, index=texts.index, name=texts.name)


def _label(row: dict[str, Any]) -> str:
    return row["label"]


def pipeline_scores(
    frame: dd.DataFrame, directory: str, device: str, *, is_held: bool
) -> np.ndarray:
    """Probabilities by the Hugging Face recipe, float (documents, labels)."""
    scores = frame["text"].map_partitions(
        pipeline_partition,
        directory,
        device,
        is_held=is_held,
        meta=pd.Series([], dtype=object, name="text"),
    )
    return _matrix(scores)


def gpuclassify_scores(frame: dd.DataFrame, directory: str, device: str) -> np.ndarray:
    """Probabilities by gpuclassify, float (documents, labels)."""
    classifier = DistributedDataClassifier(
        model=directory, score_field="probabilities", autocast=False, device=device
    )
    return _matrix(classifier(frame)["probabilities"])


def _matrix(scores: dd.Series) -> np.ndarray:
    """Computed here, one partition after the other, so that all recipes have the same threads."""
    return np.stack([np.asarray(row) for row in scores.compute(scheduler="synchronous")])

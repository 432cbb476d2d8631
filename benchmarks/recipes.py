"""The ways to classify a lazy frame of texts that are compared.

The functions that workers run live here, in a module that is imported: from a script they would
be shipped by value, and what they hold would be lost between partitions.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from gpuclassify import DistributedDataClassifier
from gpuclassify.inference.device import gpu_settings

PIPELINE_BATCH_SIZE = 25
SORTED_BATCH_SIZE = 32
STAGE_BATCH_SIZE = 256
MAX_TOKENS = 512
_HELD = 4  # in two precisions, and of another model that a search runs


def new_pipeline(directory: str, device: str, dtype: str) -> Any:
    """A text classification pipeline."""
    return pipeline(
        "text-classification",
        model=directory,
        device=torch.device(device),
        dtype=getattr(torch, dtype),
    )


held_pipeline = functools.lru_cache(maxsize=_HELD)(new_pipeline)


def pipeline_partition(
    texts: pd.Series,
    directory: str,
    device: str,
    *,
    is_held: bool,
    batch_size: int = PIPELINE_BATCH_SIZE,
    dtype: str = "float32",
    cudnn_attention: bool = True,
) -> pd.Series:
    """Probabilities in label order, a list for each text: the body of the published recipe.

    Without `cudnn_attention`, torch attends on a GPU as it does under gpuclassify.
    """
    classify = (held_pipeline if is_held else new_pipeline)(directory, device, dtype)
    ours = gpu_settings(torch.device(device), getattr(torch, dtype))
    with contextlib.nullcontext() if cudnn_attention else ours:
        results = classify(
            texts.to_list(),
            batch_size=batch_size,
            padding="longest",
            truncation=True,
            top_k=None,
        )
    rows = [[row["score"] for row in sorted(result, key=_label)] for result in results]
    return pd.Series(rows, index=texts.index, name=texts.name)


def _label(row: dict[str, Any]) -> str:
    return row["label"]


@functools.lru_cache(maxsize=_HELD)
def held_model(directory: str, device: str) -> tuple[Any, Any]:
    """Tokenizer and model, float32."""
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(directory), model.to(device).eval()


def autocast(device: str, dtype: str) -> Any:
    """What runs a float32 model in `dtype`, as Curator and CrossFit do."""
    if dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, getattr(torch, dtype))


def sorted_partition(texts: pd.Series, directory: str, device: str) -> pd.Series:
    """Probabilities by a loop over fixed batches, longest text first.

    That is how ``predict`` of sentence-transformers' CrossEncoder goes about it: sorted by
    characters, tokenized and padded batch by batch.
    """
    tokenizer, model = held_model(directory, device)
    order = np.argsort([-len(text) for text in texts], kind="stable")
    rows: list[Any] = [None] * len(texts)
    for start in range(0, len(order), SORTED_BATCH_SIZE):
        batch = order[start : start + SORTED_BATCH_SIZE]
        inputs = tokenizer(
            texts.iloc[batch].to_list(),
            padding=True,
            truncation=True,
            max_length=MAX_TOKENS,
            return_tensors="pt",
        ).to(device)
        with torch.inference_mode():
            probabilities = model(**inputs).logits.softmax(1).cpu().numpy()
        for row, values in zip(batch, probabilities, strict=True):
            rows[row] = values
    return pd.Series(rows, index=texts.index, name=texts.name)


def stage_partition(
    texts: pd.Series,
    directory: str,
    device: str,
    *,
    batch_size: int = STAGE_BATCH_SIZE,
    dtype: str = "float32",
) -> pd.Series:
    """Probabilities by the way of NeMo Curator 1.4's tokenizer and model stages.

    All texts of a partition are padded to the limit and held as lists, sorted by tokens, shortest
    first, and run in fixed batches from which the columns of padding are clipped.
    """
    tokenizer, model = held_model(directory, device)
    tokens = tokenizer(
        texts.to_list(),
        max_length=MAX_TOKENS,
        padding="max_length",
        truncation=True,
        return_tensors="np",
        return_token_type_ids=False,
    )
    ids, mask = tokens["input_ids"].tolist(), tokens["attention_mask"].tolist()
    order = np.argsort(tokens["attention_mask"].sum(axis=1), kind="stable")
    rows: list[Any] = [None] * len(texts)
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        input_ids = torch.tensor([ids[row] for row in batch]).to(device)
        attention_mask = torch.tensor([mask[row] for row in batch]).to(device)
        width = int(attention_mask.sum(1).max())
        with torch.no_grad(), autocast(device, dtype):
            logits = model(
                input_ids=input_ids[:, :width], attention_mask=attention_mask[:, :width]
            ).logits
        probabilities = logits.float().softmax(1).cpu().numpy()
        for row, values in zip(batch, probabilities, strict=True):
            rows[row] = values
    return pd.Series(rows, index=texts.index, name=texts.name)


def partition_scores(
    recipe: Callable[..., pd.Series],
    frame: dd.DataFrame,
    directory: str,
    device: str,
    **options: Any,
) -> np.ndarray:
    """Probabilities by a function of one partition's texts, float (documents, labels)."""
    scores = frame["text"].map_partitions(
        recipe, directory, device, **options, meta=pd.Series([], dtype=object, name="text")
    )
    return _matrix(scores)


def gpuclassify_scores(
    frame: dd.DataFrame, directory: str, device: str, **options: Any
) -> np.ndarray:
    """Probabilities by gpuclassify, float (documents, labels); `options` are the classifier's."""
    return _matrix(classifier_of(directory, device, **options)(frame)["probabilities"])


def classifier_of(directory: str, device: str, **options: Any) -> DistributedDataClassifier:
    """gpuclassify on the model in `directory`; float32 unless `options` say otherwise."""
    return DistributedDataClassifier(
        model=directory,
        score_field="probabilities",
        device=device,
        **{"autocast": False, **options},
    )


def _matrix(scores: dd.Series) -> np.ndarray:
    """Computed here, one partition after the other, so that all recipes have the same threads."""
    return np.stack([np.asarray(row) for row in scores.compute(scheduler="synchronous")])

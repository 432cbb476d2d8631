"""The ways to classify a lazy frame of texts that are compared.

The functions that workers run live here, in a module that is imported: from a script they would
be shipped by value, and what they hold would be lost between partitions.
"""

import contextlib
import functools
import importlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast, pipeline
from transformers.modeling_outputs import BaseModelOutput

from gpuclassify import DistributedDataClassifier
from gpuclassify.inference.crossfit import import_loader
from gpuclassify.inference.device import gpu_settings
from gpuclassify.inference.memory import CPU_MAX_TOKENS

PIPELINE_BATCH_SIZE = 25
SORTED_BATCH_SIZE = 32
STAGE_BATCH_SIZE = 256
CROSSFIT_RESERVED_GB = 4  # of a GPU, which NeMo Curator leaves to others
_HELD = 4  # in two precisions, and of another model that a search runs


def new_pipeline(directory: str, device: str, dtype: str) -> Any:
    """Return a new text classification pipeline of transformers."""
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
    """Return probabilities in label order, a list for each text: the body of the published recipe.

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
def held_model(
    directory: str, device: str, dtype: str = "float32", library: str = "transformers"
) -> tuple[Any, Any]:
    """Load tokenizer and model; DeBERTa's attention may be that of another library."""
    kind: Any = AutoModelForSequenceClassification
    if library == "flashdeberta":
        kind = importlib.import_module(library).FlashDebertaV2ForSequenceClassification
    model = kind.from_pretrained(directory, dtype=getattr(torch, dtype)).to(device).eval()
    if library == "disentangled_flash":
        run_packed(model.deberta)
    return PreTrainedTokenizerFast.from_pretrained(directory), model


def run_packed(deberta: Any, backend: str = "triton") -> None:
    """Make DeBERTa's encoder that of disentangled-flash, on tokens without padding.

    That is the faster of its two ways by its own measurements. Without Triton it leaves the encoder
    as it is, unless `backend` is "torch".
    """
    library: Any = importlib.import_module("disentangled_flash")
    library.optimize_deberta(deberta, backend=backend)
    if not isinstance(deberta.encoder, library.DebertaV2OptimizedEncoder):
        raise RuntimeError("disentangled-flash does not run this model here")

    def forward(states: torch.Tensor, mask: torch.Tensor, **_: Any) -> BaseModelOutput:
        tokens, ends, packed = library.pack_padded_with_info(states, mask)
        outputs = deberta.encoder.forward_packed(
            tokens, ends, packed.max_seqlen, output_hidden_states=False, packed_info=packed
        )
        padded, _ = library.unpack_packed(
            outputs.last_hidden_state, ends, states.shape[1], packed_info=packed
        )
        return BaseModelOutput(padded, (padded,))

    deberta.encoder.forward = forward


def autocast(device: str, dtype: str) -> Any:
    """Return a context that runs a float32 model in `dtype`, as Curator and CrossFit do."""
    if dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, getattr(torch, dtype))


def sorted_partition(
    texts: pd.Series,
    directory: str,
    device: str,
    *,
    batch_size: int = SORTED_BATCH_SIZE,
    dtype: str = "float32",
    library: str = "transformers",
) -> pd.Series:
    """Return probabilities by a loop over fixed batches, longest text first.

    That is how ``predict`` of sentence-transformers' CrossEncoder goes about it: sorted by
    characters, tokenized and padded batch by batch.
    """
    tokenizer, model = held_model(directory, device, dtype, library)
    order = np.argsort([-len(text) for text in texts], kind="stable")
    rows: list[Any] = [None] * len(texts)
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        inputs = tokenizer(
            texts.iloc[batch].to_list(),
            padding=True,
            truncation=True,
            max_length=tokenizer.model_max_length,
            return_tensors="pt",
        ).to(device)
        with torch.inference_mode():
            probabilities = model(**inputs).logits.float().softmax(1).cpu().numpy()
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
    """Return probabilities by the way of NeMo Curator 1.4's tokenizer and model stages.

    All texts of a partition are padded to the limit and held as lists, sorted by tokens, shortest
    first, and run in fixed batches from which the columns of padding are clipped.
    """
    tokenizer, model = held_model(directory, device)
    tokens = tokenizer(
        texts.to_list(),
        max_length=tokenizer.model_max_length,
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


class CpuPlan:
    """Stand-in for the model that CrossFit's planner asks, without a GPU to measure memory on.

    CrossFit estimates the memory of a batch by a curve that it fits on the GPU. Here a stand-in
    estimates tokens, rows times width, and the limit is the one that gpuclassify has on a CPU.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.max_mem_gb = CPU_MAX_TOKENS  # as the estimate: tokens, in spite of the name
        self._tokenizer = tokenizer

    def load_tokenizer(self) -> Any:
        """Return the padding id and side."""
        return SimpleNamespace(
            pad_token_id=self._tokenizer.pad_token_id, padding_side=self._tokenizer.padding_side
        )

    def max_seq_length(self) -> int:
        """Return the most tokens of a text."""
        return self._tokenizer.model_max_length

    def estimate_memory(self, max_num_tokens: int, batch_size: int) -> float:
        """Return the tokens of a batch, padding included."""
        return max_num_tokens * batch_size


class GpuPlan(CpuPlan):
    """Stand-in for a model on a GPU, with the curve of memory that CrossFit's HFModel fits."""

    def __init__(self, tokenizer: Any, model: Any, device: str) -> None:
        super().__init__(tokenizer)
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        self.max_mem_gb = total_bytes // 2**30 - CROSSFIT_RESERVED_GB
        self._curve = _fitted_curve(model, tokenizer.model_max_length)

    def estimate_memory(self, max_num_tokens: int, batch_size: int) -> float:
        """Estimate the memory of a batch in GiB."""
        sizes = np.array([[batch_size, max_num_tokens, max_num_tokens**2]])
        return float(self._curve.predict(sizes)[0]) / 1024


def crossfit_partition(
    texts: pd.Series,
    directory: str,
    device: str,
    *,
    batch_size: int,
    dtype: str = "float32",
) -> pd.Series:
    """Return probabilities by CrossFit 0.0.9's own loader, planner and, on a GPU, estimate.

    Its first batch of 512 rows, which its planner never makes smaller, has `batch_size` rows here.
    """
    tokenizer, model = held_model(directory, device)
    tokens = tokenizer(
        texts.to_list(),
        max_length=tokenizer.model_max_length,
        padding="max_length",
        truncation=True,
        return_tensors="pt",
        return_token_type_ids=False,
    ).to(device)

    def probabilities(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        with autocast(device, dtype):
            logits = model(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits.float().softmax(1)

    loader = import_loader().SortedSeqLoader(
        dict(tokens), _plan(directory, device), initial_batch_size=batch_size
    )
    with torch.no_grad():
        outputs = torch.cat(list(loader.map(probabilities))).cpu().numpy()
    rows = np.empty_like(outputs)
    rows[loader.sorted_indices.cpu().numpy()] = outputs
    return pd.Series(list(rows), index=texts.index, name=texts.name)


@functools.lru_cache(maxsize=4)
def _plan(directory: str, device: str) -> CpuPlan:
    tokenizer, model = held_model(directory, device)
    if torch.device(device).type == "cuda":
        return GpuPlan(tokenizer, model, device)
    return CpuPlan(tokenizer)


def _fitted_curve(model: Any, max_tokens: int) -> Any:
    import_loader()  # makes CrossFit's own package importable
    curves = importlib.import_module("crossfit.backend.torch.hf.memory_curve_utils")
    with (
        tempfile.TemporaryDirectory() as folder,
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        torch.no_grad(),
    ):
        return curves.fit_memory_estimate_curve(
            model=model,
            path_or_name="the model",
            end_seq_len=max_tokens,
            mem_model_path=str(Path(folder, "curve.pkl")),
        )


def partition_scores(
    recipe: Callable[..., pd.Series],
    frame: dd.DataFrame,
    directory: str,
    device: str,
    **options: Any,
) -> np.ndarray:
    """Return probabilities by a function of one partition's texts, float (documents, labels)."""
    scores = frame["text"].map_partitions(
        recipe, directory, device, **options, meta=pd.Series([], dtype=object, name="text")
    )
    return _matrix(scores)


def gpuclassify_scores(
    frame: dd.DataFrame, directory: str, device: str, **options: Any
) -> np.ndarray:
    """Return gpuclassify's probabilities, float (documents, labels); `options` are its own."""
    return _matrix(classifier_of(directory, device, **options)(frame)["probabilities"])


def classifier_of(directory: str, device: str, **options: Any) -> DistributedDataClassifier:
    """Return a classifier of the model in `directory`; float32 unless `options` say otherwise."""
    return DistributedDataClassifier(
        model=directory,
        score_field="probabilities",
        device=device,
        **{"autocast": False, **options},
    )


def _matrix(scores: dd.Series) -> np.ndarray:
    """Compute scores here, partition after partition, so that all recipes have the same threads."""
    return np.stack([np.asarray(row) for row in scores.compute(scheduler="synchronous")])

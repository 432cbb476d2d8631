"""CrossFit 0.0.9 as it is: its own loader, its own planner and, on a GPU, its own estimate.

CrossFit estimates the memory of a batch by a curve that it fits on the GPU. It has none for a CPU,
so there a stand-in estimates tokens, rows times width, and the limit is the one that gpuclassify
has there. CrossFit's first batch of 512 rows, which its planner never makes smaller, is replaced by
the fastest of a few that are tried.
"""

import contextlib
import functools
import importlib
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import torch

from benchmarks.recipes import MAX_TOKENS, autocast, held_model
from gpuclassify.inference.crossfit import import_loader
from gpuclassify.inference.memory import CPU_MAX_TOKENS

RESERVED_GB = 4  # of a GPU, which NeMo Curator leaves to others


class CpuPlan:
    """What CrossFit's planner asks of a model, where there is no GPU to measure it on."""

    def __init__(self, tokenizer: Any) -> None:
        self.max_mem_gb = CPU_MAX_TOKENS  # as the estimate: tokens, in spite of the name
        self._tokenizer = tokenizer

    def load_tokenizer(self) -> Any:
        """With the padding id and side."""
        return SimpleNamespace(
            pad_token_id=self._tokenizer.pad_token_id, padding_side=self._tokenizer.padding_side
        )

    def max_seq_length(self) -> int:
        """Most tokens of a text."""
        return MAX_TOKENS

    def estimate_memory(self, max_num_tokens: int, batch_size: int) -> float:
        """Tokens of a batch."""
        return max_num_tokens * batch_size


class GpuPlan(CpuPlan):
    """The same with the curve of memory that CrossFit fits, as its HFModel does."""

    def __init__(self, tokenizer: Any, model: Any, device: str) -> None:
        super().__init__(tokenizer)
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        self.max_mem_gb = total_bytes // 2**30 - RESERVED_GB
        self._curve = _fitted_curve(model)

    def estimate_memory(self, max_num_tokens: int, batch_size: int) -> float:
        """GiB of a batch."""
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
    """Probabilities in the batches that CrossFit plans, at least `batch_size` rows at first."""
    tokenizer, model = held_model(directory, device)
    tokens = tokenizer(
        texts.to_list(),
        max_length=MAX_TOKENS,
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


def _fitted_curve(model: Any) -> Any:
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
            end_seq_len=MAX_TOKENS,
            mem_model_path=str(Path(folder, "curve.pkl")),
        )

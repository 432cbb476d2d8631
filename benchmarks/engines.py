"""Other engines for CPUs on the same weights, texts and threads: OpenVINO and ONNX Runtime.

They are read in the environment of `make bench-peers` alone; batches are sorted for all of them.
sentence-transformers reaches both through optimum-intel and optimum-onnx, which do not install
beside this transformers, and its CrossEncoder takes pairs of texts.
"""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForSequenceClassification

from benchmarks.inputs import MAX_TOKENS, docstrings
from benchmarks.recipes import held_model

BATCH_SIZE = 16
CALIBRATION_TEXTS = 32  # of OpenVINO's static int8
PACKAGES = ("openvino", "nncf", "onnxruntime", "onnx")

Engine = Callable[[np.ndarray, np.ndarray], np.ndarray]  # ids and mask (rows, width) to logits


def engine_partition(
    texts: pd.Series, directory: str, device: str, *, engine: Callable[[str], Engine]
) -> pd.Series:
    """Return probabilities by fixed batches, shortest texts first, each padded to its longest."""
    tokenizer, _ = held_model(directory, device)
    ids = tokenizer(texts.to_list(), truncation=True, max_length=MAX_TOKENS)["input_ids"]
    order = np.argsort([len(row) for row in ids], kind="stable")
    run = engine(directory)
    rows: list[Any] = [None] * len(texts)
    for start in range(0, len(order), BATCH_SIZE):
        batch = order[start : start + BATCH_SIZE]
        padded = tokenizer.pad({"input_ids": [ids[row] for row in batch]}, return_tensors="np")
        logits = torch.from_numpy(run(padded["input_ids"], padded["attention_mask"])).float()
        for row, values in zip(batch, logits.softmax(1).numpy(), strict=True):
            rows[row] = values
    return pd.Series(rows, index=texts.index, name=texts.name)


@functools.cache
def torch_engine(directory: str, *, dtype: str) -> Engine:
    """Load the model of transformers itself."""
    module = AutoModelForSequenceClassification.from_pretrained(
        directory, dtype=getattr(torch, dtype)
    ).eval()

    def run(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
            return module(**inputs).logits.float().numpy()

    return run


@functools.cache
def openvino_engine(directory: str, *, precision: str, is_int8: bool = False) -> Engine:
    """Load OpenVINO with torch's threads; `precision` is "f32" or "bf16" for all but int8."""
    import openvino

    model = _quantized(directory) if is_int8 else _converted(directory)
    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": precision,
    }
    request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
    return lambda ids, mask: request.infer({"input_ids": ids, "attention_mask": mask})[0]


@functools.cache
def _converted(directory: str) -> Any:
    import openvino

    return openvino.convert_model(_Logits(directory), example_input=_example())


@functools.cache
def _quantized(directory: str) -> Any:
    """Quantize weights by channel and activations by tensor, with ranges from a few texts."""
    import nncf

    tokenizer, _ = held_model(directory, "cpu")
    texts = docstrings()[:CALIBRATION_TEXTS]
    samples = [
        dict(tokenizer(text, truncation=True, max_length=MAX_TOKENS, return_tensors="np"))
        for text in texts
    ]
    samples = [{name: sample[name] for name in _example()} for sample in samples]
    return nncf.quantize(
        _converted(directory),
        nncf.Dataset(samples),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(samples),
    )


@functools.cache
def onnx_engine(directory: str, *, is_int8: bool = False) -> Engine:
    """Load ONNX Runtime with torch's threads, in float32 or with its dynamic int8."""
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    names = list(_example())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        torch.onnx.export(
            _Logits(directory),
            tuple(_example().values()),
            str(path),
            input_names=names,
            output_names=["logits"],
            dynamic_axes={name: {0: "rows", 1: "width"} for name in names},
            dynamo=False,  # the other exporter needs one more package
        )
        if is_int8:
            quantize_dynamic(path, path := Path(folder, "int8.onnx"), weight_type=QuantType.QInt8)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(str(path), options)
    return lambda ids, mask: session.run(None, {"input_ids": ids, "attention_mask": mask})[0]


class _Logits(torch.nn.Module):
    def __init__(self, directory: str) -> None:
        super().__init__()
        _, self.model = held_model(directory, "cpu")

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits


def _example() -> dict[str, torch.Tensor]:
    return {name: torch.ones(2, 8, dtype=torch.long) for name in ("input_ids", "attention_mask")}

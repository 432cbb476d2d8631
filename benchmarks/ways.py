"""Which ways to classify a run compares, in which precision, and what may differ between them."""

import argparse
import contextlib
import functools
import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import dask.dataframe as dd
import numpy as np
import torch
from transformers import AutoConfig

from benchmarks import BASELINE, SUBJECT
from benchmarks.engines import (
    engine_partition,
    onnx_engine,
    openvino_engine,
    torch_engine,
)
from benchmarks.harness import Variant, noted
from benchmarks.recipes import (
    classifier_of,
    crossfit_partition,
    gpuclassify_scores,
    partition_scores,
    pipeline_partition,
    sorted_partition,
    stage_partition,
)
from gpuclassify.inference import linear
from gpuclassify.inference.device import FLOAT8_CAPABILITY

PEER_DTYPE = "float16"  # of autocast, as Curator and CrossFit leave it to torch on a GPU
# Of a probability. 150 texts through random 12-layer models differed from float32 by 0.018 and
# 0.093; texts that change places differ by up to 0.99.
TOLERANCES = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.3, "int8": 0.6, "float8": 0.9}
HALF = f"{SUBJECT}, bfloat16"
EIGHT, PLAIN_LAYERS = f"{SUBJECT}, float8", f"{SUBJECT}, layers of transformers"
WARM_UP_DOCUMENTS = 2
BATCH_SIZES = {"cpu": (16, 32, 64, 128), "cuda": (64, 128, 256, 512)}
SEARCH_DOCUMENTS = {"cpu": 256, "cuda": 2_048}
SEARCH_ROUNDS = 2
# By package: words in the names of ways that need it, and where it comes from.
NEEDED = {
    "crossfit": ("crossfit", "pip install 'gpuclassify[crossfit]'"),
    "openvino": ("OpenVINO", "make bench-peers"),
    "nncf": ("OpenVINO, int8", "make bench-peers"),
    "onnxruntime": ("ONNX", "make bench-peers"),
    "disentangled_flash": ("disentangled-flash", "pip install disentangled-flash==1.1.1"),
    "flashdeberta": ("flashdeberta", "pip install flashdeberta==0.0.8"),
}


@dataclass(frozen=True)
class Way:
    """One way to classify; it can be pickled.

    ``scores(frame, directory, device)`` gives probabilities, float (documents, labels), by
    products in `dtype`; if the way `is_searched`, for the best ``batch_size`` too.
    """

    name: str
    scores: Callable[..., np.ndarray]
    dtype: str = "float32"
    is_searched: bool = False

    def variant(self, frame: dd.DataFrame, directory: str, device: str) -> Variant:
        """Return the variant that the harness times on the texts of `frame`."""
        few = dd.from_pandas(frame.head(WARM_UP_DOCUMENTS), npartitions=1)
        return Variant(
            self.name,
            run=functools.partial(self.scores, frame, directory, device),
            warm_up=functools.partial(self.scores, few, directory, device),
            tolerance=TOLERANCES[self.dtype],
        )


@dataclass(frozen=True)
class Choice:
    """The ways of a run, the baseline first, gpuclassify last, and why others cannot run."""

    ways: tuple[Way, ...]
    left_out: dict[str, str] = field(default_factory=dict)


def choose_ways(options: argparse.Namespace, directory: str) -> Choice:
    """Return the ways that the options ask for.

    Raises
    ------
    ValueError
        ``options.variants`` names one that does not exist.
    """
    is_gpu = torch.device(options.device).type == "cuda"
    ways = _gpu_ways(options, directory) if is_gpu else _cpu_ways(options)
    if options.variants:
        ways = _named(ways, options.variants)
    missing = {
        way.name: f"{package} is not installed: {cure}"
        for package, (words, cure) in NEEDED.items()
        for way in ways
        if words in way.name and importlib.util.find_spec(package) is None
    }
    if is_gpu and torch.cuda.get_device_capability(options.device) < FLOAT8_CAPABILITY:
        missing[EIGHT] = "the GPU has no products of 8-bit floats"
    return Choice(tuple(way for way in ways if way.name not in missing), missing)


def dtype_names(ways: Iterable[Way]) -> str:
    """Return the precisions that run, for a result's settings."""
    return ", ".join(sorted({way.dtype for way in ways}))


def _cpu_ways(options: argparse.Namespace) -> list[Way]:
    peers = [
        Way(
            f"{BASELINE}, batch 256",
            _by_partition(pipeline_partition, is_held=True, batch_size=256),
        ),
        *_fixed_batches(),
        *_searched_batches("float32"),
        Way("loader=crossfit", functools.partial(gpuclassify_scores, loader="crossfit")),
    ]
    if options.engines:
        half = functools.partial(gpuclassify_scores, dtype="bfloat16")
        return [
            _recipes()[0],
            *_engines(),
            Way(HALF, half, "bfloat16"),
            Way(SUBJECT, gpuclassify_scores),
        ]
    return [
        *_recipes(),
        *(peers if options.peers else []),
        Way(SUBJECT, gpuclassify_scores),
    ]


def _engines() -> list[Way]:
    """Return the ways by other engines, with sorted batches."""
    made = {
        ("torch", "float32"): functools.partial(torch_engine, dtype="float32"),
        ("torch", "bfloat16"): functools.partial(torch_engine, dtype="bfloat16"),
        ("ONNX Runtime", "float32"): onnx_engine,
        ("ONNX Runtime", "int8"): functools.partial(onnx_engine, is_int8=True),
        ("OpenVINO", "float32"): functools.partial(openvino_engine, precision="f32"),
        ("OpenVINO", "bfloat16"): functools.partial(openvino_engine, precision="bf16"),
        ("OpenVINO, int8 and", "float32"): functools.partial(
            openvino_engine, precision="f32", is_int8=True
        ),
        ("OpenVINO, int8 and", "bfloat16"): functools.partial(
            openvino_engine, precision="bf16", is_int8=True
        ),
    }
    return [
        Way(
            f"{name} {dtype}",
            _by_partition(engine_partition, engine=engine),
            "int8" if "int8" in name else dtype,
        )
        for (name, dtype), engine in made.items()
    ]


def _gpu_ways(options: argparse.Namespace, directory: str) -> list[Way]:
    classifier = classifier_of(directory, options.device, autocast=True)
    own_dtype = str(classifier.runner.device_and_dtype()[1])
    own_dtype = own_dtype.removeprefix("torch.")
    own = functools.partial(gpuclassify_scores, autocast=True)
    half = functools.partial(pipeline_partition, is_held=True, dtype=PEER_DTYPE)
    peers = [
        Way(f"{BASELINE}, float16, batch 256", _by_partition(half, batch_size=256), PEER_DTYPE),
        *_fixed_batches(),
    ]
    return [
        *_recipes(),
        Way(f"{BASELINE}, float16", _by_partition(half), PEER_DTYPE),
        Way(
            f"{BASELINE}, float16, no cuDNN",
            _by_partition(half, cudnn_attention=False),
            PEER_DTYPE,
        ),
        *(peers if options.peers else []),
        *_searched_batches(PEER_DTYPE),
        *other_attentions(directory),
        Way("loader=crossfit", functools.partial(own, loader="crossfit"), own_dtype),
        Way(f"{SUBJECT}, float32", gpuclassify_scores),
        Way(HALF, functools.partial(gpuclassify_scores, dtype="bfloat16"), "bfloat16"),
        Way(EIGHT, functools.partial(gpuclassify_scores, dtype="float8"), "float8"),
        Way(PLAIN_LAYERS, plain_layers_scores, own_dtype),
        Way(SUBJECT, own, own_dtype),
    ]


def _recipes() -> list[Way]:
    return [
        Way(BASELINE, _by_partition(pipeline_partition, is_held=True)),
        Way("pipeline per partition", _by_partition(pipeline_partition, is_held=False)),
    ]


def _fixed_batches() -> list[Way]:
    return [
        Way("sorted batches of 32", _by_partition(sorted_partition)),
        Way("Curator's stages, batch 256", _by_partition(stage_partition)),
        Way("Curator's stages, batch 32", _by_partition(stage_partition, batch_size=32)),
    ]


def _searched_batches(dtype: str) -> list[Way]:
    recipes = {
        "Curator's stages, best batch": stage_partition,
        "crossfit-original": crossfit_partition,
    }
    return [
        Way(name, _by_partition(recipe, dtype=dtype), dtype, is_searched=True)
        for name, recipe in recipes.items()
    ]


def other_attentions(directory: str) -> list[Way]:
    """Return sorted batches in float16, with the attention of each library that has DeBERTa's."""
    libraries = {"sorted batches, float16": "transformers"}
    if AutoConfig.from_pretrained(directory).model_type == "deberta-v2":
        libraries |= {
            "disentangled-flash, float16": "disentangled_flash",
            "flashdeberta, float16": "flashdeberta",
        }
    return [
        Way(
            f"{name}, best batch",
            _by_partition(sorted_partition, dtype=PEER_DTYPE, library=library),
            PEER_DTYPE,
            is_searched=True,
        )
        for name, library in libraries.items()
    ]


def plain_layers_scores(frame: dd.DataFrame, directory: str, device: str) -> np.ndarray:
    """Return gpuclassify's probabilities by layers that are not merged or fused on a GPU."""
    with contextlib.ExitStack() as stack:
        for name in ("merge_projections", "fuse_sums"):
            stack.enter_context(mock.patch.object(linear, name, lambda module: None))
        return gpuclassify_scores(frame, _copied(directory).name, device, autocast=True)


@functools.cache
def _copied(directory: str) -> tempfile.TemporaryDirectory[str]:
    """Copy a model, because models are cached by path, and the cached one has merged layers."""
    folder = tempfile.TemporaryDirectory()
    shutil.copytree(directory, folder.name, dirs_exist_ok=True)
    return folder


def _by_partition(recipe: Callable[..., Any], **options: Any) -> Callable[..., np.ndarray]:
    return functools.partial(partition_scores, recipe, **options)


def _named(ways: Sequence[Way], names: Iterable[str]) -> list[Way]:
    known = [way.name for way in ways]
    unknown = set(names) - set(known)
    if unknown:
        raise ValueError(f"no variants {sorted(unknown)} in this run, which has {known}")
    return [way for way in ways if way.name in {BASELINE, SUBJECT, *names}]


def search_batches(
    ways: Iterable[Way],
    frame: dd.DataFrame,
    directory: str,
    device: str,
    failures: dict[str, str] | None = None,
) -> tuple[list[Way], dict[str, dict[str, Any]]]:
    """Search the fastest batch size of each way that asks for it; return ways and timings.

    The first texts of the frame are tried. The directory is that of a model with a single layer:
    all layers are alike, so that one shows which is fastest. `noted` says what becomes of a way
    that fails.
    """
    kind = torch.device(device).type
    texts = frame.head(SEARCH_DOCUMENTS[kind], npartitions=-1)
    few = dd.from_pandas(texts, frame.npartitions)
    sizes = distinct_sizes(BATCH_SIZES[kind], rows=-(-len(texts) // few.npartitions))
    fixed, found = [], {}
    for way in ways:
        with noted(failures, way.name):
            if way.is_searched:
                seconds = {size: _try(way, size, few, directory, device) for size in sizes}
                fastest = min(seconds, key=seconds.__getitem__)
                found[way.name] = {"batch_size": fastest, "seconds_of_one_layer": seconds}
                way = replace(way, scores=functools.partial(way.scores, batch_size=fastest))
            fixed.append(way)
    return fixed, found


def distinct_sizes(sizes: Sequence[int], rows: int) -> list[int]:
    """Return those of ascending batch sizes that cut a partition of `rows` in different ways."""
    return [size for size, smaller in zip(sizes, (0, *sizes), strict=False) if smaller < rows]


def _try(way: Way, batch_size: int, frame: dd.DataFrame, directory: str, device: str) -> float:
    timings = []
    for _ in range(SEARCH_ROUNDS):
        started = time.perf_counter()
        way.scores(frame, directory, device, batch_size=batch_size)
        timings.append(time.perf_counter() - started)
    return min(timings)

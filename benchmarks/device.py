"""What does one GPU do: how fast, at what share of its peak, how idle, and in how much memory?

``python -m benchmarks.device --help`` lists the options; README.md says what is measured. On a CPU
it shows that it works: what only a GPU has is left out, and the result says so.
"""

import argparse
import contextlib
import functools
import importlib.util
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedTokenizerFast

from benchmarks import BASELINE, SUBJECT, throughput
from benchmarks.harness import (
    Variant,
    begin,
    finish,
    new_parser,
    noise,
    noted,
    parse,
    run_interleaved,
    write_result,
)
from benchmarks.inputs import LENGTHS, SHAPES, TINY_SIZES, shape_of, texts_of_lengths, write_model
from benchmarks.recipes import classifier_of, partition_scores, pipeline_partition
from benchmarks.start import measure_start
from benchmarks.ways import (
    BATCH_SIZES,
    EIGHT,
    HALF,
    PEER_DTYPE,
    PLAIN_LAYERS,
    TOLERANCES,
    WARM_UP_DOCUMENTS,
    Choice,
    Way,
    choose_ways,
    dtype_names,
    other_attentions,
)
from benchmarks.work import tokenizer_speed
from gpuclassify import Embedder
from gpuclassify.cluster.sizing import MAXIMUM_POOL_SHARE, POOL_SHARE, TORCH_SHARE
from gpuclassify.workers.nvml import survey_gpus
from gpuclassify.workers.run_context import add_up, collected_stats, waiting_for_host

QUESTION = "device"
PARTS = ("speed", "tokens", "idle", "start", "memory", "embeddings")
ORIGINAL = "crossfit-original"
CUDF = f"{SUBJECT} on cudf frames"
PEERS = ("Curator's stages, best batch", "loader=crossfit")
PEER_EMBEDDER = "sentence-transformers"
BALLAST_SHARE = 0.4  # of the GPU, held by a cudf frame beside the model
BALLAST_COLUMNS = 8  # a column has at most 2**31 - 1 rows
RMM_ALIGNMENT_BYTES = 256
PACKAGES = (
    *("gpuclassify", "torch", "transformers", "dask", "pandas", "crossfit"),
    *("cudf", "dask-cudf", "rmm", "dask-cuda"),
)
# Of cuBLAS, which torch allocates at the first product: a measurement kept from an earlier process
# was made with it in place, and does not have it.
WORKSPACE_BYTES = 2**27


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path.

    The file is there, ``"unfinished": true``, from the first way that was timed on.

    Raises
    ------
    SystemExit
        Something failed, as ``failures`` in the result say, or its answers differ from others.
    """
    options = parse_options(arguments)
    shape = shape_of(options)
    shape = replace(shape, layers=options.layers or shape.layers)
    if options.smoke:
        shape = replace(shape, **TINY_SIZES)
    result = begin(options, shape=asdict(shape), max_tokens=shape.max_tokens, weights="random")
    failures: dict[str, str] = {}
    result |= {"gpu": describe_gpu(), "left_out": {}, "failures": failures}
    path, lengths = None, options.lengths

    def tell(**found: Any) -> None:
        nonlocal path
        result.update(found)
        state = {"unfinished": True, "noisy": bool(noise(result))}
        path = write_result(QUESTION, result | state, options.output, path)

    with tempfile.TemporaryDirectory() as folder:
        directory = str(write_model(Path(folder, "model"), shape))
        small = str(write_model(Path(folder, "layer"), replace(shape, layers=1)))
        choice = choose(options, directory)
        setting = throughput.Setting(options, shape, directory, small, choice)
        result["settings"]["dtype"] = dtype_names(choice.ways)
        result["left_out"] |= choice.left_out
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            # before anything of cudf is in this process
            "memory": lambda: _memory(options, directory, result["left_out"]),
            "speed": lambda: {
                "corpora": {
                    lengths: throughput.measure(
                        lengths, setting, failures, lambda corpus: tell(corpora={lengths: corpus})
                    )
                }
            },
            "tokens": lambda: _tokens(options, directory),
            "idle": lambda: _idle(options, directory),
            "start": lambda: {"start": measure_start(directory, options.device)},
            "embeddings": lambda: {"embeddings": measure_embeddings(options, directory)},
        }
        for part in (part for part in parts if part in options.parts):
            with noted(failures, part):
                tell(**parts[part]())
    path = finish(QUESTION, result, options, table, path)
    if failures:
        raise SystemExit(f"failed: {', '.join(failures)}")
    return path


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--documents", type=int, default=8_000, help="(8000)")
    parser.add_argument("--lengths", choices=LENGTHS, default="web", help="of documents (web)")
    parser.add_argument("--layers", type=int, help="of the model (all of its shape)")
    parser.add_argument("--model", choices=tuple(SHAPES), default="bert")
    parser.add_argument("--seed", type=int, default=0, help="of the texts (0)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS[:4]))
    parser.add_argument(
        "--original",
        action="store_true",
        help=f"time {ORIGINAL} too, which first fits its curve of memory: about a minute",
    )
    options = parse(parser, arguments)
    options.partitions, options.footprint = 1, "none"
    options.peers, options.engines = True, False
    return options


def describe_gpu() -> dict[str, Any]:
    """Describe the first visible GPU, its driver, and the versions of the packages that use it."""
    survey = survey_gpus()
    first = survey.gpus[0] if survey.gpus else None
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "name": first and first.name,
        "memory_bytes": first and first.memory_bytes,
        "driver": survey.driver_version,
        "driver_cuda": survey.cuda_version and ".".join(map(str, survey.cuda_version)),
        "python": platform.python_version(),
        "versions": {name: version for name, version in versions.items() if version},
    }


def _version(name: str) -> str | None:
    """Return the version of a package, or of its wheel for one of the CUDA versions."""
    for wheel in (name, f"{name}-cu13", f"{name}-cu12"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(wheel)
    return None


def choose(options: argparse.Namespace, directory: str) -> Choice:
    """Choose the recipe in its own and the GPU's precision, peers, gpuclassify on both frames."""
    is_gpu = _is_gpu(options.device)
    options.variants = [*PEERS, *([ORIGINAL] if options.original else [])]
    if is_gpu:
        options.variants += [HALF, EIGHT, PLAIN_LAYERS]
        options.variants += [way.name for way in other_attentions(directory)]
    choice = choose_ways(options, directory)
    *others, subject = choice.ways
    dtype = PEER_DTYPE if is_gpu else "float32"
    recipe = functools.partial(pipeline_partition, is_held=True, dtype=dtype)
    scores = functools.partial(partition_scores, recipe)
    others.insert(1, Way(f"{BASELINE}, {dtype}, best batch", scores, dtype, is_searched=True))
    left_out = dict(choice.left_out)
    if not (is_gpu and _has_cudf()):
        left_out[CUDF] = "it needs a GPU and cudf"
    elif options.original:
        left_out[CUDF] = f"{ORIGINAL} leaves no memory to cudf"
    else:
        others.append(Way(CUDF, cudf_scores, subject.dtype))
    return Choice((*others, subject), left_out)


def _has_cudf() -> bool:
    return importlib.util.find_spec("cudf") is not None


def cudf_scores(frame: dd.DataFrame, directory: str, device: str, **options: Any) -> np.ndarray:
    """Return gpuclassify's probabilities on a cudf frame, which is made before the time starts."""
    classifier = classifier_of(directory, device, **{"autocast": True, **options})
    lists = classifier(_on_gpu(frame._name, frame))["probabilities"].compute(scheduler="sync")
    return lists.list.leaves.to_numpy().reshape(len(lists), -1)


_cudf_frames: dict[str, Any] = {}


def _on_gpu(name: str, frame: dd.DataFrame) -> dd.DataFrame:
    """Return the frame as a cudf one, made once for the warm-up and once for the timed runs."""
    import cudf

    if name not in _cudf_frames:
        whole = cudf.from_pandas(frame.compute(scheduler="sync"))
        _cudf_frames[name] = dd.from_pandas(whole, npartitions=frame.npartitions)
    return _cudf_frames[name]


def _memory(
    options: argparse.Namespace, directory: str, left_out: dict[str, str]
) -> dict[str, Any]:
    if _is_gpu(options.device) and _has_cudf():
        texts = _texts(options, PreTrainedTokenizerFast.from_pretrained(directory))
        return {"memory": measure_memory(texts, directory, options.device)}
    left_out["memory"] = "it needs a GPU and cudf"
    return {}


def _tokens(options: argparse.Namespace, directory: str) -> dict[str, Any]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    texts = _texts(options, tokenizer)
    return {"tokens": tokenizer_speed(texts, tokenizer)}


def _idle(options: argparse.Namespace, directory: str) -> dict[str, Any]:
    texts = _texts(options, PreTrainedTokenizerFast.from_pretrained(directory))
    return {"idle": measure_idle(texts, directory, options.device)}


def _texts(options: argparse.Namespace, tokenizer: Any) -> list[str]:
    return texts_of_lengths(
        LENGTHS[options.lengths].sample(options.documents), tokenizer, options.seed
    )


def _is_gpu(device: str) -> bool:
    return torch.device(device).type == "cuda"


def measure_embeddings(options: argparse.Namespace, directory: str) -> dict[str, Any]:
    """Time embeddings of the mean token, by sentence-transformers and on pandas and cudf frames.

    sentence-transformers, where it is installed, runs in the precision of `Embedder`.
    """
    texts = _texts(options, PreTrainedTokenizerFast.from_pretrained(directory))
    embedder = Embedder(
        model=directory, pooling="mean", normalize=True, device=options.device, autocast=True
    )
    dtype = embedder.runner.device_and_dtype()[1]

    def embed(frame: Any) -> np.ndarray:
        lists = embedder(frame)["embedding"]
        if not isinstance(frame, pd.DataFrame):
            return lists.list.leaves.to_numpy().reshape(len(frame), -1)
        return np.stack(lists)

    frame = pd.DataFrame({"text": texts})
    ways = [(SUBJECT, embed, frame)]
    if _is_gpu(options.device) and _has_cudf():
        import cudf

        ways.append((CUDF, embed, cudf.from_pandas(frame)))
    if importlib.util.find_spec("sentence_transformers") is not None:
        ways.append((PEER_EMBEDDER, peer_embedder(directory, options.device, dtype), frame))
    variants = [
        Variant(
            name,
            functools.partial(way, documents),
            functools.partial(way, documents.head(WARM_UP_DOCUMENTS)),
        )
        for name, way, documents in ways
    ]
    tolerance = TOLERANCES[str(dtype).removeprefix("torch.")]
    run = run_interleaved(variants, options.repeats, tolerance)
    return {
        "dtype": str(dtype),
        "documents": len(texts),
        "largest_difference": run.largest_difference,
        "variants": {name: run.times(name) for name in run.seconds},
    }


def peer_embedder(directory: str, device: str, dtype: torch.dtype) -> Callable[..., np.ndarray]:
    """Return a function that embeds a frame's texts by sentence-transformers in `dtype`."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    transformer = Transformer(directory, model_kwargs={"dtype": dtype})
    pooling = Pooling(transformer.get_embedding_dimension(), "mean")
    model = SentenceTransformer(modules=[transformer, pooling, Normalize()], device=device)
    batch_size = BATCH_SIZES[torch.device(device).type][-2]

    def embed(frame: pd.DataFrame) -> np.ndarray:
        return model.encode(frame["text"].tolist(), batch_size=batch_size).astype(np.float32)

    return embed


def measure_idle(texts: Sequence[str], directory: str, device: str) -> dict[str, Any]:
    """Measure the share of a warm run in which the device did nothing, by torch's profiler.

    Returns
    -------
    dict
        ``idle_share`` of the time from the call to the answers; ``idle_share_between`` the first
        and the last operation on the device; ``sampled_idle_share``, by NVML; and the run's
        `RunStats`. Shares are None where nobody tells. On a CPU operations of torch stand for the
        device's.
    """
    frame = pd.DataFrame({"text": list(texts)})
    classifier = classifier_of(directory, device, autocast=True)
    is_gpu = _is_gpu(device)
    kind = torch.profiler.ProfilerActivity.CUDA if is_gpu else torch.profiler.ProfilerActivity.CPU
    classifier(frame)
    with collected_stats() as runs, torch.profiler.profile(activities=[kind]) as profiler:
        started = time.perf_counter()
        classifier(frame)
        elapsed_seconds = time.perf_counter() - started
    wanted = torch.autograd.DeviceType.CUDA if is_gpu else torch.autograd.DeviceType.CPU
    intervals = [
        (event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profiler.events()
        if event.device_type == wanted
    ]
    busy_seconds, span_seconds = covered(intervals)
    stats = _summed(runs)
    sampled_seconds = stats.get("device_sampled_seconds")
    sampled = 1 - stats["device_busy_seconds"] / sampled_seconds if sampled_seconds else None
    return {
        "elapsed_seconds": elapsed_seconds,
        "idle_share": 1 - busy_seconds / elapsed_seconds if intervals else None,
        "idle_share_between": 1 - busy_seconds / span_seconds if intervals else None,
        "sampled_idle_share": sampled,
        "stats": stats,
    }


def covered(intervals: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the time that the intervals cover, and that from the first start to the last end."""
    if not intervals:
        return 0.0, 0.0
    covered_time, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered_time += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered_time, reached - min(start for start, _ in intervals)


def _summed(runs: Sequence[Any]) -> dict[str, Any]:
    sums: dict[str, Any] = {}
    for run in runs:
        add_up(sums, run.as_dict())
    return sums


def measure_memory(texts: Sequence[str], directory: str, device: str) -> dict[str, Any]:
    """Classify a cudf frame beside another one that takes `BALLAST_SHARE` of the GPU.

    Memory is shared out as on the workers of `gpuclassify.get_client`. Nothing of cudf may have
    been in this process before.
    """
    import cudf

    total_bytes = torch.cuda.get_device_properties(device).total_memory
    with shared_out(total_bytes):
        ballast = _ballast(int(total_bytes * BALLAST_SHARE))
        frame = cudf.DataFrame({"text": list(texts)})
        classifier = classifier_of(directory, device, autocast=True)
        with collected_stats() as runs:
            labelled = classifier(frame)
        assert len(labelled) == len(texts)
        ballast_bytes = int(ballast.memory_usage(index=False).sum())
        del ballast, frame, labelled
    stats = _summed(runs)
    return {
        "device_bytes": total_bytes,
        "ballast_bytes": ballast_bytes,
        "is_within_plan": (
            stats["peak_torch_bytes"] <= stats["peak_planned_bytes"] + WORKSPACE_BYTES
        ),
        "stats": stats,
    }


@contextlib.contextmanager
def shared_out(total_bytes: int) -> Iterator[None]:
    """Share the GPU between RMM's pool and torch within the context, as workers for cuDF do."""
    import rmm

    rmm.reinitialize(
        pool_allocator=True,
        initial_pool_size=_aligned(total_bytes * POOL_SHARE),
        maximum_pool_size=_aligned(total_bytes * MAXIMUM_POOL_SHARE),
    )
    torch.cuda.set_per_process_memory_fraction(TORCH_SHARE)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _aligned(size_bytes: float) -> int:
    return int(size_bytes) // RMM_ALIGNMENT_BYTES * RMM_ALIGNMENT_BYTES


def _ballast(size_bytes: int) -> Any:
    import cudf
    import cupy

    rows = size_bytes // (8 * BALLAST_COLUMNS)
    columns: dict[str, Callable[[], Any]] = dict.fromkeys(
        map(str, range(BALLAST_COLUMNS)), lambda: cudf.Series(cupy.zeros(rows, dtype=cupy.int64))
    )
    return cudf.DataFrame({name: make() for name, make in columns.items()})


def table(result: dict[str, Any]) -> str:
    """Return the result as a short table for people to read."""
    gpu = result["gpu"]
    lines = [f"{gpu['name'] or 'no GPU'}, driver {gpu['driver']}"]
    if "corpora" in result:
        lines.append(throughput.table(result))
    else:
        lines += [f"{name} is left out: {why}" for name, why in result["left_out"].items()]
    lines += [f"{name} failed: {why.splitlines()[-1]}" for name, why in result["failures"].items()]
    return "\n".join([*lines, *_rest_lines(result)])


def _rest_lines(result: dict[str, Any]) -> list[str]:
    """Return the lines on findings other than speed."""
    lines = []
    if tokens := result.get("tokens"):
        lines.append(
            f"  the host tokenizes {tokens['documents_per_second']:,.0f} documents, "
            f"{tokens['tokens_per_second']:,.0f} tokens a second at most, on {tokens['threads']} "
            "threads"
        )
    if idle := result.get("idle"):
        whole, between, sampled = (
            "unknown" if idle[name] is None else f"{idle[name]:.1%}"
            for name in ("idle_share", "idle_share_between", "sampled_idle_share")
        )
        lines.append(
            f"  idle after warm-up: {whole} of the call, {between} between first and last "
            f"operation, {sampled} by NVML; {_fed(idle['stats'])}"
        )
    if embeddings := result.get("embeddings"):
        lines += [
            f"  embeddings, {name}: {embeddings['documents'] / times['median_seconds']:,.1f} docs/s"
            for name, times in embeddings["variants"].items()
        ]
    for process, seconds in result.get("start", {}).items():
        steps = ", ".join(f"{name} {spent:.2f}" for name, spent in seconds.items())
        lines.append(f"  seconds of the {process} process: {steps.replace('_', ' ')}")
    if memory := result.get("memory"):
        stats = memory["stats"]
        lines.append(
            f"  beside {memory['ballast_bytes'] / 2**30:.1f} GiB of cudf: torch "
            f"{stats['peak_torch_bytes'] / 2**30:.1f} GiB at most, planned "
            f"{stats['peak_planned_bytes'] / 2**30:.1f}"
            f"{'' if memory['is_within_plan'] else ' (EXCEEDED)'}; "
            f"{stats['out_of_memory']} out-of-memory; {_fed(stats)}"
        )
    return lines


def _fed(stats: dict[str, Any]) -> str:
    """Return a phrase on the host tokenizer's rate in that run, or on the wait for it."""
    rate = stats["tokens"] / stats["tokenize_seconds"]
    fed = f"{stats['peak_tokenizer_threads']} tokenizer threads fed {rate:,.0f} tokens/s"
    return waiting_for_host(stats) or fed


if __name__ == "__main__":
    main()

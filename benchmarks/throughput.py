"""How fast is gpuclassify against a Hugging Face pipeline in ``map_partitions``?

``python -m benchmarks.throughput --help`` lists the options; README.md says what is measured.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedTokenizerFast

from benchmarks import BASELINE, SUBJECT
from benchmarks.engines import PACKAGES
from benchmarks.footprint import Request, measure_footprint
from benchmarks.harness import (
    Run,
    begin,
    finish,
    new_parser,
    parse,
    run_interleaved,
)
from benchmarks.inputs import (
    LENGTHS,
    SHAPES,
    TINY_SIZES,
    Shape,
    shape_of,
    texts_of_lengths,
    write_model,
)
from benchmarks.recipes import PIPELINE_BATCH_SIZE
from benchmarks.ways import (
    TOLERANCES,
    Choice,
    Way,
    choose_ways,
    dtype_names,
    search_batches,
)
from benchmarks.work import forward_operations, matmul_peaks, tokenizer_speed

QUESTION, ENGINES = "throughput", "engines"
ENGINES_RANGE = 0.02
FOOTPRINTS = {"none": (), "main": (BASELINE, SUBJECT), "all": None}


@dataclass(frozen=True)
class Setting:
    """Setting shared by all kinds of lengths; `small_directory` has the model with one layer."""

    options: argparse.Namespace
    shape: Shape
    directory: str
    small_directory: str
    choice: Choice


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    options = parse_options(arguments)
    shape = replace(shape_of(options), layers=options.layers)
    if options.engines:
        # As wide as models are initialised: what wider weights make of rounding says nothing.
        shape = replace(shape, initializer_range=ENGINES_RANGE)
    if options.smoke:
        shape = replace(shape, **TINY_SIZES)
    result = begin(options, **_settings(shape))
    if options.engines:
        there = {each.name for each in distributions()}
        result["versions"] |= {name: version(name) for name in PACKAGES if name in there}
    kinds = ("web", "short") if options.lengths == "both" else (options.lengths,)
    with tempfile.TemporaryDirectory() as folder:
        directory = str(write_model(Path(folder, "model"), shape))
        small = str(write_model(Path(folder, "layer"), replace(shape, layers=1)))
        choice = choose_ways(options, directory)
        setting = Setting(options, shape, directory, small, choice)
        result["settings"]["dtype"] = dtype_names(choice.ways)
        result["left_out"] = choice.left_out
        result["corpora"] = {kind: measure(kind, setting) for kind in kinds}
    return finish(ENGINES if options.engines else QUESTION, result, options, table)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--documents", type=int, default=40, help="of each kind (40)")
    parser.add_argument("--partitions", type=int, default=1, help="of the lazy frame (1)")
    parser.add_argument("--layers", type=int, default=12, help="of the model (12)")
    parser.add_argument("--lengths", choices=(*LENGTHS, "both"), default="both")
    parser.add_argument("--model", choices=tuple(SHAPES), default="bert")
    parser.add_argument("--seed", type=int, default=0, help="of the texts (0)")
    parser.add_argument("--peers", action="store_true", help="time other ways to batch too")
    parser.add_argument(
        "--engines", action="store_true", help="beside OpenVINO and ONNX Runtime (make bench-peers)"
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        metavar="NAME",
        default=[],
        help=f"time only these of them, and {BASELINE!r} and {SUBJECT!r}",
    )
    parser.add_argument(
        "--footprint",
        choices=tuple(FOOTPRINTS),
        default="main",
        help="whose memory and first answers are measured, each in a process of its own: nobody's, "
        f"those of {BASELINE!r} and {SUBJECT!r} (main), or everybody's",
    )
    return parse(parser, arguments)


def measure(
    kind: str,
    setting: Setting,
    failures: dict[str, str] | None = None,
    tell: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Measure one kind of lengths; `tell` takes the findings so far whenever a way has been timed.

    What becomes of a way that fails or differs is up to `failures`, as in `run_interleaved`.
    """
    options, shape = setting.options, setting.shape
    tokenizer = PreTrainedTokenizerFast.from_pretrained(setting.directory)
    texts = texts_of_lengths(LENGTHS[kind].sample(options.documents), tokenizer, options.seed)
    whole = [len(ids) for ids in tokenizer(texts)["input_ids"]]
    lengths = [min(length, shape.max_tokens) for length in whole]
    frame = dd.from_pandas(pd.DataFrame({"text": texts}), npartitions=options.partitions)
    ways, searches = search_batches(
        setting.choice.ways, frame, setting.small_directory, options.device, failures
    )
    operations = forward_operations(lengths, shape)
    corpus = {
        "documents": len(texts),
        "median_tokens_uncut": float(np.median(whole)),
        "cut_documents_share": float(np.mean(np.asarray(whole) > shape.max_tokens)),
        "real_tokens": sum(lengths),
        "pipeline_padded_tokens": _padded_tokens(lengths, options.partitions),
        "operations": operations,
        "searches": searches,
        "tokenizer": tokenizer_speed(
            texts, PreTrainedTokenizerFast.from_pretrained(setting.directory)
        ),
    }
    before = _peaks(ways, setting)

    def found(run: Run, *measured: dict[str, dict[str, float]]) -> dict[str, Any]:
        peaks = _together(*measured)
        timed = [way for way in ways if way.name in run.seconds]
        others = set(run.seconds) - {SUBJECT} if SUBJECT in run.seconds else ()
        return corpus | {
            "peak_operations_per_second": _best(peaks["float32"]),
            "peaks": peaks,
            "largest_difference": run.largest_difference,
            "variants": {
                way.name: _findings(run, way, texts, sum(lengths), operations, peaks)
                for way in timed
            },
            "speed_up": {
                name: run.speed_up(SUBJECT, name) for name in run.seconds if name in others
            },
        }

    run = run_interleaved(
        [way.variant(frame, setting.directory, options.device) for way in ways],
        options.repeats,
        TOLERANCES["float32"],
        failures,
        tell and (lambda run: tell(found(run, before))),
    )
    after = _peaks(ways, setting)
    return found(run, before, after) | {"footprints": _footprints(texts, ways, setting)}


def _peaks(ways: Sequence[Way], setting: Setting) -> dict[str, dict[str, float]]:
    """Measure operations a second by precision and kernel, for every precision that runs."""
    device = setting.options.device
    return {
        dtype: matmul_peaks(setting.shape, device, getattr(torch, dtype))
        for dtype in dict.fromkeys(way.dtype for way in ways)
        if dtype not in ("int8", "float8")  # of which products have other arguments
    }


def _together(*measured: dict[str, dict[str, float]]) -> dict[str, dict[str, list[float]]]:
    return {
        dtype: {kernel: [speeds[dtype][kernel] for speeds in measured] for kernel in kernels}
        for dtype, kernels in measured[0].items()
    }


def _best(kernels: dict[str, list[float]]) -> float:
    return max(max(speeds) for speeds in kernels.values())


def _padded_tokens(lengths: list[int], partitions: int) -> int:
    """Count the pipeline's tokens: batches in arrival order, each as wide as its longest."""
    total = 0
    for partition in np.array_split(np.asarray(lengths), partitions):
        for start in range(0, len(partition), PIPELINE_BATCH_SIZE):
            batch = partition[start : start + PIPELINE_BATCH_SIZE]
            total += len(batch) * int(batch.max())
    return total


def _findings(
    run: Run,
    way: Way,
    texts: Sequence[str],
    tokens: int,
    operations: int,
    peaks: dict[str, dict[str, list[float]]],
) -> dict[str, Any]:
    seconds = run.median_seconds(way.name)
    return {
        **run.times(way.name),
        "dtype": way.dtype,
        "difference": run.differences[way.name],
        "documents_per_second": len(texts) / seconds,
        "real_tokens_per_second": tokens / seconds,
        "share_of_peak": operations / seconds / _best(peaks[way.dtype])
        if way.dtype in peaks
        else None,
    }


def _footprints(texts: list[str], ways: Sequence[Way], setting: Setting) -> dict[str, Any]:
    options = setting.options
    names = FOOTPRINTS[options.footprint]
    return {
        way.name: measure_footprint(
            Request(
                way,
                tuple(texts),
                options.partitions,
                setting.directory,
                options.device,
                options.threads,
            )
        )
        for way in ways
        if names is None or way.name in names
    }


def _settings(shape: Shape) -> dict[str, Any]:
    return {
        "shape": asdict(shape),
        "max_tokens": shape.max_tokens,
        "pipeline_batch_size": PIPELINE_BATCH_SIZE,
        "tolerance": TOLERANCES["float32"],
        "tolerances": TOLERANCES,
        "weights": "random",
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as a short table for people to read."""
    lines, max_tokens = [], result["settings"]["max_tokens"]
    for kind, corpus in result["corpora"].items():
        lines += [
            f"{kind}: {corpus['documents']} documents, {corpus['real_tokens']} real tokens, "
            f"{corpus['cut_documents_share']:.0%} of documents cut at {max_tokens}; matmul peak "
            f"{_peak_text(corpus)}; largest difference {corpus['largest_difference']:.0e}",
            f"{'median s':>44}{'min - max':>16}{'docs/s':>9}{'tokens/s':>10}{'of peak':>9}"
            f"{SUBJECT:>13}",
        ]
        lines += [_variant_line(name, corpus) for name in corpus["variants"]]
        lines.append(_tokenizer_line(corpus))
        lines += [*_search_lines(corpus), *_footprint_lines(corpus)]
    lines += [f"{name} is left out: {reason}" for name, reason in result["left_out"].items()]
    return "\n".join(lines)


def _peak_text(corpus: dict[str, Any]) -> str:
    peaks = {dtype: _best(kernels) / 1e9 for dtype, kernels in corpus["peaks"].items()}
    if len(peaks) == 1:
        return f"{next(iter(peaks.values())):.0f} GFLOP/s"
    return ", ".join(f"{peak:.0f} GFLOP/s in {dtype}" for dtype, peak in peaks.items())


def _variant_line(name: str, corpus: dict[str, Any]) -> str:
    found = corpus["variants"][name]
    spread = f"{min(found['seconds']):.2f} - {max(found['seconds']):.2f}"
    ratio = corpus["speed_up"].get(name, {"ratio_of_medians": 1.0})["ratio_of_medians"]
    share = "" if found["share_of_peak"] is None else f"{found['share_of_peak']:.0%}"
    return (
        f"  {name:32}{found['median_seconds']:10.2f}{spread:>16}"
        f"{found['documents_per_second']:9.2f}{found['real_tokens_per_second']:10.0f}"
        f"{share:>9}{ratio:12.2f}x"
    )


def _tokenizer_line(corpus: dict[str, Any]) -> str:
    found = corpus["tokenizer"]
    padding = corpus["pipeline_padded_tokens"] / corpus["real_tokens"]
    return (
        f"  {BASELINE} runs {padding:.2f} tokens for each real one; the tokenizer alone gives at "
        f"most {found['documents_per_second']:,.0f} docs/s, {found['tokens_per_second']:,.0f} "
        f"tokens/s on {found['threads']} threads"
    )


def _search_lines(corpus: dict[str, Any]) -> list[str]:
    return [
        f"  {name}: batches of {found['batch_size']} were fastest"
        for name, found in corpus["searches"].items()
    ]


def _footprint_lines(corpus: dict[str, Any]) -> list[str]:
    return [
        f"  {name} in a new process: {found['peak_resident_bytes'] / 2**20:.0f} MiB at most, "
        f"{found['first_seconds']:.2f} s to the first {found['first_documents']} answers: "
        f"{found['first_load_seconds']:.2f} to load, {found['first_run_seconds']:.2f} to run"
        for name, found in corpus["footprints"].items()
    ]


if __name__ == "__main__":
    main()

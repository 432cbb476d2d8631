"""A job's plan before it runs: a sample is drawn, its tokens are counted, some of it is run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from gpuclassify.cluster.sizing import shown_cpu_cluster
from gpuclassify.frames import backend_of
from gpuclassify.jobs.estimate.result import ClassifierPlan, Plan
from gpuclassify.jobs.estimate.sample import Sample, sample_files, sample_partitions
from gpuclassify.jobs.estimate.trial import time_stages
from gpuclassify.jobs.quarantine import ROW
from gpuclassify.jobs.sources import FileSource, FrameSource
from gpuclassify.jobs.stages import Function
from gpuclassify.mapping.chain import Chain
from gpuclassify.mapping.text_mapper import TextMapper

TEXT_COPIES = 2  # of a part's text on a worker: in the frame, and as Python's strings
# cudf counts a column's rows, a list column's elements and, with 32-bit offsets, the bytes of a
# column of strings as int32.
COLUMN_LIMIT = 2**31 - 1
NEAR_LIMIT = 0.5  # of it: what is estimated from a sample may be larger


def make_plan(
    reader: Any,
    source: FileSource | FrameSource,
    chain: Chain,
    *,
    sample_rows: int,
    seed: int,
    on_error: str,
    trial_seconds: float | None,
) -> Plan:
    """Draw a sample, count its tokens, and run some of it; writes nothing.

    Parameters
    ----------
    reader : FileReader or dask.dataframe.DataFrame
    source : FileSource or FrameSource
        Of `reader`.
    chain : Chain
        Checked, and prepared if it is to be run.
    sample_rows, seed, on_error, trial_seconds
        See `gpuclassify.jobs.pipeline.Pipeline.plan`.
    """
    if isinstance(source, FileSource):
        sample = sample_files(source.found, sample_rows, seed, on_error)
        stored = [file.size_bytes for file in source.found.files]
    else:
        sample, stored = sample_partitions(reader, sample_rows, seed), [None]
    warnings: list[str] = []
    counts = [_count(*reached, sample) for reached in _reached(chain, sample.frame, warnings)]
    tokens = np.sum([np.zeros(len(sample.frame)), *(own.tokens for own in counts)], axis=0)
    nulls = np.any([tokens < 0, *(own.nulls for own in counts)], axis=0)
    time, left_out = None, sample.left_out
    if trial_seconds is not None:
        meta_dtypes, settings = chain.meta_dtypes(source.meta()), (trial_seconds, seed, on_error)
        time, failed = time_stages(sample, tokens, chain, meta_dtypes, *settings)
        left_out = {**left_out, ROW: left_out.get(ROW, 0) + failed} if failed else left_out
    text_sizes = _text_bytes(sample.frame, chain.text_fields)
    text_bytes, part_bytes = sample.total(text_sizes), sample.largest_part(text_sizes)
    part_rows = sample.largest_part(np.ones(len(text_sizes)))
    lists = [column for own in counts for column in own.lists]
    warnings += limit_warnings(part_bytes, part_rows, lists, is_of_files=sample.is_of_files)
    return Plan(
        rows=sample.rows,
        text_bytes=text_bytes,
        input_bytes=None if None in stored else sum(filter(None, stored)),
        null_share=float(sample.weights[nulls].sum() / sample.weights.sum()),
        parts=source.count,
        mean_part_text_bytes=text_bytes.value / source.count,
        largest_part_text_bytes=part_bytes,
        largest_part_rows=part_rows,
        sample_rows=len(sample.frame),
        sample_draws=len(sample.shares),
        seed=seed,
        left_out=left_out,
        classifiers=tuple(own.plan for own in counts),
        time=time,
        cluster=None if any(own.plan.device != "cpu" for own in counts) else shown_cpu_cluster(),
        worker_bytes=_worker_bytes(counts, part_bytes),
        warnings=tuple(warnings),
    )


@dataclass(frozen=True)
class _Count:
    """What one mapper makes of a sample.

    Attributes
    ----------
    plan : ClassifierPlan
    tokens : ndarray of float64, shape (rows,)
        That it reads of each row of the sample.
    nulls : ndarray of bool, shape (rows,)
        Rows that reach it without a text.
    weights : dict of str to int
        Bytes by file: mappers may share a decoder.
    lists : list of (str, int)
        See `list_columns`.
    """

    plan: ClassifierPlan
    tokens: np.ndarray
    nulls: np.ndarray
    weights: dict[str, int]
    lists: list[tuple[str, int]]


def _reached(
    chain: Chain, frame: Any, warnings: list[str]
) -> Iterator[tuple[TextMapper, Any, np.ndarray]]:
    """Each mapper with the rows that reach it as far as callables decide, and their numbers."""
    rows = np.arange(len(frame))
    for stage in chain.mappers:
        if isinstance(stage, TextMapper):
            yield stage, frame, rows
        elif isinstance(stage, Function):
            reason = "it changes the index of its frame"
            try:
                mapped = stage.map_frame(frame)
                if mapped.index.is_unique and mapped.index.isin(frame.index).all():
                    rows, frame = rows[mapped.index.to_numpy()], mapped.reset_index(drop=True)
                    continue
            except Exception as err:  # whatever code of the user's raises
                reason = f"{type(err).__name__}: {err}"
            warnings.append(
                f"stage {stage.__name__} is left out of the count of tokens, because it cannot be "
                f"run on the sample before the classifiers have ({reason})"
            )


def _count(mapper: TextMapper, frame: Any, rows: np.ndarray, sample: Sample) -> _Count:
    """Tokenize the mapper's texts with the mapper's own tokenizer."""
    most = mapper.options.max_chars
    column = mapper.list_texts(frame, None)
    texts = [text for text in column if text is not None]
    has_text = np.array([text is not None for text in column], dtype=bool)
    lengths = mapper.runner.token_lengths([text[:most] for text in texts])
    ends = np.cumsum(lengths.counts)
    read = np.add.reduceat(lengths.windows, ends - lengths.counts) if texts else lengths.windows
    is_short = np.array([most is not None and len(text) > most for text in texts], dtype=bool)
    tokens, nulls = np.zeros(len(sample.frame)), np.zeros(len(sample.frame), dtype=bool)
    tokens[rows[has_text]], nulls[rows] = read, ~has_text
    device, dtype = mapper.runner.device_and_dtype()
    weights = mapper.model.weights_bytes(dtype)
    plan = ClassifierPlan(
        name=mapper.__name__,
        model=mapper.runner.options.model,
        limit_tokens=lengths.limit,
        limit_chars=most,
        **_shape_of(
            lengths.whole, is_short | (read < lengths.whole), sample.weights[rows][has_text]
        ),
        tokens=sample.total(tokens),
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        weights_bytes=sum(weights.values()) or None,
        batch_bytes=mapper.runner.batch_bytes(),
    )
    return _Count(plan, tokens, nulls, weights, list_columns(mapper))


def _shape_of(lengths: np.ndarray, is_cut: np.ndarray, weights: np.ndarray) -> dict[str, Any]:
    """Mean, quantiles, histogram and the share that is cut, of texts that stand for others."""
    total = weights.sum()
    if not total:
        names = ("mean_tokens", "median_tokens", "p95_tokens", "most_tokens", "truncated_share")
        return {**dict.fromkeys(names, 0), "histogram": ()}
    order = np.argsort(lengths, kind="stable")
    ascending, passed = lengths[order], np.cumsum(weights[order]) / total
    bits = np.frexp(lengths)[1]  # of a number from 2**(b-1) to 2**b - 1
    bins = range(int(bits.min()), int(bits.max()) + 1)
    shares = [float(weights[bits == b].sum() / total) for b in bins]
    return {
        "mean_tokens": float((lengths * weights).sum() / total),
        "median_tokens": int(ascending[np.searchsorted(passed, 0.5)]),
        "p95_tokens": int(ascending[np.searchsorted(passed, 0.95)]),
        "most_tokens": int(ascending[-1]),
        "histogram": tuple((2**b // 2, 2**b, own) for b, own in zip(bins, shares, strict=True)),
        "truncated_share": float(weights[is_cut].sum() / total),
    }


def _text_bytes(frame: Any, columns: tuple[str, ...]) -> np.ndarray:
    """Bytes of each row's texts in UTF-8, float64 (rows,)."""
    found = np.zeros(len(frame))
    for name in columns:
        if name in frame.columns:
            texts = backend_of(frame).texts(frame, name, None)
            found += [len((text or "").encode("utf-8", "surrogatepass")) for text in texts]
    return found


def _worker_bytes(counts: Sequence[_Count], part_bytes: float) -> int | None:
    """All weights, which stay side by side where they fit, one batch, and one part's text."""
    batches = [own.plan.batch_bytes for own in counts]
    weights = {file: size for own in counts for file, size in own.weights.items()}
    if None in batches or not all(own.weights for own in counts):
        return None
    batch = max(filter(None, batches), default=0)
    return int(sum(weights.values()) + batch + TEXT_COPIES * part_bytes)


def list_columns(mapper: TextMapper) -> list[tuple[str, int]]:
    """Output columns of lists of numbers, and how many numbers a row of each has."""
    return [
        (field.name, head.list_size)
        for head in mapper.heads
        for field in head.fields()
        if pa.types.is_list(field.type) and pa.types.is_floating(field.type.value_type)
    ]


def limit_warnings(
    text_bytes: float,
    rows: float,
    lists: Iterable[tuple[str, int]],
    *,
    is_of_files: bool,
    limit: int = COLUMN_LIMIT,
) -> Iterator[str]:
    """Sentences about columns of the largest part that come near what a column of cudf can hold.

    Parameters
    ----------
    text_bytes, rows : float
        Of the largest part.
    lists : iterable of (str, int)
        See `list_columns`.
    is_of_files : bool
        Else parts are partitions of a Dask frame.
    limit : int
        Most elements of a column, or bytes of one of strings.
    """
    cure = (
        "make parts smaller with part_bytes=256000000; where one row group or one "
        "compressed file is larger than that, write the input in smaller ones"
    )
    if not is_of_files:
        cure = "repartition the frame, such as with ddf.repartition(partition_size='256MB')"
    sizes = [("its text", text_bytes, "bytes")]
    sizes += [(f"its column {name!r}", rows * count, "numbers") for name, count in lists]
    for what, size, unit in sizes:
        if size > NEAR_LIMIT * limit:
            yield (
                f"the largest part is too large or near to it: {what} has about {size:,.0f} "
                f"{unit}, and a column of cudf holds at most {limit:,}: {cure}"
            )

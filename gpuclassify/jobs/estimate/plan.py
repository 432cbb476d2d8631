"""A job's plan before it runs: rows, tokens, time and memory, as far as a sample of rows tells."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from dask.utils import format_bytes

from gpuclassify.cluster.sizing import shown_cpu_cluster
from gpuclassify.frames import backend_of
from gpuclassify.jobs.estimate.sample import Estimate, Sample, sample_files, sample_partitions
from gpuclassify.jobs.quarantine import ROW, isolate_bad_rows
from gpuclassify.jobs.sources import FileSource, FrameSource
from gpuclassify.jobs.stages import Function
from gpuclassify.mapping.chain import Chain
from gpuclassify.mapping.text_mapper import TextMapper
from gpuclassify.pages.readable import readable_time, short_number
from gpuclassify.pages.tables import html_table, text_table

BAR_WIDTH = 40  # characters
# cudf counts a column's rows, a list column's elements and, with 32-bit offsets, the bytes of a
# column of strings as int32.
COLUMN_LIMIT = 2**31 - 1
NEAR_LIMIT = 0.5  # of it: what is estimated from a sample may be larger
FIRST_ROWS = 4  # of the warm-up, and of the slice that says how large the others may be
SLICES = 4


@dataclass(frozen=True, repr=False)
class ClassifierPlan:
    """What one classifier or embedder will see and need."""

    name: str
    model: str
    limit_tokens: int | None  # of a text, or of a window of it
    limit_chars: int | None
    mean_tokens: float  # of whole texts, before they are cut, as are the next four
    median_tokens: int
    p95_tokens: int
    most_tokens: int
    histogram: tuple[tuple[int, int, float], ...]  # tokens from and below, share of the texts
    truncated_share: float  # of the texts, those that are not read to their end
    tokens: Estimate  # that the model will read in the whole input
    device: str
    dtype: str
    weights_bytes: int | None  # None where headers of weights or sizes of the network are unknown
    batch_bytes: int | None

    def __repr__(self) -> str:
        tokens = short_number(self.tokens.value)
        return f"ClassifierPlan({self.name}, {self.model!r}, {tokens} tokens to read)"

    def rows(self) -> Iterator[tuple[str, str]]:
        """What people read of it, line by line: a name or nothing, and a text."""
        yield self.name, self.model
        yield (
            "",
            f"a text has {self.mean_tokens:,.0f} tokens on average, median "
            f"{self.median_tokens:,}, 95% have at most {self.p95_tokens:,}, the longest "
            f"{self.most_tokens:,}",
        )
        largest = max((share for _, _, share in self.histogram), default=0.0)
        for low, high, share in self.histogram:
            bar = "█" * round(BAR_WIDTH * share / largest) or ("▏" if share else "")
            yield "", f"{low:>8,} to {high - 1:<8,} {share:>6.1%} {bar}".rstrip()
        limits = {"tokens": self.limit_tokens, "characters": self.limit_chars}
        limit = ", ".join(f"{most:,} {unit}" for unit, most in limits.items() if most is not None)
        yield (
            "",
            f"{self.truncated_share:.1%} of the texts are not read to their end "
            f"({f'limit {limit}' if limit else 'no limit'})",
        )
        yield "", f"{short_number(self.tokens.value)} tokens to read{_range(self.tokens)}"


@dataclass(frozen=True)
class TimePlan:
    """How long the stages will take on this machine, in one process."""

    seconds: Estimate  # without reading, writing and loading
    load_seconds: float  # of the models, and of a first run
    rows_timed: int
    units_per_second: float
    unit: str  # "tokens", or "rows" where nothing counts tokens
    threads: int  # of torch


@dataclass(frozen=True, repr=False)
class Plan:
    """What a job will be like, as far as a sample shows."""

    rows: Estimate  # exact for Parquet files
    text_bytes: Estimate  # of the columns that classifiers read, in UTF-8
    input_bytes: int | None  # of the files as they are stored
    null_share: float  # of the rows, those whose text is null
    parts: int
    largest_part_text_bytes: float
    largest_part_rows: float
    sample_rows: int
    left_out: dict[str, int]  # files, lines and rows of the sample that would go to quarantine
    classifiers: tuple[ClassifierPlan, ...]
    time: TimePlan | None
    cluster: str | None  # workers that are started here by default; None where models run on a GPU
    worker_bytes: int | None  # weights, the largest batch, the largest part's text; None as above
    warnings: tuple[str, ...]

    def __repr__(self) -> str:
        names = ", ".join(own.name for own in self.classifiers)
        time = "" if self.time is None else f", about {readable_time(self.time.seconds.value)}"
        return f"Plan({short_number(self.rows.value)} rows in {self.parts:,} parts: {names}{time})"

    def __str__(self) -> str:
        return text_table(self._rows())

    def _repr_html_(self) -> str:
        return html_table("Plan", self._rows())

    def as_dict(self) -> dict[str, Any]:
        """Plain values by name, for JSON."""
        return asdict(self)

    def _rows(self) -> Iterator[tuple[str, str]]:
        stored = "" if self.input_bytes is None else f", {_size(self.input_bytes)} in files"
        nulls = f", {self.null_share:.1%} of the rows without text" if self.null_share else ""
        about = "" if self.rows.low == self.rows.high is not None else "about "
        yield (
            "input",
            f"{about}{self.rows.value:,.0f} rows{_range(self.rows)}{stored}, "
            f"{_size(self.text_bytes.value)} of text{nulls}",
        )
        left_out = ", ".join(_counted(count, kind) for kind, count in self.left_out.items())
        broken = f"; to be left out, as far as is known: {left_out}" if left_out else ""
        yield "sample", f"{self.sample_rows:,} rows{broken}"
        yield (
            "parts",
            f"{self.parts:,}; the largest has {_size(self.largest_part_text_bytes)} of text in "
            f"{self.largest_part_rows:,.0f} rows",
        )
        for own in self.classifiers:
            yield "", ""
            yield from own.rows()
        yield "", ""
        if self.time is not None:
            yield "time", self._duration(self.time)
        if self.cluster is not None:
            yield "cluster", f"{self.cluster}, by default on this machine"
        yield "memory", self._memory()
        for warning in self.warnings:
            yield "WARNING", warning

    def _duration(self, time: TimePlan) -> str:
        devices = ", ".join(dict.fromkeys(own.device for own in self.classifiers)) or "cpu"
        low, high, spread = time.seconds.low, time.seconds.high, ""
        if low is not None and high is not None:
            spread = f" ({readable_time(low)} to {readable_time(high)})"
        return (
            f"about {readable_time(time.seconds.value)}{spread} on this machine, one process "
            f"({devices}, {_counted(time.threads, 'torch thread')}), for the models' work alone: "
            f"{time.units_per_second:,.0f} {time.unit}/s over {time.rows_timed:,} rows of the "
            f"sample, and {time.load_seconds:.1f} s to load and warm up"
        )

    def _memory(self) -> str:
        weights = ", ".join(
            f"{own.name}'s weights {_size(own.weights_bytes)} ({own.dtype} on {own.device})"
            for own in self.classifiers
            if own.weights_bytes is not None
        )
        if self.worker_bytes is None:
            known = f"; known are {weights}" if weights else ""
            return f"of a worker unknown, because sizes of a network or its weights are{known}"
        largest = max((own.batch_bytes or 0 for own in self.classifiers), default=0)
        return (
            f"about {_size(self.worker_bytes)} a worker beside Python and torch: {weights}; a "
            f"full batch {_size(largest)}; and the largest part's text, twice"
        )


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _range(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return " (estimated from its beginning alone)"
    if estimate.low == estimate.high:
        return ""
    return f" ({short_number(estimate.low)} to {short_number(estimate.high)})"


def _size(size_bytes: float) -> str:
    return format_bytes(int(size_bytes))


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
    """Draw a sample, count its tokens, and run some of it; see `Pipeline.plan`.

    The `chain` of stages is checked, and prepared if it is to be run.
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
    timed, left_out = None, Counter(sample.left_out)
    if trial_seconds is not None:
        meta_dtypes = chain.meta_dtypes(source.meta())
        timed, failed = time_stages(
            sample, tokens, chain, meta_dtypes, seconds=trial_seconds, seed=seed, on_error=on_error
        )
        left_out += Counter({ROW: failed})
    text_sizes = np.zeros(len(sample.frame))  # in UTF-8
    for name in {*chain.text_fields} & {*sample.frame.columns}:
        texts = backend_of(sample.frame).texts(sample.frame, name, None)
        text_sizes += [len((text or "").encode("utf-8", "surrogatepass")) for text in texts]
    part_bytes = sample.largest_part(text_sizes)
    part_rows = sample.largest_part(np.ones(len(text_sizes)))
    lists = [column for mapper in chain.mappers for column in list_columns(mapper)]
    # All weights, which stay side by side where they fit, one batch, and one part's text, which
    # is in the frame and there as Python's strings.
    batches = [own.plan.batch_bytes for own in counts]
    weights = {file: size for own in counts for file, size in own.weights.items()}
    memory = sum(weights.values()) + max(filter(None, batches), default=0) + 2 * part_bytes
    is_known = None not in batches and all(own.weights for own in counts)
    warnings += limit_warnings(part_bytes, part_rows, lists, is_of_files=sample.is_of_files)
    return Plan(
        rows=sample.rows,
        text_bytes=sample.total(text_sizes),
        input_bytes=None if None in stored else sum(filter(None, stored)),
        null_share=float(sample.weights[nulls].sum() / sample.weights.sum()),
        parts=source.count,
        largest_part_text_bytes=part_bytes,
        largest_part_rows=part_rows,
        sample_rows=len(sample.frame),
        left_out=dict(left_out),
        classifiers=tuple(own.plan for own in counts),
        time=timed,
        cluster=None if any(own.plan.device != "cpu" for own in counts) else shown_cpu_cluster(),
        worker_bytes=int(memory) if is_known else None,
        warnings=tuple(warnings),
    )


class _Count(NamedTuple):
    """What one mapper makes of a sample."""

    plan: ClassifierPlan
    tokens: np.ndarray  # that it reads of each row
    nulls: np.ndarray  # rows that reach it without a text
    weights: dict[str, int]  # bytes by file: mappers may share a decoder


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
    is_cut = is_short | (read < lengths.whole)
    plan = ClassifierPlan(
        name=mapper.__name__,
        model=mapper.runner.options.model,
        limit_tokens=lengths.limit,
        limit_chars=most,
        **_shape_of(lengths.whole, is_cut, sample.weights[rows][has_text]),
        tokens=sample.total(tokens),
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        weights_bytes=sum(weights.values()) or None,
        batch_bytes=mapper.runner.batch_bytes(),
    )
    return _Count(plan, tokens, nulls, weights)


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


def list_columns(mapper: Any) -> list[tuple[str, int]]:
    """Output columns of lists of numbers, and how many numbers a row of each has."""
    return [
        (field.name, head.list_size)
        for head in getattr(mapper, "heads", ())
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
    """Sentences about columns of the largest part that come near what a column of cudf can hold."""
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


def time_stages(
    sample: Sample,
    tokens: np.ndarray,
    chain: Chain,
    meta_dtypes: Any,
    *,
    seconds: float,
    seed: int,
    on_error: str,
) -> tuple[TimePlan, int]:
    """How long the stages will take by the tokens of each row, and how many rows fail."""
    import torch

    from gpuclassify.jobs.task import row_errors

    failed: set[Any] = set()

    def run(rows: Any) -> None:
        def map_some(start: int, stop: int) -> Any:
            return chain.map_frame(rows.iloc[start:stop], meta_dtypes)

        errors = row_errors() if on_error == "quarantine" else ()
        for row, found in isolate_bad_rows(map_some, 0, len(rows), errors):
            if isinstance(found, Exception):
                failed.add(rows.index[row])

    load_seconds, slices = time_slices(chain.mappers, sample.frame, run, seconds, seed)
    work = tokens if tokens.any() else np.ones(len(tokens))
    done = [work[rows].sum() for rows, _ in slices]
    rate = float(sum(done) / sum(spent for _, spent in slices))
    rates = [own / spent for own, (_, spent) in zip(done, slices, strict=True)]
    total, low, high = sample.total(work), None, None
    if total.low is not None and total.high is not None and len(rates) > 1 and min(rates):
        low, high = float(total.low / max(rates)), float(total.high / min(rates))
    plan = TimePlan(
        seconds=Estimate(total.value / rate if rate else 0.0, low, high),
        load_seconds=load_seconds,
        rows_timed=sum(len(rows) for rows, _ in slices),
        units_per_second=rate,
        unit="tokens" if tokens.any() else "rows",
        threads=torch.get_num_threads(),
    )
    return plan, len(failed)


def time_slices(
    mappers: Iterable[Any], frame: Any, run: Callable[[Any], Any], seconds: float, seed: int
) -> tuple[float, list[tuple[np.ndarray, float]]]:
    """Seconds to load and warm up, and slices of random rows with the seconds that each took.

    Models that this loads are dropped at its end: it may be the client's process, whose GPU a
    worker needs. A slice that has begun when `seconds` are over is finished.
    """
    from gpuclassify.inference.residency import MODELS

    order = np.random.default_rng(seed).permutation(len(frame))
    first, before = order[:FIRST_ROWS], set(MODELS.keys())

    def time_rows(rows: np.ndarray) -> float:
        began = time.perf_counter()
        run(frame.iloc[rows])
        return time.perf_counter() - began

    try:
        began = time.perf_counter()
        for mapper in mappers:
            if isinstance(mapper, TextMapper):
                mapper.setup()
        time_rows(first)
        load_seconds = time.perf_counter() - began
        spent = time_rows(first)
        slices = [(first, spent)]
        # Slices of as many rows as fill the time, as far as there are so many.
        most = max(FIRST_ROWS, int(FIRST_ROWS * seconds / SLICES / spent))
        count = max(1, min(most, len(order) // SLICES))
        for start in range(0, min(len(order), SLICES * count), count):
            if spent < seconds:
                rows = order[start : start + count]
                slices.append((rows, time_rows(rows)))
                spent += slices[-1][1]
    finally:
        MODELS.evict(lambda key: key not in before)
    return load_seconds, slices[1:] or slices

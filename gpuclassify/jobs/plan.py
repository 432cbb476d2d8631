"""Plan of a job before it runs: rows, tokens, time and memory, estimated from a sample."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from dask.utils import format_bytes

from gpuclassify.frames import Frame, backend_of, cut_text
from gpuclassify.jobs.input.sample import Sample, sample_files, sample_partitions
from gpuclassify.jobs.input.sources import FileSource, Source
from gpuclassify.jobs.ledger.quarantine import isolate_bad_rows
from gpuclassify.jobs.report.summary import textless_warnings
from gpuclassify.jobs.stages import Function
from gpuclassify.jobs.task import row_errors
from gpuclassify.mapping.chain import Chain
from gpuclassify.mapping.route import Route
from gpuclassify.mapping.text_mapper import TextMapper
from gpuclassify.pages import counted_kinds, html_table, readable_time, short_number, text_table
from gpuclassify.workers.machine import CpuLoad, LoadMeter
from gpuclassify.workers.run_context import add_up, advice, collected_stats, shared_layers

FIRST_ROWS = 4  # rows of the warm-up, and of the run that predicts how many rows can be timed
RUNS = 4  # timed runs, whose speeds show how much the time varies


@dataclass(frozen=True)
class ClassifierPlan:
    """Estimates of the texts and tokens that one classifier or embedder reads, and its memory."""

    name: str
    model: str
    limit_tokens: int | None  # per text or window
    limit_chars: int | None
    mean_tokens: float  # per text before it is cut, as in the next three fields
    median_tokens: int
    p95_tokens: int
    most_tokens: int
    truncated_share: float  # fraction of texts that are not read to their end
    tokens: float  # tokens to read in the whole input
    device: str
    dtype: str
    weights_bytes: int | None  # None if headers of weights or sizes of the network are unknown
    batch_bytes: int | None
    passes_per_text: int = 1  # number of times that the model reads a text

    def lines(self) -> Iterator[str]:
        """Yield lines of text for people, to display below the classifier's name."""
        yield (
            f"a text has {self.mean_tokens:,.0f} tokens on average, median {self.median_tokens:,}, "
            f"95% have at most {self.p95_tokens:,}, the longest {self.most_tokens:,}"
        )
        limits = ((self.limit_tokens, "tokens"), (self.limit_chars, "characters"))
        limit = ", ".join(f"{most:,} {unit}" for most, unit in limits if most is not None)
        limit = f"limit {limit}" if limit else "no limit"
        yield f"{self.truncated_share:.1%} of the texts are not read to their end ({limit})"
        sizes = {"weights": self.weights_bytes, "a full batch": self.batch_bytes}
        known = [f"{what} {format_bytes(size)}" for what, size in sizes.items() if size is not None]
        if self.passes_per_text > 1:
            yield f"every text is read {self.passes_per_text:,} times, once with each label"
        yield f"about {short_number(self.tokens)} tokens to read"
        yield f"{', '.join([*known, self.dtype])} on {self.device}"


@dataclass(frozen=True)
class TimePlan:
    """Estimated time to run a job's stages, such as classifiers, on the whole input.

    It is measured on some rows of a sample, in one process on this machine. Reading and writing
    files and loading models are not included.
    """

    seconds: float  # under the load of the trial
    fastest_seconds: float  # if the machine is idle, at the speed of the trial's fastest run
    slowest_seconds: float  # under the load average, or at the speed of the slowest run
    rows_timed: int
    units_per_second: float
    unit: str  # "tokens", or "rows" if nothing counts tokens
    notes: tuple[str, ...]  # layers that models share, and advice on speed
    load: CpuLoad | None = None  # None if a model runs on another device than the CPU

    def __str__(self) -> str:
        times = (self.seconds, self.fastest_seconds, self.slowest_seconds)
        about, least, most = map(readable_time, times)
        return f"about {about}" + f", between {least} and {most}," * (least != most)


@dataclass(frozen=True, repr=False)
class Plan:
    """Estimates of a job's rows, tokens, time and memory, from a sample; ``print`` shows them."""

    rows: float
    is_exact: bool  # whether `rows` is known, as from Parquet files
    text_bytes: float  # UTF-8 bytes of the columns that classifiers read
    input_bytes: int | None  # stored bytes of the files
    null_share: float  # fraction of rows whose text is null
    parts: int
    largest_part_text_bytes: float
    largest_part_rows: float
    sample_rows: int
    left_out: dict[str, int]  # files, lines and rows of the sample that would go to quarantine
    classifiers: tuple[ClassifierPlan, ...]
    time: TimePlan | None
    worker_bytes: int | None  # weights, the largest batch, and the largest part's text twice
    warnings: tuple[str, ...]

    def __repr__(self) -> str:
        names = ", ".join(classifier.name for classifier in self.classifiers)
        time = "" if self.time is None else f", {self.time}".rstrip(",")
        return f"Plan({short_number(self.rows)} rows in {self.parts:,} parts: {names}{time})"

    def __str__(self) -> str:
        return text_table(self._rows())

    def _repr_html_(self) -> str:
        return html_table("Plan", self._rows())

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, as values for JSON; classifiers and time become dicts."""
        return asdict(self)

    def _rows(self) -> Iterator[tuple[str, str]]:
        rows = f"{'' if self.is_exact else 'about '}{self.rows:,.0f} rows"
        stored = "" if self.input_bytes is None else f", {format_bytes(self.input_bytes)} in files"
        nulls = f", {self.null_share:.1%} of the rows without text" if self.null_share else ""
        yield "input", f"{rows}{stored}, {format_bytes(int(self.text_bytes))} of text{nulls}"
        left_out = f"; left out: {counted_kinds(self.left_out)}" if self.left_out else ""
        yield "sample", f"{self.sample_rows:,} rows from all over the input{left_out}"
        largest = format_bytes(int(self.largest_part_text_bytes))
        rows = f"{self.largest_part_rows:,.0f} rows"
        yield "parts", f"{self.parts:,}; the largest has {largest} of text in {rows}"
        for classifier in self.classifiers:
            yield from (("", ""), (classifier.name, classifier.model))
            yield from (("", line) for line in classifier.lines())
        yield "", ""
        if (timed := self.time) is not None:
            work = f"{timed.units_per_second:,.0f} {timed.unit}/s over {timed.rows_timed:,} rows"
            yield "time", f"{timed} of the models' work in one process here ({work})"
            if (load := timed.load) is not None:
                used = f"{load.other_cores:.1f} of {load.cores} cores"
                before = f"the load average before was {load.load_average:.1f}"
                yield "load", f"other processes used {used} meanwhile; {before}"
            yield from (("advice", note) for note in timed.notes)
        most = "unknown" if self.worker_bytes is None else format_bytes(self.worker_bytes)
        yield "memory", f"a worker: {most}, next to Python and torch (weights, a batch, a part)"
        yield from (("WARNING", warning) for warning in self.warnings)


def make_plan(
    source: Source,
    chain: Chain,
    on_error: str,
    sample_rows: int,
    seed: int,
    trial_seconds: float | None,
) -> Plan:
    """Plan a job: draw a sample of rows, count its tokens, and run the stages on some of it.

    The `chain` of stages is checked already, and prepared unless `trial_seconds` is None.
    `Pipeline` and `Pipeline.plan` describe the other arguments. Raises UnreadableInputError if the
    input has no rows.
    """
    stored: list[int | None] = [None]
    if isinstance(source, FileSource):
        fields = chain.main_text_fields
        sample, share = sample_files(source.input, sample_rows, seed, on_error, fields)
        stored = [file.size_bytes for file in source.input.files]
    else:
        sample, share = sample_partitions(source.partitions(), sample_rows, seed)
    frame, warnings = sample.frame, textless_warnings(sample.textless)
    tokens, nulls = np.zeros(len(frame)), np.zeros(len(frame), dtype=bool)
    plans: list[ClassifierPlan] = []
    weights: dict[str, int] = {}  # bytes by file, because mappers may share a decoder
    is_known = True
    for stage in chain.mappers:
        if isinstance(stage, Function):  # it may drop rows
            frame = _rows_left(stage, frame, warnings)
        for name in {*stage.read_fields} - {*stage.text_fields} - {*frame.columns}:
            warnings.append(
                f"column {name!r} is written by another stage, so that the tokens of every model "
                f"of {stage.__name__} are counted for all rows, and not for its rows alone"
            )
        pairs = [(mapper, frame) for mapper in stage.text_mappers()]
        for mapper, rows in stage.parts_of(frame) if isinstance(stage, Route) else pairs:
            plan, sizes = _count(mapper, rows, sample, tokens, nulls)
            is_known &= bool(sizes) and plan.batch_bytes is not None
            weights.update(sizes)
            plans.append(plan)
    timed = None
    if trial_seconds is not None:
        dtypes = chain.meta_dtypes(source.meta)
        meter = LoadMeter() if all(plan.device == "cpu" for plan in plans) else None
        timed = _time(chain, dtypes, sample, tokens, trial_seconds, on_error, meter)
    lengths = np.zeros(len(sample.frame))  # UTF-8 bytes of the texts
    for name in {*chain.text_fields} & {*sample.frame.columns}:
        texts = backend_of(sample.frame).texts(sample.frame, name, None)
        lengths += [len((text or "").encode("utf-8", "surrogatepass")) for text in texts]
    text_bytes = sample.rows * float(lengths.mean())
    # All weights, which stay loaded together if they fit, one batch, and one part's text, which
    # exists in the frame and as Python strings.
    batch_bytes = max((plan.batch_bytes or 0 for plan in plans), default=0)
    worker_bytes = int(sum(weights.values()) + batch_bytes + 2 * text_bytes * share)
    return Plan(
        rows=sample.rows,
        is_exact=sample.is_exact,
        text_bytes=text_bytes,
        input_bytes=None if None in stored else sum(filter(None, stored)),
        null_share=float(nulls.mean()),
        parts=source.count,
        largest_part_text_bytes=text_bytes * share,
        largest_part_rows=sample.rows * share,
        sample_rows=len(sample.frame),
        left_out=dict(sample.left_out),
        classifiers=tuple(plans),
        time=timed,
        worker_bytes=worker_bytes if is_known else None,
        warnings=tuple(warnings),
    )


def _rows_left(stage: Function, frame: Frame, warnings: list[str]) -> Frame:
    """Return the function's result for `frame`, or `frame`, with a new warning, if that fails."""
    try:
        mapped = stage.map_frame(frame)
        if mapped.index.is_unique and mapped.index.isin(frame.index).all():
            return mapped
        reason = "it changes the index of its frame"
    except Exception as err:  # user code may raise any error
        reason = f"{type(err).__name__}: {err}"
    warnings.append(
        f"stage {stage.__name__} is left out of the count of tokens, because it cannot be run on "
        f"the sample before the classifiers have ({reason})"
    )
    return frame


def _count(
    mapper: TextMapper, frame: Frame, sample: Sample, tokens: np.ndarray, nulls: np.ndarray
) -> tuple[ClassifierPlan, dict[str, int]]:
    """Tokenize `frame`'s texts; return the mapper's plan, and the bytes of its weights by file.

    The index of `frame` has the positions of its rows in `sample`. At these positions, adds the
    number of tokens that the model reads to `tokens`, and sets `nulls` to True if a row has no
    text. The bytes are {} if the sizes of weights are unknown.
    """
    most, rows = mapper.options.max_chars, frame.index.to_numpy()
    column = mapper.list_texts(frame, None)
    texts = [text for text in column if text is not None]
    has_text = np.array([text is not None for text in column], dtype=bool)
    lengths = mapper.runner.token_lengths([cut_text(text, most) for text in texts])
    starts = np.cumsum(lengths.counts) - lengths.counts
    read = np.add.reduceat(lengths.windows, starts) if texts else lengths.windows
    pairs = zip(texts, read < lengths.whole, strict=True)
    is_cut = [bool(is_short) or text != cut_text(text, most) for text, is_short in pairs]
    tokens[rows[has_text]] += read
    nulls[rows[~has_text]] = True
    passes = mapper.runner.options.passes_per_text
    whole = lengths.whole // passes if texts else np.zeros(1, dtype=int)
    median, p95, longest = np.quantile(whole, [0.5, 0.95, 1], method="inverted_cdf").tolist()
    device, dtype = mapper.runner.device_and_dtype()
    weights = mapper.model.weights_bytes(dtype)
    plan = ClassifierPlan(
        name=mapper.__name__,
        model=mapper.runner.options.model,
        limit_tokens=lengths.limit,
        limit_chars=most,
        mean_tokens=float(whole.mean()),
        median_tokens=median,
        p95_tokens=p95,
        most_tokens=longest,
        truncated_share=sum(is_cut) / max(1, len(texts)),
        tokens=sample.rows / len(sample.frame) * float(read.sum()),
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        weights_bytes=sum(weights.values()) or None,
        batch_bytes=mapper.runner.batch_bytes(),
        passes_per_text=passes,
    )
    return plan, weights


def _time(
    chain: Chain,
    dtypes: object,
    sample: Sample,
    tokens: np.ndarray,
    seconds: float,
    on_error: str,
    meter: LoadMeter | None,
) -> TimePlan:
    """Time the stages on rows of the sample for about `seconds`, in several runs.

    A row's work is its number in `tokens`, or 1 if all are 0. `meter` measures the CPU load by
    other processes; None if a model runs on a GPU. Models that this loads are removed from memory.
    """
    from gpuclassify.inference.residency import MODELS

    order = np.random.default_rng(0).permutation(len(tokens))
    errors = row_errors() if on_error == "quarantine" else ()
    work = tokens[order] if tokens.any() else np.ones(len(order))
    done, before = np.cumsum(work), set(MODELS.keys())
    totals: dict[str, Any] = {}

    def time_rows(first: int, end: int) -> float:
        def run(start: int, stop: int) -> Frame:
            return chain.map_frame(sample.frame.iloc[order[start:stop]], dtypes)

        began = time.perf_counter()
        with collected_stats() as collected:
            list(isolate_bad_rows(run, first, end, errors))
        for stats in collected:
            add_up(totals, stats.as_dict())
        return time.perf_counter() - began

    try:
        first = min(FIRST_ROWS, len(order))
        for mapper in chain.text_mappers():
            mapper.setup()  # the first rows may have none for this model
        time_rows(0, first)
        possible = done[first - 1] * seconds / time_rows(0, first)
        count = max(first, int(np.searchsorted(done, possible, side="right")))
        parts = max(1, min(RUNS, count // FIRST_ROWS))
        bounds = pairwise(count * part // parts for part in range(parts + 1))
        runs = [(float(work[start:end].sum()), time_rows(start, end)) for start, end in bounds]
    finally:
        # This may be the client's process, and a worker needs its GPU.
        MODELS.evict(lambda key: key not in before)
    whole, load = sample.rows * float(work.mean()), meter.read() if meter else None
    about, fastest, slowest = time_range(whole, runs, load)
    return TimePlan(
        seconds=about,
        fastest_seconds=fastest,
        slowest_seconds=slowest,
        rows_timed=count,
        units_per_second=whole / about if about else 0.0,
        unit="tokens" if tokens.any() else "rows",
        notes=(*filter(None, [shared_layers(totals)]), *advice(totals)),
        load=load,
    )


def time_range(
    whole: float, runs: list[tuple[float, float]], load: CpuLoad | None
) -> tuple[float, float, float]:
    """Estimate the seconds for `whole` units of work: about, at least, and at most.

    A run is a pair of units of work, such as tokens, and seconds. `load` is the machine's load
    during the runs; None counts as idle. The least is for an idle machine, at the speed of the
    fastest run. All are 0 if the runs have no units of work.
    """
    if not (units := sum(own for own, _ in runs)):
        return 0.0, 0.0, 0.0
    measured = whole / units * sum(spent for _, spent in runs)
    each = [whole / own * spent for own, spent in runs if own]
    idle_share, slowdown = (load.idle_share, load.slowdown) if load else (1.0, 1.0)
    busy = measured * idle_share * slowdown
    return measured, min(each) * idle_share, max(*each, busy)

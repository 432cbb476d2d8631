"""What a job will be like: what `gpuclassify plan` shows, and `Pipeline.plan` returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from dask.utils import format_bytes

from gpuclassify.jobs.estimate.sample import Estimate
from gpuclassify.pages.readable import readable_time, short_number
from gpuclassify.pages.tables import html_table, text_table

BAR_WIDTH = 40  # characters


@dataclass(frozen=True, repr=False)
class ClassifierPlan:
    """What one classifier or embedder will see and need.

    Attributes
    ----------
    name, model : str
    limit_tokens : int, optional
        Most tokens of a text, or of a window of it.
    limit_chars : int, optional
        Most characters of a text.
    mean_tokens : float
    median_tokens, p95_tokens, most_tokens : int
        Of whole texts, before they are cut to `limit_tokens`.
    histogram : tuple of (int, int, float)
        Tokens from and below, and the share of the texts.
    truncated_share : float
        Of the texts, those that the model does not read to their end.
    tokens : Estimate
        That the model will read in the whole input.
    device, dtype : str
        What it would run on here.
    weights_bytes, batch_bytes : int, optional
        Memory of the weights, and about that of the largest batch; None where headers of weights
        or sizes of the network are unknown.
    """

    name: str
    model: str
    limit_tokens: int | None
    limit_chars: int | None
    mean_tokens: float
    median_tokens: int
    p95_tokens: int
    most_tokens: int
    histogram: tuple[tuple[int, int, float], ...]
    truncated_share: float
    tokens: Estimate
    device: str
    dtype: str
    weights_bytes: int | None
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
            line = f"{low:>8,} to {high - 1:<8,} {share:>6.1%} {bar}".rstrip()
            yield "", line
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
    """How long the stages will take on this machine, in one process.

    Attributes
    ----------
    seconds : Estimate
        Without reading, writing and loading.
    load_seconds : float
        What loading the models and a first run took.
    rows_timed : int
    units_per_second : float
    unit : {"tokens", "rows"}
        By what the time of the sample is scaled: rows only where nothing counts tokens.
    threads : int
        Of torch, in this process.
    """

    seconds: Estimate
    load_seconds: float
    rows_timed: int
    units_per_second: float
    unit: str
    threads: int


@dataclass(frozen=True, repr=False)
class Plan:
    """What a job will be like, as far as a sample shows.

    Attributes
    ----------
    rows : Estimate
        Exact for Parquet files.
    text_bytes : Estimate
        Of the columns that classifiers read, in UTF-8.
    input_bytes : int, optional
        Of the files as they are stored.
    null_share : float
        Of the rows, those whose text is null.
    parts : int
        Partitions of the job, and files of its output.
    mean_part_text_bytes, largest_part_text_bytes : float
    largest_part_rows : float
    sample_rows, sample_draws, seed : int
        How the sample was drawn.
    left_out : dict of str to int
        Files, lines and rows of the sample that would go to quarantine.
    classifiers : tuple of ClassifierPlan
    time : TimePlan, optional
        None if nothing was timed.
    cluster : str, optional
        Workers that are started here by default, in words; None where models run on a GPU.
    worker_bytes : int, optional
        Weights, the largest batch and the largest part's text, beside Python and torch themselves;
        None if a model's sizes are unknown.
    warnings : tuple of str
    """

    rows: Estimate
    text_bytes: Estimate
    input_bytes: int | None
    null_share: float
    parts: int
    mean_part_text_bytes: float
    largest_part_text_bytes: float
    largest_part_rows: float
    sample_rows: int
    sample_draws: int
    seed: int
    left_out: dict[str, int]
    classifiers: tuple[ClassifierPlan, ...]
    time: TimePlan | None
    cluster: str | None
    worker_bytes: int | None
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
        yield (
            "sample",
            f"{self.sample_rows:,} rows in {self.sample_draws:,} draws (seed {self.seed}){broken}",
        )
        yield (
            "parts",
            f"{self.parts:,}, with {_size(self.mean_part_text_bytes)} of text on average; the "
            f"largest has {_size(self.largest_part_text_bytes)} in {self.largest_part_rows:,.0f} "
            "rows",
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

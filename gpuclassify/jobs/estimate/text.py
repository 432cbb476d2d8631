"""A plan as people read it: aligned lines, and histograms of text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dask.utils import format_bytes

from gpuclassify.jobs.report.readable import readable_time, short_number

if TYPE_CHECKING:
    from gpuclassify.jobs.estimate.result import ClassifierPlan, Plan, TimePlan
    from gpuclassify.jobs.estimate.sampling import Estimate

NAME_WIDTH, LINE_WIDTH = 10, 100
BAR_WIDTH = 40


def as_text(plan: Plan) -> str:
    """The whole plan in lines of text."""
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    yield _named("input", _input(plan))
    yield _named("sample", _sample(plan))
    yield _named(
        "parts",
        f"{plan.parts:,}, with {_size(plan.mean_part_text_bytes)} of text on average; the largest "
        f"has {_size(plan.largest_part_text_bytes)} in {plan.largest_part_rows:,.0f} rows",
    )
    for own in plan.classifiers:
        yield ""
        yield from _classifier(own)
    yield ""
    if plan.time is not None:
        yield _named("time", _time(plan.time, plan.classifiers))
    yield _named("GPU-hours", _gpu_time(plan.classifiers))
    yield _named("memory", _memory(plan))
    for warning in plan.warnings:
        yield _named("WARNING", warning)


def _input(plan: Plan) -> str:
    stored = "" if plan.input_bytes is None else f", {_size(plan.input_bytes)} in files"
    nulls = f", {plan.null_share:.1%} of the rows without text" if plan.null_share else ""
    about = "" if plan.rows.low == plan.rows.high is not None else "about "
    return (
        f"{about}{plan.rows.value:,.0f} rows{_range(plan.rows)}{stored}, "
        f"{_size(plan.text_bytes.value)} of text{nulls}"
    )


def _sample(plan: Plan) -> str:
    left_out = ", ".join(_counted(count, kind) for kind, count in plan.left_out.items())
    broken = f"; to be left out, as far as is known: {left_out}" if left_out else ""
    return (
        f"{plan.sample_rows:,} rows from {plan.sample_pieces:,} places (seed {plan.seed}){broken}"
    )


def _classifier(own: ClassifierPlan) -> Iterator[str]:
    yield _named(own.name, own.model)
    yield _named(
        "",
        f"a text has {own.mean_tokens:,.0f} tokens on average, median {own.median_tokens:,}, "
        f"95% have at most {own.p95_tokens:,}, the longest {own.most_tokens:,}",
    )
    yield from (" " * (NAME_WIDTH + 1) + line for line in _bars(own.histogram))
    chars = "" if own.limit_chars is None else f", {own.limit_chars:,} characters"
    yield _named(
        "",
        f"{own.truncated_share:.1%} of the texts are not read to their end "
        f"(limit {own.limit_tokens:,} tokens{chars})",
    )
    yield _named("", f"{_short(own.tokens.value)} tokens to read{_range(own.tokens)}, {_work(own)}")


def _bars(histogram: tuple[tuple[int, int, float], ...]) -> Iterator[str]:
    largest = max((share for _, _, share in histogram), default=0.0)
    for low, high, share in histogram:
        bar = "█" * round(BAR_WIDTH * share / largest) or ("▏" if share else "")
        yield f"{low:>8,} to {high - 1:<8,} {share:>6.1%} {bar}".rstrip()


def _work(own: ClassifierPlan) -> str:
    parameters = "" if own.parameters is None else f"{_short(own.parameters)} parameters"
    per_token = own.operations_per_token
    if own.operations is None or per_token is None:
        return f"FLOPs unknown for this network{f' of {parameters}' if parameters else ''}"
    of = f" ({parameters})" if parameters else ""
    return f"{_short(own.operations)} FLOPs, {_short(per_token)} a token{of}"


def _time(time: TimePlan, classifiers: tuple[ClassifierPlan, ...]) -> str:
    devices = ", ".join(dict.fromkeys(own.device for own in classifiers)) or "cpu"
    low, high = time.seconds.low, time.seconds.high
    spread = ""
    if low is not None and high is not None:
        spread = f" ({readable_time(low)} to {readable_time(high)})"
    return (
        f"about {readable_time(time.seconds.value)}{spread} on this machine, one process "
        f"({devices}, {_counted(time.threads, 'torch thread')}), for the models' work alone: "
        f"{time.units_per_second:,.0f} {time.unit}/s over {time.rows_timed:,} rows of the sample, "
        f"and {time.load_seconds:.1f} s to load and warm up"
    )


def _gpu_time(classifiers: tuple[ClassifierPlan, ...]) -> str:
    known = [
        f"{own.name} {hours:,.1f} h on one {device}"
        for own in classifiers
        for device, hours in own.gpu_hours.items()
    ]
    if known:
        return "; ".join(known)
    return (
        "not told: no committed benchmark result is of these networks on a GPU; go by the tokens "
        "and FLOPs above"
    )


def _memory(plan: Plan) -> str:
    parts = [
        f"{own.name}'s weights {_size(own.weights_bytes)} ({own.dtype} on {own.device})"
        for own in plan.classifiers
        if own.weights_bytes is not None
    ]
    if plan.worker_bytes is None:
        known = f"; known are {', '.join(parts)}" if parts else ""
        return f"of a worker unknown, because sizes of a network or its weights are{known}"
    largest = max((own.batch_bytes or 0 for own in plan.classifiers), default=0)
    return (
        f"about {_size(plan.worker_bytes)} a worker beside Python and torch: "
        f"{', '.join(parts)}; a full batch {_size(largest)}; and the largest part's text, twice"
    )


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _named(name: str, text: str) -> str:
    indent = " " * (NAME_WIDTH + 1)
    return textwrap.fill(
        f"{name:<{NAME_WIDTH}} {text}",
        LINE_WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _range(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return " (reckoned from its beginning)"
    if estimate.low == estimate.high:
        return ""
    return f" ({_short(estimate.low)} to {_short(estimate.high)})"


def _short(value: float) -> str:
    if value >= 1e15:
        return f"{value / 1e15:,.3g}P"
    return short_number(value)


def _size(size_bytes: float) -> str:
    return format_bytes(int(size_bytes))

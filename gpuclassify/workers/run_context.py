"""Counters of running mappers: statistics, rows kept and dropped, and progress of a part.

A part is a piece of a job's input that one Dask task reads, runs and writes.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from distributed import Client, Worker

STATS_TOPIC, PROGRESS_TOPIC = "gpuclassify", "gpuclassify-progress"
REPORT_EVERY_SECONDS = 1.0
# Advice is given if waiting for tokens exceeds this share of the models' time, and the device was
# busy for less than this share of the sampled time.
MOST_WAITING, BUSY_SHARE = 0.1, 0.9
MOST_RECOMPUTED = 0.001  # share of texts that is recomputed without advice about it
# Statistics that only runs on a GPU have.
_ON_GPU = {"device_sampled_seconds", "peak_device_bytes", "peak_torch_bytes"}

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

# Name of a job's part, its number of rows, and the share of its work that is done.
PartEvent = tuple[str, int, float]


@dataclass
class RunStats:
    """Statistics of one mapper's run over one partition: counts, seconds and peaks.

    A window is a token span as long as the model reads; long texts may have several.

    Attributes
    ----------
    rows, null_rows, folded_rows : int
        Rows, rows without text, and rows that repeat another row's text in the partition.
    truncated_texts, shared_texts, windows : int
        Distinct texts that were cut, by `max_chars` or to the model's length; distinct texts
        whose tokens came from another mapper; and windows, one or more per distinct text.
    folded_windows : int
        Windows that were not run, because another window of the partition has equal tokens.
    shared_windows : int
        Windows that were run together with another mapper's model, which shares leading layers.
    tokens, padded_tokens : int
        Real tokens, and tokens run by the model's layers, padding included.
    batches, out_of_memory : int
        Batches that were run, and batches that ran out of memory and were divided.
    rescued : set of int
        Indices of distinct texts with outputs that were not finite at first and were recomputed
        alone in float32. Only their number, `rescued_texts`, is sent and summed.
    prefix_tokens : int
        Prompt tokens that were not run, because their shared prefix was run once.
    decode_steps : int
        Forward passes that continued answers after a batch's first one.
    tokenize_seconds : float
        Tokenizing time, on a separate thread ahead of the model. Concurrent runs of a process share
        it, so that tokens divided by these seconds are the host's throughput.
    wait_tokens_seconds, wait_device_seconds : float
        Time in which this run waited for tokens, or for another thread of the process that used the
        device. A GPU may still work on an earlier batch, so the first is an upper bound of its
        idle time.
    model_seconds : float
        Time in which this run held the device to run its model.
    device_sampled_seconds, device_busy_seconds : float, optional
        On a GPU, time over which its utilization was sampled, and busy time within it. None if the
        driver does not report it, as for a MIG slice.
    peak_device_bytes, peak_torch_bytes : int, optional
        Peak memory used on the GPU by all processes, and peak memory held by torch.
    peak_planned_bytes : int, optional
        Peak memory that torch should hold by the plan for batches, model included.
    peak_tokenizer_threads : int, optional
        Largest number of threads of a process that tokenized on the host.
    peak_sharing : list of int, optional
        Three counts: models that shared leading layers, layers that were run once for all of these
        models, and layers of a model.
    peak_bfloat16_times : float, optional
        Speed of the CPU's bfloat16 matrix products relative to float32, if bfloat16 would shorten
        the run and the user has not chosen float32.
    """

    rows: int = 0
    null_rows: int = 0
    folded_rows: int = 0
    truncated_texts: int = 0
    shared_texts: int = 0
    windows: int = 0
    folded_windows: int = 0
    shared_windows: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    batches: int = 0
    out_of_memory: int = 0
    rescued: set[int] = field(default_factory=set)
    prefix_tokens: int = 0
    decode_steps: int = 0
    tokenize_seconds: float = 0.0
    wait_tokens_seconds: float = 0.0
    wait_device_seconds: float = 0.0
    model_seconds: float = 0.0
    device_sampled_seconds: float | None = None
    device_busy_seconds: float | None = None
    peak_device_bytes: int | None = None
    peak_torch_bytes: int | None = None
    peak_planned_bytes: int | None = None
    peak_tokenizer_threads: int | None = None
    peak_sharing: list[int] | None = None
    peak_bfloat16_times: float | None = None

    @property
    def rescued_texts(self) -> int:
        """Number of distinct texts with outputs that were recomputed alone in float32."""
        return len(self.rescued)

    def raise_peak(self, name: str, value: float | None) -> None:
        """Set the statistic `name` (a peak) to `value` if that is larger; None is ignored."""
        if value is not None:
            setattr(self, name, max(value, getattr(self, name) or 0))

    def as_dict(self) -> dict[str, Any]:
        """Return the known statistics by name, with ``rescued_texts`` in place of `rescued`."""
        values = asdict(self) | {"rescued": None, "rescued_texts": self.rescued_texts}
        return {name: value for name, value in values.items() if value is not None}


def add_up(sums: dict[str, Any], numbers: Mapping[str, Any]) -> None:
    """Add one run's statistics by name to `sums`, in place.

    If a name starts with ``peak_``, the larger value is kept instead of a sum.
    """
    for name, number in numbers.items():
        known = sums.get(name, type(number)())
        sums[name] = max(known, number) if name.startswith("peak_") else known + number


def add_counts(sums: dict[str, Any], counts: Mapping[str, Any]) -> None:
    """Add counts by name to `sums`, in place; a count may also be a mapping of further counts."""
    for name, count in counts.items():
        if isinstance(count, Mapping):
            add_counts(sums.setdefault(name, {}), count)
        else:
            sums[name] = sums.get(name, 0) + count


def waiting_for_host(totals: Mapping[str, Any]) -> str | None:
    """Return advice, a sentence, to use more cores if GPUs waited for tokenizing, else None.

    Waiting alone is not enough for advice: it also occurs at the start of short parts, and while
    the device works on earlier batches.
    """
    tokens, tokenizing, model, waited = (
        totals.get(name, 0)
        for name in ("tokens", "tokenize_seconds", "model_seconds", "wait_tokens_seconds")
    )
    if totals.keys().isdisjoint(_ON_GPU):
        return None
    if not (waited > MOST_WAITING * model > 0 and tokenizing > model):
        return None
    sampled, busy = (totals.get(f"device_{kind}_seconds", 0) for kind in ("sampled", "busy"))
    if sampled and busy >= BUSY_SHARE * sampled:
        return None
    cores = totals.get("peak_tokenizer_threads")
    fed, possible = (f"{tokens / seconds / 1e6:.2g} M" for seconds in (tokenizing, model))
    return (
        f"the host holds the GPU up: {cores or 'its'} tokenizer cores feed {fed} tokens/s, the "
        f"model could run {possible}: give each GPU worker more cores, or use fewer GPUs "
        "a machine"
    )


def faster_in_bfloat16(totals: Mapping[str, Any]) -> str | None:
    """Return advice, a sentence, to run in bfloat16 if it was measured to be faster, else None."""
    if (times := totals.get("peak_bfloat16_times")) is None:
        return None
    return (
        f"this CPU multiplies matrices {times:.1f} times as fast in bfloat16 as in float32, which "
        'runs here: dtype="bfloat16" may be about as much faster, and `gpuclassify compare INPUT '
        "--classifier NAME --with dtype=bfloat16` shows which rows it would move"
    )


def recomputed_in_float32(totals: Mapping[str, Any]) -> str | None:
    """Return advice, a sentence, to choose a precision if many texts were run twice, else None."""
    rescued = totals.get("rescued_texts", 0)
    rows, *without = (totals.get(name, 0) for name in ("rows", "null_rows", "folded_rows"))
    texts = rows - sum(without)
    if rescued <= MOST_RECOMPUTED * texts:
        return None
    return (
        f"the outputs of {rescued:,} of {texts:,} texts were not finite, and each of them was "
        'computed again alone in float32: dtype="bfloat16" has more range than float16, and '
        'dtype="float32" more digits'
    )


ADVICE = (waiting_for_host, faster_in_bfloat16, recomputed_in_float32)
_advised: set[Callable[..., Any]] = set()


def advice(totals: Mapping[str, Any]) -> list[str]:
    """Suggest settings that would make similar runs faster, one sentence each.

    `totals` are sums of `RunStats` by name. The list is empty if there is nothing to suggest.
    """
    return [sentence for ask in ADVICE if (sentence := ask(totals))]


def shared_layers(totals: Mapping[str, Any]) -> str | None:
    """Describe the leading layers that were run once for several models; None if there are none."""
    models, shared, layers = totals.get("peak_sharing") or (0, 0, 0)
    return f"{shared} of {layers} layers run once for {models} models" if models else None


class PartProgress:
    """Progress of one part of a job, with `rows` rows, through the `runs` mappers that run on it.

    At most once a second, a Dask worker sends the progress as a Dask event; any other process
    passes it to `RunContext.on_progress`, if set.
    """

    def __init__(self, name: str, rows: int, runs: int) -> None:
        self._name, self._rows, self._work = name, rows, max(1, rows * runs)
        self._done = 0
        self._reported = 0.0

    def advance(self, rows: int) -> None:
        """Add `rows`, counted once per mapper, to the rows run; report progress if it is time."""
        self._done = min(self._done + rows, self._work)
        if time.monotonic() - self._reported < REPORT_EVERY_SECONDS:
            return
        self._reported = time.monotonic()
        event = (self._name, self._rows, self._done / self._work)
        worker, on_progress = current_worker(), current_run().on_progress
        if worker is not None:
            worker.log_event(PROGRESS_TOPIC, event)
        elif on_progress is not None:
            on_progress(event)


@dataclass(frozen=True)
class RunContext:
    """Collectors of statistics and progress for this thread's task; None if not collected."""

    stats: list[RunStats] | None = None  # one item per mapper and partition
    stages: Any = None  # `gpuclassify.mapping.stage_counts.StageCounts`: rows kept and dropped
    part: PartProgress | None = None  # part that the current rows belong to
    on_progress: Callable[[PartEvent], None] | None = None  # called outside of Dask's workers


@contextlib.contextmanager
def set_variable(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Set a context variable during the block, and restore its value afterwards."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


NOTHING_COUNTS = RunContext()
_context: ContextVar[RunContext] = ContextVar("run", default=NOTHING_COUNTS)
current_run = _context.get


@contextlib.contextmanager
def run_context(**counters: Any) -> Iterator[RunContext]:
    """Set attributes of this thread's `RunContext` during the block, and yield the new context.

    `counters` are the attributes by name, such as ``stats=[]``. The other attributes stay.
    """
    context = replace(current_run(), **counters)
    with set_variable(_context, context):
        yield context


@contextlib.contextmanager
def collected_stats() -> Iterator[list[RunStats]]:
    """Yield a list; mappers that this thread runs append a `RunStats` to it per partition."""
    runs: list[RunStats] = []
    with run_context(stats=runs):
        yield runs


def report_stats(stats: RunStats) -> None:
    """Append a run's statistics to the list of `collected_stats`; without a list, log advice.

    On a Dask worker, the statistics are also sent as a Dask event.
    """
    if (runs := current_run().stats) is not None:
        runs.append(stats)
    else:
        for ask in ADVICE:
            if ask not in _advised and (sentence := ask(stats.as_dict())):
                _advised.add(ask)
                logger.warning("%s", sentence)
    if (worker := current_worker()) is not None:
        worker.log_event(STATS_TOPIC, stats.as_dict())


def advance(rows: int) -> None:
    """Add `rows`, which a mapper has run, to the progress of this thread's part, if collected."""
    if (part := current_run().part) is not None:
        part.advance(rows)


def current_worker() -> Worker | None:
    """Return the Dask worker whose task this thread runs; None outside of a task."""
    distributed = sys.modules.get("distributed")
    if distributed is None:
        return None
    try:
        return distributed.get_worker()
    except ValueError:  # not in a task
        return None


class FirstReport(NamedTuple):
    """First report of a job's progress: its time, and the work and rows that were done by then."""

    seconds: float = 0.0  # since the first part was submitted
    work: float = 0.0  # work done, in parts of average size
    rows: int = 0


class RunningParts:
    """Progress of the parts of a job that run now, as workers report it to the client. Thread-safe.

    `names` are the names of all parts of the job, and `sizes` their shares of the work, in any unit
    (default: equal). Events of other parts, such as another job's, are ignored.
    """

    def __init__(self, names: Iterable[str] = (), sizes: Sequence[float] | None = None) -> None:
        self._began = time.monotonic()
        names = [*names]
        mean = sum(sizes) / len(names) if sizes else 0.0
        work = [size / mean for size in sizes] if sizes and mean else [1.0] * len(names)
        self._left = dict(zip(names, work, strict=True))  # work of each part; the mean is 1
        self._latest: dict[str, tuple[int, float]] = {}  # rows and share done, by part
        self.start = FirstReport()
        self.surplus = 0.0  # work of finished parts minus their number
        self.joining = ""  # text on the client's progress while it joins output files, else empty
        self._lock = threading.Lock()

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since this object was created."""
        return time.monotonic() - self._began

    def update(self, event: PartEvent) -> None:
        """Record a worker's event: a part's name, its rows, and the share of its work done."""
        name, rows, share = event
        with self._lock:
            if name in self._left:
                if self.start == FirstReport():
                    work = share * self._left[name]
                    self.start = FirstReport(self.elapsed_seconds, work, round(rows * share))
                self._latest[name] = max(self._latest.get(name, (rows, 0.0)), (rows, share))

    def finish(self, name: str) -> None:
        """Remove the finished part `name` from the running ones; count its size in `surplus`."""
        with self._lock:
            self.surplus += self._left.pop(name, 1.0) - 1.0
            self._latest.pop(name, None)

    def totals(self) -> tuple[float, int]:
        """Return the work done on the parts that run now, in parts of average size and in rows."""
        with self._lock:
            parts = [(self._left[name], *latest) for name, latest in self._latest.items()]
        work = sum(part * share for part, _, share in parts)
        return work, round(sum(rows * share for _, rows, share in parts))


@contextlib.contextmanager
def progress_events(
    on_progress: Callable[[PartEvent], None], client: Client | None
) -> Iterator[None]:
    """Call `on_progress` with each event about the progress of a part that runs during the block.

    Parts run on the workers of `client`, and `on_progress` is called in the client's thread, also
    for parts of other jobs. If `client` is None, parts run in this process.
    """
    if client is None:
        with run_context(on_progress=on_progress):
            yield
        return
    client.subscribe_topic(PROGRESS_TOPIC, lambda event: on_progress(tuple(event[1])))
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):  # the scheduler is gone
            client.unsubscribe_topic(PROGRESS_TOPIC)

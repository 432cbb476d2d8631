"""How long does a job take on 1 to 1,000 GPUs, and what does it cost? A prediction, by arithmetic.

``python -m benchmarks.fleet --help`` lists what is assumed and can be set; README.md says why.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import write_result
from benchmarks.models import SHAPES, Shape
from benchmarks.names import RESULTS, SUBJECT
from benchmarks.texts import LENGTHS, Lengths
from benchmarks.work import forward_operations

QUESTION = "fleet"
QUANTILES = 2_000  # of a distribution of lengths
LIMITS = ("workers", "scheduler", "storage")


@dataclass(frozen=True)
class Job:
    """What is to be done.

    Attributes
    ----------
    rows : float
    rows_per_partition : float
    bytes_per_row : float
        That a worker reads.
    operations_per_row : float
        Floating-point operations that the model needs for the tokens of a row, without padding.
    """

    rows: float
    rows_per_partition: float
    bytes_per_row: float
    operations_per_row: float

    @property
    def partitions(self) -> int:
        """Tasks."""
        return math.ceil(self.rows / self.rows_per_partition)


@dataclass(frozen=True)
class Machine:
    """One worker and what it stands on. Times in seconds, rates a second.

    Attributes
    ----------
    rows_per_second : float
        Of one GPU, while it works.
    read_bytes_per_second : float
        Of one worker; it reads a partition, then runs it.
    storage_bytes_per_second : float
        Of all workers together.
    partition_seconds : float
        That a worker spends on a partition besides.
    scheduler_seconds : float
        That client and scheduler spend on a partition.
    start_seconds : float
        Until a worker is there with its model loaded.
    losses_per_gpu_hour : float
        Spot machines taken away. Each costs a start, and half a partition that is run again.
    straggler : float
        How many times as long the slowest partition of the last wave takes.
    price_per_gpu_hour : float
    """

    rows_per_second: float
    read_bytes_per_second: float
    storage_bytes_per_second: float
    partition_seconds: float
    scheduler_seconds: float
    start_seconds: float
    losses_per_gpu_hour: float
    straggler: float
    price_per_gpu_hour: float


@dataclass(frozen=True)
class Prediction:
    """What a job takes on so many GPUs.

    Attributes
    ----------
    gpus : int
    hours : float
        From asking for workers to the last partition.
    gpu_hours, cost : float
        Of all GPUs for all of that time.
    limit : {"workers", "scheduler", "storage"}
        What would have to be faster.
    efficiency : float
        Share of the GPU hours in which models work.
    """

    gpus: int
    hours: float
    gpu_hours: float
    cost: float
    limit: str
    efficiency: float


def predict(job: Job, machine: Machine, gpus: int) -> Prediction:
    """Time and cost of a job on `gpus` workers of one GPU each.

    Partitions of equal size are run in waves, one a GPU; the last wave is as slow as its slowest.
    The scheduler and the storage are shared, and work while the workers do: the slowest of the
    three tells the time.

    Raises
    ------
    ValueError
        Machines are lost faster than they get work done.
    """
    partition = _partition_seconds(job, machine)
    waves = math.ceil(job.partitions / gpus)
    seconds = {
        "workers": (waves - 1 + machine.straggler) * partition / _kept_share(machine, partition),
        "scheduler": job.partitions * machine.scheduler_seconds,
        "storage": job.rows * job.bytes_per_row / machine.storage_bytes_per_second,
    }
    limit = max(LIMITS, key=seconds.__getitem__)
    hours = (machine.start_seconds + seconds[limit]) / 3600
    return Prediction(
        gpus=gpus,
        hours=hours,
        gpu_hours=gpus * hours,
        cost=gpus * hours * machine.price_per_gpu_hour,
        limit=limit,
        efficiency=job.rows / machine.rows_per_second / 3600 / (gpus * hours),
    )


def _partition_seconds(job: Job, machine: Machine) -> float:
    rows = min(job.rows_per_partition, job.rows)
    reading = rows * job.bytes_per_row / machine.read_bytes_per_second
    return reading + rows / machine.rows_per_second + machine.partition_seconds


def _kept_share(machine: Machine, partition_seconds: float) -> float:
    """Share of a worker's time that is not lost with spot machines."""
    lost_seconds = machine.start_seconds + partition_seconds / 2
    kept = 1 - machine.losses_per_gpu_hour * lost_seconds / 3600
    if kept <= 0:
        raise ValueError(
            f"{machine.losses_per_gpu_hour:g} losses a GPU hour of {lost_seconds:.0f} s each leave "
            "no time for work: make partitions smaller, or take machines that last"
        )
    return kept


def operations_per_row(lengths: Lengths, shape: Shape, max_tokens: int = 512) -> float:
    """Mean operations of a row whose tokens are distributed like this and cut at `max_tokens`."""
    sample = [min(length, max_tokens) for length in lengths.sample(QUANTILES)]
    return forward_operations(sample, shape) / QUANTILES


def measured_tokens_per_second(path: Path) -> float:
    """Tokens a second of one worker, from a result of the benchmark of throughput."""
    corpora = json.loads(path.read_text(encoding="utf-8"))["corpora"]
    return next(iter(corpora.values()))["variants"][SUBJECT]["real_tokens_per_second"]


def main(arguments: Sequence[str] | None = None) -> Path:
    """Predict, write the result and a picture, print a table, and return the result's path."""
    options = parse_options(arguments)
    lengths, shape = LENGTHS[options.lengths], SHAPES[options.model]
    job = Job(
        rows=options.rows,
        rows_per_partition=options.rows_per_partition,
        bytes_per_row=options.bytes_per_row,
        operations_per_row=operations_per_row(lengths, shape),
    )
    if options.result is not None:
        rate = measured_tokens_per_second(options.result) / mean_tokens(lengths)
    else:
        rate = options.utilisation * options.peak / job.operations_per_row
    given = {name: getattr(options, name) for name in DEFAULTS}
    machine = Machine(rows_per_second=rate, **given)
    predictions = [predict(job, machine, gpus) for gpus in options.gpus]
    settings = {name: _plain(value) for name, value in vars(options).items() if name != "output"}
    return write(QUESTION, "any", {"settings": settings}, job, machine, predictions, options.output)


def mean_tokens(lengths: Lengths, max_tokens: int = 512) -> float:
    """Of a row, after the cut."""
    return sum(min(length, max_tokens) for length in lengths.sample(QUANTILES)) / QUANTILES


# Assumed where nothing is given; only scheduler_seconds is measured (benchmarks.scheduling).
DEFAULTS = {
    "read_bytes_per_second": 100e6,
    "storage_bytes_per_second": 50e9,
    "partition_seconds": 0.5,
    "scheduler_seconds": 0.005,
    "start_seconds": 300.0,
    "losses_per_gpu_hour": 0.02,
    "straggler": 1.5,
    "price_per_gpu_hour": 1.0,
}


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    parser.add_argument("--rows", type=float, required=True)
    parser.add_argument("--gpus", type=_counts, default=(1, 10, 100, 1_000), help="1,10,100,1000")
    parser.add_argument("--rows-per-partition", type=float, default=50_000, help="(50000)")
    parser.add_argument("--bytes-per-row", type=float, default=3_000, help="(3000)")
    parser.add_argument("--lengths", choices=tuple(LENGTHS), default="web", help="of texts (web)")
    parser.add_argument("--model", choices=tuple(SHAPES), default="bert", help="shape (bert)")
    parser.add_argument("--peak", type=float, default=70e12, help="operations/s of a GPU (70e12)")
    rate = parser.add_mutually_exclusive_group(required=True)
    rate.add_argument("--utilisation", type=float, help="share of the peak that texts get")
    rate.add_argument("--result", type=Path, help="of throughput: one worker's measured rate")
    for name, value in DEFAULTS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=float, default=value, help=f"({value:g})"
        )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the result")
    return parser.parse_args(arguments)


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(float(number)) for number in text.split(","))
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give counts of 1 and more, such as 1,10,100")
    return counts


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def write(
    question: str,
    name: str,
    head: dict[str, Any],
    job: Job,
    machine: Machine,
    predictions: Sequence[Prediction],
    folder: Path,
) -> Path:
    """Write the result and a picture beside it, print a table, and return the result's path."""
    result = {
        "machine": {"short_name": name},
        **head,
        "job": asdict(job) | {"partitions": job.partitions},
        "assumptions": asdict(machine),
        "predictions": [asdict(prediction) for prediction in predictions],
    }
    path = write_result(question, result, folder)
    print(table(result))
    print(f"drawn to {draw(result, path.with_suffix('.png'))}")
    print(f"written to {path}")
    return path


def table(result: dict[str, Any]) -> str:
    """The result as a few lines for people."""
    job, assumed = result["job"], result["assumptions"]
    lines = [
        f"{job['rows']:,.0f} rows in {job['partitions']:,} partitions, "
        f"{assumed['rows_per_second']:,.0f} rows/s a GPU",
        f"{'GPUs':>8}{'hours':>10}{'GPU hours':>12}{'cost':>12}{'models work':>13}  limit",
    ]
    for found in result["predictions"]:
        lines.append(
            f"{found['gpus']:8,}{found['hours']:10.2f}{found['gpu_hours']:12,.0f}"
            f"{found['cost']:12,.0f}{found['efficiency']:13.0%}  {found['limit']}"
        )
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> Path:
    """Hours and GPU hours against GPUs, from 1 to 1,000 and as far as the result goes."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    import matplotlib.pyplot as plt

    job, machine = _as_predicted(result)
    counts = _curve([found["gpus"] for found in result["predictions"]])
    curve = [predict(job, machine, gpus) for gpus in counts]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    panels: list[tuple[str, Callable[[Any], float]]] = [
        ("hours", lambda found: found.hours),
        ("GPU hours", lambda found: found.gpu_hours),
    ]
    for axis, (label, value) in zip(axes, panels, strict=True):
        axis.semilogx(counts, list(map(value, curve)), color="#12355b")
        for found in result["predictions"]:
            height = value(argparse.Namespace(**found))
            axis.plot(found["gpus"], height, "o", color="#c8692a")
            axis.annotate(
                f"{height:,.{0 if height >= 100 else 1}f}",
                (found["gpus"], height),
                (0, 8),
                textcoords="offset points",
                ha="center",
            )
        axis.set_xlabel("GPUs")
        axis.set_title(label, loc="left")
        axis.margins(0.1, 0.15)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yscale("log")
    axes[1].set_ylim(bottom=0)
    rate = f"{machine.rows_per_second:,.0f} rows/s a GPU"
    figure.suptitle(f"Predicted, not measured: {job.rows:,.0f} rows, {rate}", fontsize=12)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _as_predicted(result: dict[str, Any]) -> tuple[Job, Machine]:
    job = {name: value for name, value in result["job"].items() if name != "partitions"}
    return Job(**job), Machine(**result["assumptions"])


def _curve(gpus: Sequence[int]) -> list[int]:
    """Numbers of GPUs, evenly spaced on a logarithmic axis."""
    last = max(1_000, *gpus)
    return sorted({round(last ** (step / 120)) for step in range(121)})


if __name__ == "__main__":
    main()

"""A prediction of a job that others ran: FineWeb-Edu's classifier on 100 A10G GPUs.

The rate of a GPU is its peak times a share of the peak that others reached with encoders on other
GPUs; none of it is measured here. The job's own time was public when this was written, and is no
input: each input has its reason below, and stays as it is whatever a comparison shows.
``python -m benchmarks.fineweb`` writes the prediction.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.fleet import (
    DEFAULTS,
    Job,
    Machine,
    operations_per_row,
    predict,
    write,
)
from benchmarks.models import SHAPES
from benchmarks.names import RESULTS
from benchmarks.texts import LENGTHS, Lengths
from benchmarks.work import forward_operations

PREDICTION = "fleet-prediction"
NAME = "fineweb-a10g"
GPUS = (1, 10, 100, 1_000)

# Of the job, as published before it ran: huggingface/blog, dask-scaling.md.
ROWS = 211e6
MEMORY_BYTES, DISK_BYTES = 715e9, 432e9
# Estimated: url, path, date, identifiers and offsets of a row, and bytes of English a token.
OTHER_COLUMNS_BYTES, BYTES_PER_TOKEN = 370, 4.5
PARTITION_BYTES = 256 * 2**20  # in memory: Dask's default block when it reads Parquet
A10G_PEAK = 70e12  # dense 16-bit tensor operations a second, as AWS and NVIDIA state it


@dataclass(frozen=True)
class Source:
    """A rate that others published for an encoder on another GPU.

    Attributes
    ----------
    what, where : str
    peak : float
        The GPU's dense 16-bit tensor operations a second, whatever precision ran: where a source
        does not say, nobody knows, and the share of this peak has it in it.
    rows_per_second : float
    operations_per_row : float
    """

    what: str
    where: str
    peak: float
    rows_per_second: float
    operations_per_row: float

    @property
    def utilisation(self) -> float:
        """Share of the peak that reached real tokens; padding and waiting taken off."""
        return self.rows_per_second * self.operations_per_row / self.peak


def web_lengths() -> Lengths:
    """FineWeb's tokens a row: the mean from bytes, the spread as in the benchmarks' web texts."""
    mean = (MEMORY_BYTES / ROWS - OTHER_COLUMNS_BYTES) / BYTES_PER_TOKEN
    sigma = LENGTHS["web"].sigma
    return Lengths(mean / math.exp(sigma**2 / 2), sigma)


def sources() -> list[Source]:
    """What the share of the peak is taken from; none of it is ours."""
    bert, web = SHAPES["bert"], web_lengths()
    mean_tokens = web.median_tokens * math.exp(web.sigma**2 / 2)
    distilbert = replace(bert, layers=6)
    # Gated layers of 1,152 need as many operations as plain ones of 1,728.
    modernbert = replace(bert, layers=22, intermediate_size=1_728)
    return [
        Source(
            "FineWeb-Edu's own run: 15e12 tokens in 6,000 H100 hours, the same classifier",
            "huggingface/blog, modernbert.md; H100 SXM: NVIDIA's data sheet",
            989e12,
            15e12 / 6_000 / 3600 / mean_tokens,
            operations_per_row(web, bert),
        ),
        Source(
            "DistilBERT behind HTTP on an L4: 253.82 dollars for 1e9 texts at 0.80 an hour",
            "huggingface/blog, billion-classifications.md; L4: NVIDIA's data sheet",
            121e12,
            1e9 / (253.82 / 0.8 * 3600),
            forward_operations([100], distilbert),
        ),
        Source(
            "gte-modernbert-base behind HTTP on an L4: 409.44 dollars for 1e9 texts at 0.80",
            "huggingface/blog, billion-classifications.md; 100 tokens a text are assumed",
            121e12,
            1e9 / (409.44 / 0.8 * 3600),
            forward_operations([100], modernbert),
        ),
    ]


def fineweb_job() -> Job:
    """The published job."""
    return Job(
        rows=ROWS,
        rows_per_partition=PARTITION_BYTES / (MEMORY_BYTES / ROWS),
        bytes_per_row=DISK_BYTES / ROWS,
        operations_per_row=operations_per_row(web_lengths(), SHAPES["bert"]),
    )


def main(arguments: Sequence[str] | None = None) -> Path:
    """Write the prediction, and return its path."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fineweb", description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the result")
    options = parser.parse_args(arguments)
    return predict_fineweb(options.output)


def predict_fineweb(folder: Path) -> Path:
    """The median of the sources' shares gives the prediction, the others how far it may be off."""
    job, found, web = fineweb_job(), sources(), web_lengths()
    shares = sorted(source.utilisation for source in found)
    machine = Machine(rows_per_second=_rate(statistics.median(shares), job), **DEFAULTS)
    hours = [
        predict(job, replace(machine, rows_per_second=_rate(share, job)), 100).hours
        for share in (shares[-1], shares[0])
    ]
    head = {
        "what": " ".join((__doc__ or "").split("``")[0].split()),
        "settings": {
            "peak": A10G_PEAK,
            "median_tokens_before_the_cut": web.median_tokens,
            "sigma": web.sigma,
            "bytes_per_token": BYTES_PER_TOKEN,
            "other_columns_bytes": OTHER_COLUMNS_BYTES,
        },
        "sources": [
            {
                "what": source.what,
                "where": source.where,
                "peak": source.peak,
                "rows_per_second": source.rows_per_second,
                "utilisation": source.utilisation,
            }
            for source in found
        ],
        "utilisation": statistics.median(shares),
        "hours_on_100_gpus_between": hours,
    }
    predictions = [predict(job, machine, gpus) for gpus in GPUS]
    return write(PREDICTION, NAME, head, job, machine, predictions, folder)


def _rate(share: float, job: Job) -> float:
    return share * A10G_PEAK / job.operations_per_row


if __name__ == "__main__":
    main()

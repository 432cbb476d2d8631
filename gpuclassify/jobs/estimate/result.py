"""What a job will be like: what `gpuclassify plan` shows, and `Pipeline.plan` returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from gpuclassify.jobs.estimate.sampling import Estimate


@dataclass(frozen=True)
class ClassifierPlan:
    """What one classifier or embedder will see and need.

    Attributes
    ----------
    name, model : str
    limit_tokens : int
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
    parameters : int, optional
        None where there are no headers of weights to read.
    operations : float, optional
        Floating-point operations for `tokens`; None for a network of unknown sizes.
    device, dtype : str
        What it would run on here.
    weights_bytes, batch_bytes : int, optional
        Memory of the weights, and about that of the largest batch.
    gpu_hours : dict of str to float
        By GPU, as far as such a model was measured on it.
    """

    name: str
    model: str
    limit_tokens: int
    limit_chars: int | None
    mean_tokens: float
    median_tokens: int
    p95_tokens: int
    most_tokens: int
    histogram: tuple[tuple[int, int, float], ...]
    truncated_share: float
    tokens: Estimate
    parameters: int | None
    operations: float | None
    device: str
    dtype: str
    weights_bytes: int | None
    batch_bytes: int | None
    gpu_hours: dict[str, float] = field(default_factory=dict)

    @property
    def operations_per_token(self) -> float | None:
        """Floating-point operations, divided by the tokens that need them."""
        if self.operations is None or not self.tokens.value:
            return None
        return self.operations / self.tokens.value


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


@dataclass(frozen=True)
class Plan:
    """What a job will be like, as far as a sample tells.

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
    sample_rows, sample_pieces, seed : int
        How the sample was drawn.
    left_out : dict of str to int
        Files, lines and rows of the sample that would go to quarantine.
    classifiers : tuple of ClassifierPlan
    time : TimePlan, optional
        None if nothing was timed.
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
    sample_pieces: int
    seed: int
    left_out: dict[str, int]
    classifiers: tuple[ClassifierPlan, ...]
    time: TimePlan | None
    worker_bytes: int | None
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        from gpuclassify.jobs.estimate.text import as_text

        return as_text(self)

    def as_dict(self) -> dict[str, Any]:
        """Plain values by name, for JSON."""
        return asdict(self)

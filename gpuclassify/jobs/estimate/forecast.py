"""A job's plan before it runs: a sample is drawn, its tokens are counted, some of it is run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gpuclassify.frames import backend_of
from gpuclassify.jobs.estimate.effort import batch_bytes, count_parameters, read_network
from gpuclassify.jobs.estimate.lengths import Lengths, measure_lengths
from gpuclassify.jobs.estimate.limits import limit_warnings, list_columns
from gpuclassify.jobs.estimate.rates import gpu_hours
from gpuclassify.jobs.estimate.result import ClassifierPlan, Plan, TimePlan
from gpuclassify.jobs.estimate.sampling import Estimate, Sample, sample_files, sample_partitions
from gpuclassify.jobs.estimate.trial import Trial, run_trial
from gpuclassify.jobs.quarantine import ROW, isolate_bad_rows
from gpuclassify.jobs.sources import FileSource, FrameSource
from gpuclassify.jobs.stages import Function
from gpuclassify.models.checkpoint import OWN_MODULE
from gpuclassify.partition_map import Chain
from gpuclassify.text_mapper import TextMapper

TEXT_COPIES = 2  # of a part's text on a worker: in the frame, and as Python's strings


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
    sample_rows, seed, on_error
        See `gpuclassify.jobs.pipeline.Pipeline.plan`.
    trial_seconds : float, optional
        About how long to run the stages; None loads no model.
    """
    if isinstance(source, FileSource):
        planned = source.found
        sample = sample_files(planned, planned.schema, sample_rows, seed, on_error)
    else:
        sample = sample_partitions(reader, sample_rows, seed)
    counted = _Counted(sample, chain)
    time, failed_rows = None, 0
    if trial_seconds is not None:
        time, failed_rows = _time(counted, chain, source.meta(), trial_seconds, seed, on_error)
    left_out = sample.left_out
    if failed_rows:
        left_out[ROW] = left_out.get(ROW, 0) + failed_rows
    return counted.plan(source, seed, left_out, time)


class _Counted:
    """A sample with the tokens of each classifier."""

    def __init__(self, sample: Sample, chain: Chain) -> None:
        self.sample = sample
        self.warnings: list[str] = []
        self.work = np.zeros(len(sample.frame))
        self.bytes = _text_bytes(sample.frame, chain.text_fields)
        self.forecasts: list[ClassifierPlan] = []
        self._weights: dict[str, int] = {}  # bytes by where they are: models may share a decoder
        self._lists: list[tuple[str, int]] = []
        self._nulls = np.zeros(len(sample.frame), dtype=bool)
        for mapper, frame, rows in self._seen(chain):
            self._count(mapper, measure_lengths(mapper, frame), rows)

    def _seen(self, chain: Chain) -> Iterator[tuple[TextMapper, Any, np.ndarray]]:
        """Each classifier with the rows that reach it as far as callables decide, and which."""
        frame, rows = self.sample.frame, np.arange(len(self.sample.frame))
        for stage in chain.mappers:
            if isinstance(stage, TextMapper):
                yield stage, frame, rows
            elif isinstance(stage, Function):
                mapped = self._apply(stage, frame)
                if mapped is not None:
                    rows = rows[mapped.index.to_numpy()]
                    frame = mapped.reset_index(drop=True)

    def _apply(self, stage: Function, frame: Any) -> Any:
        """What a callable makes of the sample; None if nobody can say which rows those are."""
        reason = "it changes the index of its frame"
        try:
            mapped = stage.map_frame(frame)
            if mapped.index.is_unique and mapped.index.isin(frame.index).all():
                return mapped
        except Exception as err:  # whatever code of the user's raises
            reason = f"{type(err).__name__}: {err}"
        self.warnings.append(
            f"stage {stage.__name__} is left out of the count of tokens, because it cannot be run "
            f"on the sample before the classifiers have ({reason})"
        )
        return None

    def _count(self, mapper: TextMapper, lengths: Lengths, rows: np.ndarray) -> None:
        sample, checkpoint, options = self.sample, mapper.model.checkpoint, mapper.options
        network = read_network(checkpoint)
        tokens = np.zeros(len(self.work))
        tokens[rows] = lengths.of_rows(lengths.windows)
        self.work += tokens
        self._nulls[rows] |= ~lengths.has_text
        total = sample.total(tokens)
        operations = None
        if network is not None:
            needed = np.zeros(len(self.work))
            needed[rows] = lengths.of_rows(network.operations(lengths.windows, lengths.shared))
            operations = sample.total(needed).value
        parameters = count_parameters(checkpoint, options.cache_dir)
        device, dtype = mapper.runner.device_and_dtype()
        # A module of one's own keeps its weights as they are, and torch casts what it reads.
        item_bytes = 4 if checkpoint.layout == OWN_MODULE else dtype.itemsize
        weights = {place: count * item_bytes for place, count in parameters.items()}
        self._weights |= weights
        self._lists += list_columns(mapper)
        self.forecasts.append(
            ClassifierPlan(
                name=mapper.__name__,
                model=options.model,
                limit_tokens=lengths.limit,
                limit_chars=options.max_chars,
                **_shape_of(lengths, sample.weights[rows]),
                tokens=total,
                parameters=sum(parameters.values()) or None,
                operations=operations,
                device=str(device),
                dtype=str(dtype).removeprefix("torch."),
                weights_bytes=sum(weights.values()) or None,
                batch_bytes=None if network is None else batch_bytes(network, device, dtype),
                gpu_hours=gpu_hours(network, total.value),
            )
        )

    def plan(
        self,
        source: FileSource | FrameSource,
        seed: int,
        left_out: dict[str, int],
        time: TimePlan | None,
    ) -> Plan:
        """The plan, with what the parts will be like."""
        sample, text_bytes = self.sample, self.sample.total(self.bytes)
        largest_bytes, largest_rows = self._largest(isinstance(source, FrameSource))
        files = source.found.files if isinstance(source, FileSource) else ()
        stored = [file.size_bytes for file in files if file.size_bytes is not None]
        weights = sample.weights
        return Plan(
            rows=sample.rows,
            text_bytes=text_bytes,
            input_bytes=sum(stored) if files and len(stored) == len(files) else None,
            null_share=float(weights[self._nulls].sum() / weights.sum()),
            parts=source.count,
            mean_part_text_bytes=text_bytes.value / source.count,
            largest_part_text_bytes=largest_bytes,
            largest_part_rows=largest_rows,
            sample_rows=len(sample.frame),
            sample_pieces=len(sample.pieces),
            seed=seed,
            left_out=left_out,
            classifiers=tuple(self.forecasts),
            time=time,
            worker_bytes=self._worker_bytes(largest_bytes),
            warnings=(
                *self.warnings,
                *limit_warnings(source, largest_bytes, largest_rows, self._lists),
            ),
        )

    def _largest(self, is_frame: bool) -> tuple[float, float]:
        """Bytes of text and rows of the largest part."""
        sample = self.sample
        if is_frame:  # of which only those that were computed are known
            ends = np.cumsum([len(piece.frame) for piece in sample.pieces])
            texts = np.split(self.bytes, ends[:-1])
            means = [own.mean() if len(own) else 0.0 for own in texts]
            sums = [p.rows * mean for p, mean in zip(sample.pieces, means, strict=True)]
            return float(max(sums)), max(piece.rows for piece in sample.pieces)
        share = max(sample.sizes) / sample.size
        return sample.total(self.bytes).value * share, sample.rows.value * share

    def _worker_bytes(self, part_bytes: float) -> int | None:
        """All weights, which stay side by side where they fit, one batch, and one part's text."""
        batches = [own.batch_bytes for own in self.forecasts]
        if not all(batches) or not all(own.weights_bytes for own in self.forecasts):
            return None
        batch = max(filter(None, batches), default=0)
        return int(sum(self._weights.values()) + batch + TEXT_COPIES * part_bytes)


def _text_bytes(frame: Any, columns: tuple[str, ...]) -> np.ndarray:
    """Bytes of each row's texts in UTF-8, float64 (rows,)."""
    found = np.zeros(len(frame))
    for name in columns:
        if name in frame.columns:
            texts = backend_of(frame).texts(frame, name, None)
            found += [len((text or "").encode("utf-8", "surrogatepass")) for text in texts]
    return found


def _shape_of(lengths: Lengths, weights: np.ndarray) -> dict[str, Any]:
    """Mean, quantiles, histogram and the share that is cut, of texts that stand for others."""
    own = weights[lengths.has_text]
    total = own.sum()
    if not total:
        names = ("mean_tokens", "median_tokens", "p95_tokens", "most_tokens", "truncated_share")
        return {**dict.fromkeys(names, 0), "histogram": ()}
    order = np.argsort(lengths.whole, kind="stable")
    ascending, passed = lengths.whole[order], np.cumsum(own[order]) / total
    bits = np.frexp(lengths.whole)[1]  # of a number from 2**(b-1) to 2**b - 1
    bins = range(int(bits.min()), int(bits.max()) + 1)
    return {
        "mean_tokens": float((lengths.whole * own).sum() / total),
        "median_tokens": int(ascending[np.searchsorted(passed, 0.5)]),
        "p95_tokens": int(ascending[np.searchsorted(passed, 0.95)]),
        "most_tokens": int(ascending[-1]),
        "histogram": tuple((2 ** (b - 1), 2**b, float(own[bits == b].sum() / total)) for b in bins),
        "truncated_share": float(own[lengths.is_cut].sum() / total),
    }


def _time(
    counted: _Counted, chain: Chain, meta: Any, seconds: float, seed: int, on_error: str
) -> tuple[TimePlan, int]:
    """How long the stages will take, and how many rows of the trial could not be scored."""
    import torch

    announced, frame = chain.meta_dtypes(meta), counted.sample.frame
    has_tokens = bool(counted.work.any())
    work = counted.work if has_tokens else np.ones(len(frame))
    failed: set[Any] = set()

    def run(rows: Any) -> None:
        if on_error == "raise":
            chain.map_frame(rows, announced)
            return
        from gpuclassify.jobs.task import row_errors

        parts = isolate_bad_rows(
            lambda start, stop: chain.map_frame(rows.iloc[start:stop], announced),
            0,
            len(rows),
            row_errors(),
        )
        failed.update(rows.index[row] for row, found in parts if isinstance(found, Exception))

    trial = run_trial(chain, frame, announced, work, run, seconds, seed)
    forecast = TimePlan(
        seconds=_scaled(counted.sample.total(work), trial),
        load_seconds=trial.load_seconds,
        rows_timed=trial.rows,
        units_per_second=trial.rate,
        unit="tokens" if has_tokens else "rows",
        threads=torch.get_num_threads(),
    )
    return forecast, len(failed)


def _scaled(work: Estimate, trial: Trial) -> Estimate:
    """Seconds for so much work; the range is that of the work and of the slices' rates."""
    value = work.value / trial.rate if trial.rate else 0.0
    if work.low is None or work.high is None or trial.rates is None or not trial.rates[0]:
        return Estimate(value, None, None)
    slowest, fastest = trial.rates
    return Estimate(value, work.low / fastest, work.high / slowest)

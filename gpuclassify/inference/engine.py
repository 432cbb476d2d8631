"""Run a model on tokenized texts, and return its outputs in the order of the texts."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch

from gpuclassify.inference.batching import (
    MOST_RECTANGLE,
    PaddedBatch,
    cut_batches,
    longest_first,
    pad,
    stage,
)
from gpuclassify.inference.crossfit import crossfit_batches
from gpuclassify.inference.device import (
    exclusive_device,
    holding,
    run_in_streams,
    stream_count,
    to_device,
)
from gpuclassify.inference.loaded_model import LoadedModel
from gpuclassify.inference.memory import (
    BatchLimits,
    Budget,
    RunLimits,
    find_budget,
    halve_on_oom,
)
from gpuclassify.inference.packed.disentangled import reference_forward
from gpuclassify.inference.packed.packed_layers import NotPackableError
from gpuclassify.models.networks import TokenAverage
from gpuclassify.settings.options import ModelOptions
from gpuclassify.tokenizing.text_tokenizer import TokenBatch
from gpuclassify.workers.device_report import note_bfloat16, watched
from gpuclassify.workers.run_context import RunStats, advance


def run(
    model: LoadedModel,
    key: Hashable,
    blocks: Iterable[TokenBatch],
    settings: ModelOptions,
    stats: RunStats,
) -> np.ndarray:
    """Compute the model's outputs for every text, float32 (texts, outputs), in input order.

    For a token classifier, the result is an object array with one array per text instead, float32
    (tokens, columns), with the columns of `LoadedModel.reduce`, not logits. Each of the `blocks` is
    batched on its own. The device is locked while a block runs, and while outputs are copied. The
    model's batch limits are cached in this process under `key`. Counts and times are added to
    `stats`, and numbers of finished texts to the current part's progress. Raises NotPackableError
    if ``engine="packed"`` is set and the model cannot run without padding, and
    DocumentTooLargeError if one text does not fit into memory.
    """
    outputs: list[torch.Tensor] = []
    positions: list[np.ndarray] = []
    by_text: list[np.ndarray] = []
    texts = 0
    with watched(model.device, stats):
        for tokens in filter(len, blocks):
            with _device_for(model, settings, stats):
                for group in _groups(model, tokens):
                    part = tokens if len(group) == len(tokens) else tokens.take(group)
                    for rows, values in _run_batches(model, key, part, settings, stats):
                        outputs.append(values)
                        positions.append(group[rows] + texts)
                        advance(len(rows))
                if model.is_by_token:
                    by_text.append(
                        _split_by_text(_fetch(outputs), positions, tokens.lengths, texts)
                    )
                    outputs, positions = [], []
            texts += len(tokens)
            stats.tokens += int(tokens.offsets[-1])
        if model.is_by_token:
            note_bfloat16(settings.has_free_dtype, model.device, stats)
            return np.concatenate([np.empty(0, dtype=object), *by_text])
        if not outputs:
            return np.zeros((0, model.output_size), dtype=np.float32)
        with _device_for(model, settings, stats):
            # Outputs stay on the device until here: one copy instead of one wait for every batch.
            fetched = _fetch(outputs)
    note_bfloat16(settings.has_free_dtype, model.device, stats)
    result = np.empty((texts, fetched.shape[1]), dtype=fetched.dtype)
    result[np.concatenate(positions)] = fetched  # if a row ran twice, its later outputs win
    return result


def _fetch(outputs: list[torch.Tensor]) -> np.ndarray:
    return torch.cat(outputs).cpu().numpy()


def _split_by_text(
    fetched: np.ndarray, positions: list[np.ndarray], lengths: np.ndarray, first: int
) -> np.ndarray:
    """Split a block's outputs, (tokens, outputs), into one array per text, in input order."""
    rows = np.concatenate(positions) - first  # `positions` are indices among all blocks' texts
    result = np.empty(len(lengths), dtype=object)
    for row, part in zip(rows, np.split(fetched, np.cumsum(lengths[rows])[:-1]), strict=True):
        result[row] = part
    return result


def run_alone(model: LoadedModel, tokens: TokenBatch, side: str) -> np.ndarray:
    """Compute the outputs of the single text in `tokens`, without batches, limits or statistics.

    They are float32 (outputs,). A token classifier's are logits, (tokens, labels), unlike in `run`.
    """
    with exclusive_device(model.device, model.dtype):
        staged = stage(tokens, model.device)
        batch = pad(staged, np.array([0]), model.pad_id, side, model.type_pad_id)
        outputs = model.forward(batch, side)
        return (outputs if model.is_by_token else outputs[0]).cpu().numpy()


@contextlib.contextmanager
def _device_for(model: LoadedModel, settings: ModelOptions, stats: RunStats) -> Iterator[None]:
    is_reference = settings.engine == "reference"
    code = reference_forward() if is_reference else contextlib.nullcontext()
    with holding(model.device, model.dtype, stats), code:
        yield


def _groups(model: LoadedModel, tokens: TokenBatch) -> list[np.ndarray]:
    """Return text indices, grouped by the texts' counts of ``model.counted_id`` if not None."""
    if model.counted_id is None:
        return [np.arange(len(tokens))]
    counts = np.add.reduceat(tokens.ids == model.counted_id, tokens.offsets[:-1])
    return [np.flatnonzero(counts == count) for count in np.unique(counts)]


def _run_batches(
    model: LoadedModel, key: Hashable, tokens: TokenBatch, settings: ModelOptions, stats: RunStats
) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
    """Run a block of tokenized texts in batches; yield text indices and outputs of each batch.

    Outputs are on the device, and reduced. If a text is yielded twice, its later outputs count.
    """
    if isinstance(model.module, TokenAverage):  # takes no more memory than the tokens
        flat = (tokens.ids, tokens.offsets[:-1].astype(np.int32))
        values = model.module.average(*(to_device(part, model.device) for part in flat))
        return iter([(np.arange(len(tokens)), values)])
    is_packed = _is_packed(model, settings)
    # A packed batch has no padding. Heads that locate the end of a text expect the right side.
    side = "right" if is_packed else model.padding_side(settings.padding_side)
    if is_packed or settings.engine == "reference":
        key = (key, "packed" if is_packed else "reference")
    limits = RunLimits(key, lambda: _find_budget(model, settings, side, is_packed))
    is_single = model.needs_single_rows or settings.engine == "reference"
    most_rows = 1 if is_single else settings.batch_size
    is_equal_length = not is_packed and most_rows != 1 and not model.is_padding_safe(side)
    streams = stream_count(model.device)
    share = -(-int(tokens.lengths.sum()) // streams)

    def current_limits() -> BatchLimits:
        known = limits.current()
        stats.raise_peak("peak_planned_bytes", known.planned_bytes)
        # Split a short block over all streams: one batch would leave the others idle.
        most_tokens = min(known.max_tokens, share) if streams > 1 else known.max_tokens
        return replace(
            known,
            max_tokens=most_tokens,
            max_rows=most_rows,
            is_equal_length=is_equal_length,
            is_packed=is_packed,
        )

    counting = threading.Lock()

    def step(batch: PaddedBatch, start: int, stop: int) -> torch.Tensor:
        part = batch.part(start, stop)
        output = model.reduce(model.forward(part, side), settings.keeps_all_scores)
        with counting:
            stats.batches += 1
            stats.padded_tokens += part.run_tokens
        return output

    def remember(batch: PaddedBatch, count: int) -> None:
        with counting:
            stats.out_of_memory += 1
        limits.lower(count, -(-batch.run_tokens // len(batch.rows)))

    def run_batch(batch: PaddedBatch) -> tuple[np.ndarray, torch.Tensor]:
        batch = replace(batch, is_packed=is_packed)
        outputs = halve_on_oom(
            functools.partial(step, batch), 0, len(batch.rows), functools.partial(remember, batch)
        )
        return batch.rows, torch.cat(outputs)

    batches = _batches(model, tokens, settings, side, current_limits)
    return run_in_streams(run_batch, batches, model.device)


def _batches(
    model: LoadedModel,
    tokens: TokenBatch,
    settings: ModelOptions,
    side: str,
    current_limits: Callable[[], BatchLimits],
) -> Iterator[PaddedBatch]:
    staged = stage(tokens, model.device)
    if settings.loader == "crossfit":
        yield from crossfit_batches(staged, model.pad_id, side, current_limits, model.type_pad_id)
    else:
        lengths = tokens.lengths
        order = longest_first(lengths) if settings.sort_by_length else np.arange(len(tokens))
        for start, stop in cut_batches(lengths[order], current_limits):
            yield pad(staged, order[start:stop], model.pad_id, side, model.type_pad_id)
    if side == "left":
        # A decoder reads a row's last token that is not the padding id. If a row has no other id,
        # it reads the first column, which is padding if other rows are longer: run it again alone.
        has_other = np.logical_or.reduceat(tokens.ids != model.pad_id, tokens.offsets[:-1])
        for row in np.flatnonzero(~has_other):
            yield pad(staged, np.array([row]), model.pad_id, side, model.type_pad_id)


def _is_packed(model: LoadedModel, settings: ModelOptions) -> bool:
    if settings.engine not in ("auto", "packed"):
        return False
    if settings.engine == "auto":
        return model.is_packable
    try:
        return model.packed_layers() is not None
    except NotPackableError as err:
        raise NotPackableError(
            f'{type(model.module).__name__} does not run with engine="packed": {err}; '
            'pass engine="auto", which runs it with padding'
        ) from err


def _find_budget(model: LoadedModel, settings: ModelOptions, side: str, is_packed: bool) -> Budget:
    if model.needs_single_rows or settings.engine == "reference":
        return Budget(BatchLimits(model.max_tokens, max_rows=1))

    def probe(rows: int, width: int) -> None:
        # If the batch has several texts, one has another length, so that padding is measured, too.
        lengths = np.full(rows, width)
        if is_packed:
            lengths = np.full(MOST_RECTANGLE * (rows - 1) + 1, -(-width // MOST_RECTANGLE))
            lengths[0] = width
        elif rows > 1:
            lengths[-1] = 1
        batch = pad(model.probe(lengths), np.arange(len(lengths)), model.pad_id, side)
        batch = replace(batch, is_packed=is_packed)
        model.forward(batch, side)

    return find_budget(
        model.device,
        probe,
        model.max_tokens,
        model=model.identity,
        precision=str(model.dtype),
        path="packed" if is_packed else f"padded {side}",
        width=model.width,
        score_rule=model.score_rule,
    )

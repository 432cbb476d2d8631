"""Run models with equal leading layers together, so that those layers run once for all."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuclassify.mapping.partition_map import PartitionMap
from gpuclassify.mapping.runners import (
    EncoderRunner,
    Runner,
    current_run_windows,
    run_windows,
)
from gpuclassify.workers.run_context import RunStats, set_variable

if TYPE_CHECKING:
    from gpuclassify.inference.leading_layers import Follower, Shared
    from gpuclassify.inference.loaded_model import LoadedModel
    from gpuclassify.tokenizing.prefetch import TokenSource, TokenStream

# Pairs of models without equal leading layers: keys and maximum text lengths of both.
_SHARE_NOTHING: set[Hashable] = set()
# Settings and sizes that must be equal in models that run together.
_READING = (
    *("text_field", "text_template", "max_chars", "batch_size", "sort_by_length", "padding_side"),
    *("loader", "engine", "long_text", "window_overlap", "end_chars", "unpack_inference_batch"),
    *("pairing", "keeps_all_scores"),
)
_SIZES = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")


def shared_layers(mappers: Sequence[PartitionMap]) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that lets the mappers' models run equal leading layers only once.

    In its block, when a mapper runs its model, models of later mappers that share layers run on the
    same batches. Their outputs are cached until the block ends.
    """
    return set_variable(current_run_windows, _SharedOutputs(mappers).run_windows)


class _SharedOutputs:
    """Cache, for one partition, of outputs of models that ran with an earlier mapper's model."""

    def __init__(self, mappers: Sequence[PartitionMap]) -> None:
        self._mappers = mappers
        # Digests of windows, and outputs, float32 (windows, outputs), by model.
        self._outputs: dict[Hashable, tuple[list[Hashable], np.ndarray]] = {}

    def run_windows(
        self, runner: EncoderRunner, model: LoadedModel, source: TokenSource, stats: RunStats
    ) -> tuple[TokenStream, np.ndarray]:
        """Return the windows (token sequences) of texts, and outputs, a row per distinct window.

        If an earlier call has run this model, only windows without cached outputs are run.
        Otherwise, later mappers' models that share layers run with it, and their outputs are
        cached.
        """
        from gpuclassify.inference import engine
        from gpuclassify.inference.leading_layers import ModelsInStep
        from gpuclassify.tokenizing.prefetch import TokenStream

        key = runner.run_key(model)
        if key in self._outputs:
            known, outputs = self._outputs[key]
            stream = TokenStream(source, stats, known=known)
            new = engine.run(model, key, stream, runner.options, stats)
            stats.shared_windows = int((stream.positions < len(known)).sum())
            stats.folded_windows -= stats.shared_windows
            return stream, np.concatenate([outputs, new]) if len(new) else outputs
        with contextlib.ExitStack() as leases:
            followers = dict(self._followers(runner, model, leases))
            if not followers:
                return run_windows(runner, model, source, stats)
            stream = TokenStream(source, stats)
            keeps_all = runner.options.keeps_all_scores
            in_step: Any = ModelsInStep(model, [*followers.values()], keeps_all)
            fewest = min(follower.shared.layers for follower in followers.values())
            of = next(iter(followers.values())).shared.total
            stats.peak_sharing = [1 + len(followers), fewest, of]
            outputs = engine.run(in_step, (key, *followers), stream, runner.options, stats)
        for follower_key, follower in reversed(followers.items()):
            outputs, others = _split(outputs, follower.width(keeps_all))
            rows = np.arange(len(others))
            if follower.passing is not None:
                # Outputs of windows that this model has not run are NaN.
                rows = np.flatnonzero(~np.isnan(others).all(axis=1))
            self._outputs[follower_key] = [stream.new_keys[row] for row in rows], others[rows]
        return stream, outputs

    def _followers(
        self, runner: EncoderRunner, model: LoadedModel, leases: contextlib.ExitStack
    ) -> Iterator[tuple[Hashable, Follower]]:
        """Yield (`run_key`, `Follower`) for later models that share leading layers with `model`.

        Each runs on windows that pass the filters of the mappers before it; the search ends after a
        mapper whose filter cannot be evaluated on these windows. The models stay loaded until
        `leases` is closed.
        """
        from gpuclassify.inference.leading_layers import Follower

        mappers = self._mappers
        before: Any = next((m for m in mappers if _encoder_of(m) is runner), None)
        if before is None or runner.options.engine == "reference":
            return
        keys = {*self._outputs}
        for mapper in mappers[mappers.index(before) + 1 :]:
            passing = None
            if before.drops_rows:
                is_by_text = type(before.runner) is EncoderRunner
                if not is_by_text or before.options.has_windows:
                    return  # one window does not decide whether its text passes
                passing = functools.partial(_passing, before.heads)
            encoder, shared = _encoder_of(mapper), None
            if encoder is not None and _read_alike(encoder, runner):
                key = encoder.run_key(model)
                if key not in keys:
                    other, shared = _lease_follower(encoder, runner, model, leases)
            if shared and shared.layers:
                keys.add(key)
                yield key, Follower(other, shared, passing)
                before = mapper
            elif mapper.drops_rows:
                return


def _encoder_of(mapper: PartitionMap) -> EncoderRunner | None:
    runner = getattr(mapper, "runner", None)
    return runner.encoder if isinstance(runner, Runner) else None


def _split(outputs: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Split each window's outputs, and return (all but the last `width`, the last `width`)."""
    if outputs.dtype != object:
        first, last = np.split(outputs, [-width], axis=1)
        return first, last
    first, last = np.empty_like(outputs), np.empty_like(outputs)
    for row, values in enumerate(outputs):
        first[row], last[row] = values[:, :-width], values[:, -width:]
    return first, last


def _passing(heads: Sequence[Any], outputs: np.ndarray) -> np.ndarray:
    """Return the mask of windows whose raw `outputs` pass the filters of all heads."""
    passed = np.ones(len(outputs), dtype=bool)
    with np.errstate(all="ignore"):  # non-finite outputs are computed again later
        for head in heads:
            for passes in head.passes(head.activate(outputs[..., head.outputs])).values():
                passed &= passes
    return passed


def _read_alike(encoder: EncoderRunner, leader: EncoderRunner) -> bool:
    """Return whether both runners read texts alike, with models of equal size and dtype."""
    ours, theirs = (
        (
            type(runner),
            *(getattr(runner.options, name) for name in _READING),
            *(runner.model.checkpoint.sizes.get(name) for name in _SIZES),
            *(runner.model.prompt, runner.scores_windows, runner.device_and_dtype()),
        )
        for runner in (encoder, leader)
    )
    return ours == theirs


def _lease_follower(
    encoder: EncoderRunner,
    leader: EncoderRunner,
    first: LoadedModel,
    leases: contextlib.ExitStack,
) -> tuple[Any, Shared]:
    """Load the model of `encoder`; return it, and the leading layers that it shares with `first`.

    `first` is the loaded model of `leader`. If layers are shared, the other model stays loaded
    until `leases` is closed. It is None if it was not loaded, because memory is short or an earlier
    call found no shared layers.
    """
    from gpuclassify.inference.leading_layers import NOTHING, shared_layers
    from gpuclassify.inference.memory import free_bytes
    from gpuclassify.inference.residency import MODELS

    key, leader_key = (one.model_key(first.device, first.dtype) for one in (encoder, leader))
    pair = (key, encoder.options.max_seq_length, leader_key, leader.options.max_seq_length)
    if pair in _SHARE_NOTHING:
        return None, NOTHING
    needed = 0 if key in MODELS else sum(encoder.model.weights_bytes(first.dtype).values())
    if needed > free_bytes(first.device):
        return None, NOTHING
    with contextlib.ExitStack() as lease:
        model = lease.enter_context(encoder.lease(first.device, first.dtype))
        ours, theirs = encoder.text_tokenizer(model), leader.text_tokenizer(first)
        shared = NOTHING
        if (ours.fingerprint, ours.max_tokens) == (theirs.fingerprint, theirs.max_tokens):
            shared = shared_layers(first, model)
        if shared.layers:
            leases.enter_context(lease.pop_all())
        else:
            _SHARE_NOTHING.add(pair)
        return model, shared

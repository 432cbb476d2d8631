"""Leading layers with equal weights in several models, run once for all of these models.

Checkpoints trained on a frozen trunk have bit-equal leading layers, such as 24 of 28 layers of
FinePDFs' English classifiers. Such models run batch by batch in step: the first model's states
after these layers are passed to the others, which run only their remaining layers.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from gpuclassify.inference.batching import PaddedBatch, pad
from gpuclassify.inference.device import exclusive_device, to_device
from gpuclassify.inference.layer_states import LayerStates, current_states
from gpuclassify.inference.linear import share_arranged
from gpuclassify.inference.loaded_model import LoadedModel
from gpuclassify.inference.packed.disentangled import fast_encoder
from gpuclassify.inference.packed.packed_layers import FAILURES, PackedLayers
from gpuclassify.workers.device_errors import (
    is_broken_device,
    is_out_of_memory,
    with_memory_released,
)
from gpuclassify.workers.run_context import set_variable

logger = logging.getLogger(__name__)

# Settings, by full name or by part of a name, that do not affect a network's layers. Models that
# differ in any other setting share nothing.
_WITHOUT_EFFECT = frozenset(
    {
        *("_name_or_path", "architectures", "transformers_version", "torch_dtype", "dtype"),
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "use_cache"),
        *("gradient_checkpointing", "reference_compile", "tie_word_embeddings"),
    }
)
_FOR_HEADS_OR_TRAINING = ("classifier", "dropout", "drop_", "initializer", "init_", "pooler")
_PROBE_TOKENS = (200, 24, 5)  # lengths of the texts on which two models' states are compared

# Function from a model's raw outputs, float32 (texts, outputs), to a mask of the texts that the
# next model runs, bool (texts,).
Passing = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Shared:
    """Leading layers that two models share, so that they run once for both."""

    layers: int  # number of leading layers with bit-equal weights and inputs
    total: int  # number of all layers of either model
    outputs: int  # the second model's number of outputs per text or, if it labels tokens, per token


NOTHING = Shared(0, 0, 0)
_found: weakref.WeakKeyDictionary[nn.Module, weakref.WeakKeyDictionary[nn.Module, Shared]]
_found = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Follower:
    """Model that runs after a first model, and reuses the first's output of the shared layers."""

    model: LoadedModel
    shared: Shared
    # Selects texts by the previous model's outputs. None: all texts that the previous model ran.
    passing: Passing | None

    def width(self, keeps_all_scores: bool) -> int:
        """Return the number of the model's output columns after `LoadedModel.reduce`."""
        return 2 if self.model.is_by_token and not keeps_all_scores else self.shared.outputs


class ModelsInStep:
    """Several models whose equal leading layers run once; `engine.run` handles them as one model.

    On each batch, the model `first` runs all layers, and each of `followers` its remaining layers.
    The models' outputs are concatenated along the columns, in this order, after
    `LoadedModel.reduce`, to which `keeps_all_scores` is passed. A follower skips texts that its own
    ``passing`` function, or that of a follower before it, rejects by the previous model's outputs;
    its outputs for these texts are NaN. Either all models have outputs per text, or all per token,
    and then no follower has a ``passing`` function. Attributes that are not defined here, such as
    `device` and `pad_id`, are those of `first`.
    """

    def __init__(
        self, first: LoadedModel, followers: Sequence[Follower], keeps_all_scores: bool = False
    ) -> None:
        self._first = first
        self._keeps_all_scores = keeps_all_scores
        self._followers = followers
        self._models = [first, *(follower.model for follower in followers)]
        self.identity = " + ".join(str(model.identity) for model in self._models)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)

    def is_padding_safe(self, side: str) -> bool:
        """Return whether padding on `side`, "left" or "right", changes no model's outputs."""
        return all(model.is_padding_safe(side) for model in self._models)

    def reduce(self, outputs: torch.Tensor, keeps_all_scores: bool) -> torch.Tensor:
        """Return `outputs` unchanged, because `forward` has already reduced them."""
        return outputs

    def forward(self, batch: PaddedBatch, side: str) -> torch.Tensor:
        """Return all models' reduced outputs for a batch, float32 (rows or tokens, columns)."""

        def run(model: LoadedModel, rows: PaddedBatch) -> torch.Tensor:
            return model.reduce(model.forward(rows, side), self._keeps_all_scores)

        states = LayerStates({follower.shared.layers - 1 for follower in self._followers})
        with set_variable(current_states, states):
            outputs = [run(self._first, batch)]
        rows = np.arange(len(batch.rows))
        values, part = outputs[0], batch
        for follower in self._followers:
            if follower.passing is not None and len(rows):
                rows = rows[follower.passing(values.cpu().numpy())]  # waits for the device
                part = batch.take(rows)
            if len(rows) < len(batch.rows):
                shape = len(batch.rows), follower.shared.outputs
                outputs.append(outputs[0].new_full(shape, torch.nan))
            if len(rows):
                last = follower.shared.layers - 1
                output = states.captured[last]
                if len(rows) < len(batch.rows):
                    output = _select_rows(output, rows, batch, self._first)
                with set_variable(current_states, LayerStates(injected=(last, output))):
                    values = run(follower.model, part)
                if len(rows) < len(batch.rows):
                    outputs[-1][to_device(rows, values.device)] = values
                else:
                    outputs.append(values)
        return torch.cat(outputs, dim=1)


def _select_rows(output: Any, rows: np.ndarray, batch: PaddedBatch, model: LoadedModel) -> Any:
    """Select the rows with ascending indices `rows` from a layer's output for the whole `batch`."""
    if isinstance(output, tuple | list):
        return type(output)(_select_rows(part, rows, batch, model) for part in output)
    if not isinstance(output, torch.Tensor):
        return output
    if not batch.is_packed and fast_encoder(model.module) is None:
        is_by_row = output.ndim > 1 and output.shape[0] == len(batch.rows)
        return output[to_device(rows, output.device)] if is_by_row else output
    order = np.argsort(-batch.lengths, kind="stable")  # order of the concatenated tokens
    is_kept = np.isin(order, rows)
    if output.shape[1] != len(order):  # states of all tokens, not only of first tokens
        is_kept = np.repeat(is_kept, batch.lengths[order])
    return output[:, to_device(np.flatnonzero(is_kept), output.device)]


# Shared layers of two models.


def shared_layers(first: LoadedModel, other: LoadedModel) -> Shared:
    """Return the leading layers that `other` shares with `first`, by weights and a trial run.

    Returns `NOTHING`, with 0 layers, if they share none or cannot be compared. Two models are
    compared only once; the device is locked meanwhile. If they share layers, `other` then uses the
    tensors of `first` instead of its own equal ones, in these layers and outside of the backbone's
    layers (such as embeddings), which frees memory. Layers' ``forward`` is replaced as in `_Parts`.
    """
    known = _found.setdefault(first.module, weakref.WeakKeyDictionary())
    if other.module not in known:
        compare = functools.partial(_compare, first, other)
        with exclusive_device(
            first.device, first.dtype
        ):  # other threads must not run them meanwhile
            known[other.module] = with_memory_released(compare)
        if layers := known[other.module].layers:
            models = (first.identity, other.identity)
            total = known[other.module].total
            logger.info("%d of %d layers run once for %s", layers, total, models)
    return known[other.module]


@torch.inference_mode()
def _compare(first: LoadedModel, other: LoadedModel) -> Shared:
    try:
        ours, theirs = _Parts(first), _Parts(other)
        if not _are_alike(first, other, ours, theirs):
            return NOTHING
        return _run_both(first, other, ours, theirs)
    except FAILURES as err:  # there is no list of layers, or layers cannot be skipped
        if is_out_of_memory(err) or is_broken_device(err):
            raise
        return NOTHING


def _run_both(first: LoadedModel, other: LoadedModel, ours: _Parts, theirs: _Parts) -> Shared:
    count = len(ours.layers)
    pairs = zip(ours.layers, theirs.layers, strict=True)
    are_equal = (_are_equal(one.state_dict(), another.state_dict()) for one, another in pairs)
    depth = sum(itertools.takewhile(bool, are_equal))
    if _is_first_enough(first) != _is_first_enough(other):
        depth = min(depth, count - 1)  # their last layers return states of different tokens
    if not depth:
        return NOTHING
    lengths = [min(length, first.max_tokens) for length in _PROBE_TOKENS]
    batch = pad(first.probe(lengths), np.arange(len(lengths)), first.pad_id)
    batch = replace(batch, is_packed=first.is_packable)
    states = LayerStates([depth - 1])
    ours.run(batch, states)
    expected = theirs.run(batch, LayerStates())
    if not _have_equal_input(ours, theirs):
        return NOTHING
    for rows in (np.array([0, 2]), np.arange(len(lengths))):
        output = states.captured[depth - 1]
        if len(rows) < len(lengths):
            output = _select_rows(output, rows, batch, first)
        with set_variable(current_states, LayerStates(injected=(depth - 1, output))):
            outputs = other.forward(batch.take(rows), "right")
        row_of = np.arange(len(lengths))
        if other.is_by_token:
            row_of = np.repeat(row_of, batch.lengths)
        if not other.are_close(outputs, expected[np.isin(row_of, rows)]):
            return NOTHING
    for name, tensor in ours.tensors.items():
        same = theirs.tensors.get(name)
        if same is not None and (ours.layer_of(name) or 0) < depth and torch.equal(same, tensor):
            same.data = tensor.data
    share_arranged(theirs.layers[:depth], ours.layers[:depth])
    return Shared(depth, count, expected.shape[1])


def _are_alike(first: LoadedModel, other: LoadedModel, ours: _Parts, theirs: _Parts) -> bool:
    """Tell whether two models may share layers, judging by their settings, devices and dtypes."""
    settings = [
        {
            name: value
            for name, value in parts.backbone.config.to_dict().items()
            if name not in _WITHOUT_EFFECT
            and not any(word in name for word in _FOR_HEADS_OR_TRAINING)
        }
        for parts in (ours, theirs)
    ]
    makeup = [
        (
            *(type(parts.backbone), len(parts.layers), model.device, model.dtype, model.pad_id),
            *(model.type_pad_id, model.counted_id, model.accepts_positions, model.is_packable),
        )
        for model, parts in ((first, ours), (other, theirs))
    ]
    is_plain = not any(
        model.is_autocast or model.needs_single_rows or model.adapts_to_length
        for model in (first, other)
    )
    return is_plain and settings[0] == settings[1] and makeup[0] == makeup[1]


def _is_first_enough(model: LoadedModel) -> bool:
    return model.is_packable and model.packed_layers().is_first_enough


def _are_equal(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


def _have_equal_input(ours: _Parts, theirs: _Parts) -> bool:
    """Tell whether two models, which have run a batch, pass equal inputs to their layers.

    Compares weights outside of the layers, unless they are used only after the last one. False if a
    model did not call each layer once, in order.
    """
    if any(parts.called != list(range(len(parts.layers))) for parts in (ours, theirs)):
        return False  # a layer is called twice, or not at all
    first, other = (
        {
            name: tensor
            for name, tensor in parts.tensors.items()
            if parts.layer_of(name) is None and name.rpartition(".")[0] not in parts.late
        }
        for parts in (ours, theirs)
    )
    return _are_equal(first, other)


class _Parts:
    """Layers and backbone tensors of a model, for its comparison with another model.

    The layers' ``forward`` is replaced for good, unless a `DisentangledEncoder` has them, so that
    they can take their outputs from `current_states`.
    """

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self.layers = PackedLayers(model.module).layers
        parts = (part for part in model.module.modules() if isinstance(part, PreTrainedModel))
        self.backbone: Any = next(parts).base_model
        names = (name for name, part in self.backbone.named_modules() if part is self.layers)
        self._layers_name = next(names, "")
        self.late: set[str] = set()  # modules that run only after the last layer
        self.called: list[int] = []  # numbers of layers in the order of calls
        if fast_encoder(model.module) is None:  # a `DisentangledEncoder` reads `current_states`
            for number, layer in enumerate(self.layers):
                if getattr(layer.forward, "func", None) is not _run_layer:
                    layer.forward = functools.partial(_run_layer, number, layer.forward)

    @functools.cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(
            [
                *self.backbone.named_parameters(remove_duplicate=False),
                *self.backbone.named_buffers(remove_duplicate=False),
            ]
        )

    def layer_of(self, name: str) -> int | None:
        """Return the index of the layer with the backbone's tensor `name`; None if none has it."""
        rest = name.removeprefix(f"{self._layers_name}.")
        return None if rest == name else int(rest.partition(".")[0])

    def run(self, batch: PaddedBatch, states: LayerStates) -> torch.Tensor:
        """Run a batch padded on the right; return its outputs, and update `called` and `late`."""
        early: set[str] = set()

        def note(name: str, *_: object) -> None:
            is_late = len(states.calls) >= len(self.layers)
            (self.late if is_late else early).add(name)

        with contextlib.ExitStack() as stack:
            for name, part in self.backbone.named_modules():
                hook = part.register_forward_pre_hook(functools.partial(note, name))
                stack.callback(hook.remove)
            stack.enter_context(set_variable(current_states, states))
            outputs = self._model.forward(batch, "right")
        self.late -= early
        self.called = states.calls
        return outputs


def _run_layer(
    number: int, forward: Callable[..., Any], *arguments: object, **named: object
) -> Any:
    states = current_states.get()
    if states is None:
        return forward(*arguments, **named)
    return states.output_of(number, functools.partial(forward, *arguments, **named))

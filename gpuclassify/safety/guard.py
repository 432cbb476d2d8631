"""Poisoned instruction data, by the inner state of a guard model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from gpuclassify import hub
from gpuclassify.checks import check_optional_texts, check_text
from gpuclassify.classifiers.base import LabelMapper
from gpuclassify.classifiers.outputs import sigmoid
from gpuclassify.models.checkpoint import CheckpointError
from gpuclassify.models.tensors import compare_shapes
from gpuclassify.partition_map import NewColumns
from gpuclassify.safety.lora import (
    BASE_MODEL,
    DEFENSIVE,
    MAX_TOKENS,
    LoraCheckpoint,
    read_required_json,
)
from gpuclassify.safety.lora_mapper import AdaptedMapper, AdaptedOptions, adapter_key

if TYPE_CHECKING:
    from gpuclassify.inference.loaded_model import LoadedModel
    from gpuclassify.safety.decoder import Decoder

POISONED_FROM = 0.5


@dataclass(frozen=True, kw_only=True)
class GuardOptions(AdaptedOptions):
    """Settings of the instruction data guard, beside those of `AdaptedOptions`.

    Attributes
    ----------
    adapter : str
        Hub name or directory of the adapter that the guard was trained on.
    adapter_revision : str, optional
        Branch, tag or commit of `adapter` on the Hub.
    score_field : str, optional
        Output column (float32) of the poisoning score, 0 to 1.
    filter_by : bool or list of bool, optional
        Keep only rows with these labels; ``False`` keeps what is not poisoned.
    """

    adapter: str = DEFENSIVE
    adapter_revision: str | None = None
    score_field: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_text("adapter", self.adapter, "a Hub name or a directory")
        check_optional_texts(self, ("score_field",), "a column name or None")
        check_optional_texts(self, ("adapter_revision",), "a branch, tag or commit, or None")

    def normal_labels(self, labels: Any) -> Any:
        """The labels to keep as a sorted tuple of bool."""
        if labels is None:
            return None
        several = [labels] if isinstance(labels, bool) else labels
        if not isinstance(several, Iterable) or not all(isinstance(one, bool) for one in several):
            raise TypeError(f"filter_by={labels!r}: pass True, False or a list of them")
        if not several:
            raise ValueError("filter_by=[] names no label: pass True or False, or None for all")
        return tuple(sorted(set(several)))


class InstructionDataGuardClassifier(AdaptedMapper, LabelMapper):
    """Finds instruction data that was poisoned to plant a trigger in a model.

    Expects texts in the form ``Instruction: ... Input: ... Response: ...`` as the model card gives
    it. Reads the last state of LlamaGuard-7b with the adapter of Aegis, in one pass; on one worker
    both classifiers share the decoder.

    Parameters
    ----------
    model : str, default "nvidia/instruction-data-guard"
    adapter : str, default "nvidia/Aegis-AI-Content-Safety-LlamaGuard-Defensive-1.0"
    base_model : str, default "meta-llama/LlamaGuard-7b"
        Gated: ask for access on its page, and pass ``token=``.
    label_field : str, default "is_poisoned"
        Output column (boolean): whether the score is at least 0.5.
    score_field : str, default "instruction_data_guard_poisoning_score"
    max_seq_length : int, default 4096
    **options
        See `gpuclassify.safety.guard.GuardOptions`.

    Examples
    --------
    >>> guard = InstructionDataGuardClassifier(filter_by=False, token="hf_...")  # doctest: +SKIP
    >>> ddf = ddf.pipe(guard)  # doctest: +SKIP
    """

    Options = GuardOptions
    family = "guard"
    purpose = "poisoned instruction data"
    licence = "NVIDIA Open Model License"
    defaults = {
        "model": "nvidia/instruction-data-guard",
        "base_model": BASE_MODEL,
        "label_field": "is_poisoned",
        "score_field": "instruction_data_guard_poisoning_score",
        "max_seq_length": MAX_TOKENS,
        "padding_side": "right",  # which a decoder needs no mask for
    }

    @property
    def labels(self) -> list[Any]:
        """``False`` and ``True``."""
        return [False, True]

    @property
    def adapter(self) -> str:
        """Hub name or directory of the adapter."""
        return self.options.adapter

    def read_checkpoint(self) -> LoraCheckpoint:
        """Read what guard, adapter and decoder declare; no weights."""
        checkpoint = super().read_checkpoint()
        config = read_required_json(
            self.identity, "config.json", "is no saved model", self.options.cache_dir
        )
        hidden_size = checkpoint.sizes["hidden_size"]
        if config.get("input_dim") != hidden_size:
            raise CheckpointError(
                f"{self.identity.name} reads states of size {config.get('input_dim')}, and "
                f"{checkpoint.base.name} has states of size {hidden_size}: pass the base_model= "
                "that the guard was trained on"
            )
        return replace(checkpoint, config_json=json.dumps(config))

    def check_weights(self) -> None:
        """Raise CheckpointError if guard, adapter and base do not fit each other."""
        from gpuclassify.safety.guard_network import guard_shapes

        super().check_weights()
        found = hub.read_tensor_shapes(self.identity, cache_dir=self.options.cache_dir)
        compare_shapes(self.identity.name, found, guard_shapes(self.checkpoint.config))

    def output_fields(self) -> list[pa.Field]:
        """The columns as far as they are named: label, score and decision."""
        return self.named_fields(
            pa.field(self.label_field or "", pa.bool_()),
            pa.field(self.options.score_field or "", pa.float32()),
        )

    def activate(self, outputs: np.ndarray) -> np.ndarray:
        """Poisoning scores, float32 (texts, 1), for logits."""
        return sigmoid(outputs)

    def columns(self, scores: np.ndarray) -> NewColumns:
        """Columns for poisoning scores, float32 (texts, 1)."""
        is_poisoned = scores[:, 0] >= np.float32(POISONED_FROM)
        return self.decided(
            {
                self.label_field: pa.array(is_poisoned),
                self.options.score_field: pa.array(scores[:, 0], pa.float32()),
            },
            self.is_wanted_label(is_poisoned),
        )

    # On a worker.

    @contextlib.contextmanager
    def _lease(self, device: Any, dtype: Any) -> Iterator[LoadedModel]:
        with self._lease_decoder(device, dtype) as decoder:
            yield decoder.attached(self.checkpoint, lambda: self._load(decoder))

    def _load(self, decoder: Decoder) -> LoadedModel:
        """The guard on a decoder that it does not own."""
        from gpuclassify.inference.loaded_model import LoadedModel
        from gpuclassify.safety.guard_network import GuardNetwork, load_guard_head

        directory = hub.download(self.checkpoint.identity, cache_dir=self.options.cache_dir)
        head = load_guard_head(directory, decoder.device)
        return LoadedModel(
            module=GuardNetwork(decoder, adapter_key(self.checkpoint.adapter), head),
            device=decoder.device,
            dtype=decoder.dtype,
            new_tokenizer=decoder.new_tokenizer,
            tokenizer=decoder.tokenizer,
            pad_id=0,  # whatever it is: padding is masked, or comes after what is read
            max_tokens=MAX_TOKENS,
            accepts_positions=True,
            score_rule=None,
            output_size=1,
            needs_single_rows=False,
        )

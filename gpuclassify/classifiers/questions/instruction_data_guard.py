"""Find instruction data that was poisoned, by the hidden state of a guard model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from gpuclassify import hub
from gpuclassify.classifiers.questions.lora import (
    BASE_MODEL,
    DEFENSIVE,
    MAX_TOKENS,
    LoraCheckpoint,
    LoraModel,
    LoraOptions,
)
from gpuclassify.classifiers.questions.runners import DecoderRunner
from gpuclassify.hub import Identity
from gpuclassify.hub.saving import WEIGHTS
from gpuclassify.mapping.heads import Columns, named_columns, named_fields
from gpuclassify.mapping.label_heads import LabelHead
from gpuclassify.mapping.runners import EncoderRunner
from gpuclassify.mapping.text_mapper import TextMapper
from gpuclassify.models.activations import sigmoid
from gpuclassify.models.checkpoint import CheckpointError, read_required_json
from gpuclassify.models.tensors import compare_shapes, shapes_of
from gpuclassify.settings.declared import declared, setting
from gpuclassify.settings.options import StrPath
from gpuclassify.settings.signatures import takes

if TYPE_CHECKING:
    import torch

    from gpuclassify.classifiers.questions.decoder import Decoder
    from gpuclassify.inference.loaded_model import LoadedModel

POISONED_FROM = 0.5


def decisions(labels: Any) -> tuple[bool, ...] | None:
    """Normalize the setting `filter_by` to a sorted tuple of distinct bools; None stays None."""
    if labels is None:
        return None
    several = (labels,) if isinstance(labels, bool) else labels
    several = tuple(several) if isinstance(several, Iterable) else None
    if several is None or not all(isinstance(one, bool) for one in several):
        raise TypeError(f"filter_by={labels!r}: pass True, False or a list of them")
    if not several:
        raise ValueError("filter_by=[] names no label: pass True, False, or leave it out")
    return tuple(sorted(set(several)))


@declared
class GuardOptions(LoraOptions):
    """Settings of the instruction data guard, in addition to `LoraOptions`.

    Attributes
    ----------
    adapter : str
        Hub name or directory of the adapter that the guard was trained on.
    adapter_revision : str
        Branch, tag or commit of `adapter` on the Hub.
    score_field : str
        Output column (float32) of the poisoning score, 0 to 1.
    filter_by : bool or list of bool
        Keep only rows with these labels; ``False`` keeps rows that are not poisoned.
    """

    adapter: StrPath = DEFENSIVE
    adapter_revision: str | None = None
    score_field: str | None = None
    filter_by: bool | Collection[bool] | None = setting(  # type: ignore[assignment]
        default=None, convert=decisions
    )


class GuardModel(LoraModel):
    """Guard network on hidden states of a decoder with a LoRA adapter, all pinned to versions."""

    @property
    def repositories(self) -> list[str]:
        """Distinct Hub names or directories of guard network, LoRA adapter and decoder."""
        return list(
            dict.fromkeys([self.options.model, self.options.adapter, self.options.base_model])
        )

    def resolve_adapter(self) -> Identity:
        """Return the LoRA adapter that the guard was trained on, pinned to a commit or digest."""
        options = self.options
        return hub.resolve(options.adapter, options.adapter_revision, cache_dir=options.cache_dir)

    def read(self) -> LoraCheckpoint:
        """Read the configurations of guard, adapter and decoder, without weights."""
        checkpoint = super().read()
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


class StateRunner(DecoderRunner, EncoderRunner):
    """Runner of the guard network, which scores the last hidden state of each text in a decoder."""

    def check_weights(self) -> None:
        """Raise CheckpointError if tensors do not fit the model, or `Decoder` cannot run it."""
        import torch

        from gpuclassify.models.networks import GuardLayers

        super().check_weights()
        checkpoint = self.model.checkpoint
        shapes = hub.read_tensor_shapes(checkpoint.identity, cache_dir=self.options.cache_dir)
        with torch.device("meta"):
            layers = GuardLayers(checkpoint.config["input_dim"])
        compare_shapes(checkpoint.identity.name, shapes, shapes_of(layers.state_dict()))

    @contextlib.contextmanager
    def lease(self, device: torch.device, dtype: torch.dtype) -> Iterator[LoadedModel]:
        """Yield the loaded guard network for a ``with`` block, which keeps it in memory."""
        with self.lease_decoder(device, dtype) as decoder:
            yield decoder.attached(self.model.checkpoint, lambda: self._load(decoder))

    def _load(self, decoder: Decoder) -> LoadedModel:
        from safetensors.torch import load_file

        from gpuclassify.classifiers.questions.decoder import GuardNetwork
        from gpuclassify.inference.loaded_model import LoadedModel
        from gpuclassify.models.networks import GuardLayers

        checkpoint = self.model.checkpoint
        directory = hub.download(checkpoint.identity, cache_dir=self.options.cache_dir)
        layers = GuardLayers(checkpoint.config["input_dim"])
        layers.load_state_dict(load_file(directory / WEIGHTS))
        layers.float().to(decoder.device).eval().requires_grad_(False)

        def new_tokenizer() -> Any:
            tokenizer = decoder.new_tokenizer()
            # A special token's name in a text, such as "<s>", is text.
            tokenizer.backend_tokenizer.encode_special_tokens = True
            return tokenizer

        return LoadedModel(
            module=GuardNetwork(decoder, str(checkpoint.adapter), layers),
            device=decoder.device,
            dtype=decoder.dtype,
            new_tokenizer=new_tokenizer,
            tokenizer=decoder.tokenizer,
            pad_id=0,  # any id: padding is masked, or follows the tokens read
            max_tokens=MAX_TOKENS,
            accepts_positions=True,
            score_rule=None,
            output_size=1,
            needs_single_rows=False,
        )


class GuardHead(LabelHead):
    """Head that converts outputs to columns of poisoning score and label (poisoned or not)."""

    @property
    def labels(self) -> list[bool]:
        """Labels ``False`` (not poisoned) and ``True``."""
        return [False, True]

    def fields(self) -> list[pa.Field]:
        """Return the Arrow fields of label and score, if the settings name them."""
        return named_fields(
            (self.label_field, pa.bool_()), (self.options.score_field, pa.float32())
        )

    def activate(self, outputs: np.ndarray) -> np.ndarray:
        """Convert logits to poisoning scores by a sigmoid, float32 (rows, 1)."""
        return sigmoid(outputs)

    def columns(self, values: np.ndarray) -> Columns:
        """Return the columns in `fields` by name, from poisoning scores, float32 (texts, 1)."""
        return named_columns(
            (self.label_field, values[:, 0] >= np.float32(POISONED_FROM)),
            (self.options.score_field, values[:, 0]),
        )

    def passes(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Return ``{"label": mask}`` of texts whose label is in `filter_by`; {} if not set."""
        return self.passes_label(values[:, 0] >= np.float32(POISONED_FROM))

    def certainties(self, values: np.ndarray) -> np.ndarray:
        """Return the distance of each score from 0.5, where the label changes, float32 (texts,)."""
        return np.abs(values[:, 0] - np.float32(POISONED_FROM))


class InstructionDataGuardClassifier(TextMapper[GuardOptions]):
    """Classifier that finds instruction data poisoned to plant a trigger in a model.

    Expects texts in the form ``Instruction: ... Input: ... Response: ...``, as in
    the model card. Reads the last hidden state of LlamaGuard-7b with the adapter
    of Aegis, in one pass. On a worker, it shares the decoder with `AegisClassifier`.

    Parameters
    ----------
    label_field : str
        Output column (boolean): whether the score is at least 0.5.

    Examples
    --------
    >>> guard = InstructionDataGuardClassifier(filter_by=False, token="hf_...")  # doctest: +SKIP
    >>> ddf = ddf.pipe(guard)  # doctest: +SKIP
    """

    Options = GuardOptions
    model_type = GuardModel
    runner_type = StateRunner
    head_type = GuardHead
    family = "guard"
    purpose = "poisoned instruction data"
    is_gated = True
    licence = "NVIDIA Open Model License"
    published_labels = (False, True)
    defaults = {
        "model": "nvidia/instruction-data-guard",
        "base_model": BASE_MODEL,
        "label_field": "is_poisoned",
        "score_field": "instruction_data_guard_poisoning_score",
        "max_seq_length": MAX_TOKENS,
        "padding_side": "right",  # a decoder needs no mask for this side
    }

    if TYPE_CHECKING:

        @takes(GuardOptions)
        def __init__(self, **settings: object) -> None: ...

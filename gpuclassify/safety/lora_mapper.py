"""Mappers that run a decoder with an adapter, and share the decoder with each other."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from gpuclassify import hub
from gpuclassify.checks import check_optional_texts, check_text
from gpuclassify.model_mapper import ModelMapper
from gpuclassify.options import LabelOptions
from gpuclassify.safety.lora import (
    LoraCheckpoint,
    check_lora_tensors,
    read_lora,
)

if TYPE_CHECKING:
    from gpuclassify.safety.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class AdaptedOptions(LabelOptions):
    """Settings of mappers with an adapter on a decoder, beside those of `LabelOptions`.

    Attributes
    ----------
    base_revision : str, optional
        Branch, tag or commit of `base_model` on the Hub.
    """

    base_revision: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_text("base_model", self.base_model, "the Hub name or directory of the decoder")
        check_optional_texts(self, ("base_revision",), "a branch, tag or commit, or None")


class AdaptedMapper(ModelMapper):
    """Runs a decoder with a low-rank adapter.

    The decoder is in memory once, whichever adapters and mappers use it. It runs in bfloat16 on
    CUDA and in float32 on a CPU, unless `dtype` says otherwise.
    """

    is_gated = True

    @property
    def adapter(self) -> str:
        """Hub name or directory of the adapter."""
        return self.options.model

    @property
    def repositories(self) -> list[str]:
        """The model, its adapter and the decoder that both stand on."""
        return list(dict.fromkeys([self.options.model, self.adapter, self.options.base_model]))

    @property
    def checkpoint(self) -> LoraCheckpoint:
        """What model, adapter and decoder declare, read once."""
        return cast(LoraCheckpoint, super().checkpoint)

    def read_checkpoint(self) -> LoraCheckpoint:
        """Read what model, adapter and decoder declare; no weights."""
        cache_dir = self.options.cache_dir
        adapter = self.identity
        if self.adapter != self.options.model:
            revision = self.options.adapter_revision
            adapter = hub.resolve(self.adapter, revision, cache_dir=cache_dir)
        options = self.options
        base = hub.resolve(options.base_model, options.base_revision, cache_dir=cache_dir)
        return read_lora(self.identity, base, adapter, cache_dir)

    def check_weights(self) -> None:
        """Raise CheckpointError if base and adapter do not fit each other."""
        check_lora_tensors(self.checkpoint, self.options.cache_dir)

    def prepare(self) -> None:
        """Check the directories among the parts too; see `ModelMapper.prepare`."""
        if self._can_read_checkpoint():
            for part in (self.checkpoint.base, self.checkpoint.adapter):
                if part.is_directory:  # refuses files that changed since
                    hub.download(part, cache_dir=self.options.cache_dir)
        super().prepare()

    # On a worker.

    def _device_and_dtype(self) -> tuple[Any, Any]:
        import torch

        device, dtype = super()._device_and_dtype()
        if device.type == "cpu" and self.options.dtype is None:
            dtype = torch.float32
        return device, dtype

    def _decoder_key(self, device: Any, dtype: Any) -> tuple[Any, ...]:
        return (self.checkpoint.base, str(device), str(dtype))

    def _is_own_model(self, key: Any) -> bool:
        return key[0] == self.checkpoint.base

    def _lease(self, device: Any, dtype: Any) -> Any:
        return self._lease_decoder(device, dtype)

    @contextlib.contextmanager
    def _lease_decoder(self, device: Any, dtype: Any) -> Iterator[Decoder]:
        """The decoder that all mappers with this base share, with this mapper's adapter in it."""
        from gpuclassify.inference.memory import free_bytes
        from gpuclassify.inference.residency import MODELS
        from gpuclassify.safety.decoder import load_decoder

        cache_dir = self.options.cache_dir
        base, adapter = self.checkpoint.base, self.checkpoint.adapter

        def load() -> Decoder:
            return load_decoder(hub.download(base, cache_dir=cache_dir), device, dtype)

        def needed_bytes() -> int:
            shapes = hub.read_tensor_shapes(base, cache_dir=cache_dir)
            return sum(int(np.prod(shape)) for shape in shapes.values()) * dtype.itemsize

        key = self._decoder_key(device, dtype)
        free = functools.partial(free_bytes, device)
        with MODELS.lease(key, load, needed_bytes, free) as decoder:
            decoder.add_adapter(adapter_key(adapter), hub.download(adapter, cache_dir=cache_dir))
            yield decoder


def adapter_key(adapter: hub.Identity) -> str:
    """What a decoder knows an adapter by: two revisions are two adapters."""
    return f"{adapter.name}@{adapter.revision}"

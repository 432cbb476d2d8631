"""What mappers with a LoRA adapter share: settings, the pinned model, the decoder in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from gpuclassify import hub
from gpuclassify.hub import Identity
from gpuclassify.hub.files import WEIGHTS
from gpuclassify.mapping.pinned_model import PinnedModel
from gpuclassify.mapping.runners import NetworkRunner
from gpuclassify.questions.lora import (
    ADAPTER_WEIGHTS,
    LoraCheckpoint,
    check_lora_tensors,
    read_lora,
)
from gpuclassify.settings.checks import check_text
from gpuclassify.settings.options import LabelOptions, ModelOptions

if TYPE_CHECKING:
    from gpuclassify.questions.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class LoraOptions(LabelOptions, ModelOptions):
    """Settings of mappers with an adapter on a decoder, beside those of `LabelOptions`.

    Attributes
    ----------
    base_model : str
        The decoder, which is gated: ask for access on its page, and pass `token`.
    base_revision : str
        Branch, tag or commit of `base_model` on the Hub.
    """

    base_revision: str | None = None

    def check(self) -> None:
        """See `ModelOptions.check`."""
        super().check()
        check_text("base_model", self.base_model, "the Hub name or directory of the decoder")


class LoraModel(PinnedModel):
    """A decoder with a low-rank adapter, which is the model itself."""

    @property
    def repositories(self) -> list[str]:
        """The model, and the decoder that it stands on."""
        return list(dict.fromkeys([self.options.model, self.options.base_model]))

    @property
    def checkpoint(self) -> LoraCheckpoint:
        """What model, adapter and decoder declare, read once."""
        return cast(LoraCheckpoint, super().checkpoint)

    @property
    def identities(self) -> list[Identity]:
        """The decoder, the model and its adapter."""
        checkpoint = self.checkpoint
        return list(dict.fromkeys([checkpoint.base, checkpoint.identity, checkpoint.adapter]))

    @property
    def tokenizer_home(self) -> Identity:
        """The decoder's directory."""
        return self.checkpoint.base

    @property
    def weights_files(self) -> dict[Identity, str]:
        """Decoder and adapter, and what stands on them."""
        checkpoint = self.checkpoint
        files = {checkpoint.base: WEIGHTS, checkpoint.adapter: ADAPTER_WEIGHTS}
        files.setdefault(checkpoint.identity, WEIGHTS)
        return files

    def read(self) -> LoraCheckpoint:
        """Read what model, adapter and decoder declare; no weights."""
        options = self.options
        base = hub.resolve(options.base_model, options.base_revision, cache_dir=options.cache_dir)
        return read_lora(self.identity, base, self.resolve_adapter(), options.cache_dir)

    def resolve_adapter(self) -> Identity:
        """The adapter pinned to a revision."""
        return self.identity


class DecoderRunner(NetworkRunner):
    """What runs a decoder with an adapter.

    The decoder is in memory once, whichever adapters and mappers use it.
    """

    model: LoraModel

    @property
    def resident_key(self) -> Hashable:
        """The decoder, whoever uses it."""
        return self.model.checkpoint.base

    def check_weights(self) -> None:
        """Raise CheckpointError if base and adapter do not fit each other."""
        check_lora_tensors(self.model.checkpoint, self.options.cache_dir)

    @contextlib.contextmanager
    def lease_decoder(self, device: Any, dtype: Any) -> Iterator[Decoder]:
        """The decoder that all mappers with this base share, with this mapper's adapter in it."""
        from gpuclassify.questions.decoder import load_decoder

        cache_dir, checkpoint = self.options.cache_dir, self.model.checkpoint

        def load() -> Decoder:
            directory = hub.download(checkpoint.base, cache_dir=cache_dir)
            return load_decoder(directory, device, dtype)

        key = (checkpoint.base, str(device), str(dtype))

        with self.lease_loaded(key, load, device, dtype) as decoder:
            directory = hub.download(checkpoint.adapter, cache_dir=cache_dir)
            decoder.add_adapter(adapter_key(checkpoint.adapter), directory)
            yield decoder


def adapter_key(adapter: Identity) -> str:
    """What a decoder knows an adapter by: two revisions are two adapters."""
    return f"{adapter.name}@{adapter.revision}"

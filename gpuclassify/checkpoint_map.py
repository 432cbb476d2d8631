"""CheckpointMap: what a mapper of a model is before it runs: settings, checkpoint, schema."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from gpuclassify import hub
from gpuclassify.code_digest import code_digest
from gpuclassify.columns import COLUMN_TYPES, check_column_types
from gpuclassify.coverage import coverage_fields
from gpuclassify.hub import Identity
from gpuclassify.models.checkpoint import (
    Checkpoint,
    find_tokenizer,
    position_limit,
    read_checkpoint,
)
from gpuclassify.options import ModelOptions, modern_spellings, parse_options, signature_of
from gpuclassify.partition_map import TextMap
from gpuclassify.tokenizing.placement import check_library, check_tokenizer

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

# Attributes that are no settings, and those of them that are looked up again elsewhere.
_LOOKED_UP = frozenset({"identity", "_is_out_of_reach"})
_KNOWN = _LOOKED_UP | {"options", "_known_checkpoint"}
_LONGEST_SHOWN = 80  # characters
_COMMIT = re.compile("[0-9a-f]{40}")


class CheckpointMap(TextMap):
    """Settings, and the checkpoint that they name: all that a client knows of a mapper.

    The constructor stores settings and reads nothing. The checkpoint is looked up once, when a
    dataset is given: its configuration and the headers of its weights, so that mistakes show
    before any work starts.
    """

    Options: ClassVar[type[ModelOptions]] = ModelOptions
    defaults: ClassVar[dict[str, Any]] = {}
    family: ClassVar[str] = "checkpoint"
    # What `gpuclassify models` shows of a published model.
    purpose: ClassVar[str] = ""
    licence: ClassVar[str] = ""
    is_gated: ClassVar[bool] = False
    # Output columns that a subclass declares: name to one of COLUMN_TYPES.
    new_columns: ClassVar[Mapping[str, str]] = {}
    _is_out_of_reach = False  # asked once here, and again on each worker

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_column_types(cls.__qualname__, cls.new_columns)
        if "__init__" not in vars(cls):
            shown = signature_of(cls.Options, cls.defaults, ["token"])
        else:
            _self, *own = inspect.signature(cls.__init__).parameters.values()
            shown = inspect.Signature(own)
        cls.__signature__ = shown  # type: ignore[attr-defined]

    def __init__(self, **arguments: Any) -> None:
        owner = type(self).__qualname__
        given = modern_spellings(owner, self.family, arguments)
        token = given.pop("token", None)  # before anything could show or keep it
        defaults = dict(self.defaults)
        if given.get("long_text") == "windows":
            defaults.pop("max_chars", None)  # windows are there to read the whole text
        self.options: Any = parse_options(owner, self.Options, defaults, given)
        self._known_checkpoint: Checkpoint | None = None
        if token is not None:
            for name in self.repositories:
                hub.remember_token(name, token)

    # What a mapper is, for Dask, pickle and people.

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _LOOKED_UP}

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return (*self._definition(), self._pinned())

    def _definition(self) -> tuple[Any, ...]:
        """What tells this mapper from another of any class, whatever the model says."""
        owner = type(self)
        own = sorted((name, value) for name, value in vars(self).items() if name not in _KNOWN)
        return (owner.__module__, owner.__qualname__, code_digest(owner), self.options, own)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._definition() == other._definition()

    def __hash__(self) -> int:
        return hash((type(self), self.options))

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{field.name}={_short(getattr(self.options, field.name))}"
            for field in fields(self.options)
            if getattr(self.options, field.name) != self.defaults.get(field.name, field.default)
            or field.name == "model"
        )
        return f"{type(self).__qualname__}({shown})"

    @property
    def text_field(self) -> str:
        """Name of the text column."""
        return self.options.text_field

    @property
    def repositories(self) -> list[str]:
        """Every model repository or directory that this mapper may read."""
        return [name for name in (self.options.model, self.options.base_model) if name]

    @property
    def max_chars(self) -> int | None:
        """Characters that are taken of a text: all, if a column has to tell how many there were."""
        return None if coverage_fields(self.options) else self.options.max_chars

    @property
    def label_field(self) -> str | None:
        """The column whose values a summary counts, if there is one."""
        return None

    @property
    def is_overwriting(self) -> bool:
        """Whether output columns that are there already are replaced."""
        return self.options.overwrite

    # In the client.

    @functools.cached_property
    def identity(self) -> Identity:
        """The model pinned to a commit or to a digest of its directory, looked up once.

        Raises
        ------
        ModelNotFoundError, ModelAccessError, HubUnreachableError
            See `gpuclassify.hub`.
        """
        if self._known_checkpoint is not None:
            return self._known_checkpoint.identity
        return hub.resolve(
            self.options.model, self.options.revision, cache_dir=self.options.cache_dir
        )

    @property
    def checkpoint(self) -> Checkpoint:
        """The model's description, read once from its ``config.json``."""
        if self._known_checkpoint is None:
            checkpoint = self.read_checkpoint()
            self.check_checkpoint(checkpoint)
            self._known_checkpoint = checkpoint
        return self._known_checkpoint

    def read_checkpoint(self) -> Checkpoint:
        """Read what the checkpoint declares; no weights."""
        base_model, cache_dir = self.options.base_model, self.options.cache_dir
        is_own = self._build is not None
        checkpoint = read_checkpoint(
            self.identity,
            base_model=base_model,
            problem_type=getattr(self.options, "problem_type", None),
            has_own_module=is_own,
            cache_dir=cache_dir,
        )
        if is_own and self.new_columns:  # which need not be labels, whatever the file names
            checkpoint = replace(checkpoint, labels=())
        return find_tokenizer(checkpoint, base_model, cache_dir)

    def build_module(self, config: dict[str, Any]) -> nn.Module:
        """Make a torch module of one's own; override it to run another network than transformers'.

        Parameters
        ----------
        config : dict
            The checkpoint's ``config.json``; empty if it has none.

        Returns
        -------
        nn.Module
            With random weights: those in ``model.safetensors`` are loaded into it by name. Its
            ``forward(input_ids, attention_mask)`` takes int64 (rows, width) tensors, the mask with
            1 for a token and 0 for padding, and returns (rows, outputs).
        """
        raise NotImplementedError(f"{type(self).__qualname__} runs transformers' own modules")

    @property
    def _build(self) -> Callable[[dict[str, Any]], nn.Module] | None:
        is_own = type(self).build_module is not CheckpointMap.build_module
        return self.build_module if is_own else None

    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError or ValueError if the settings do not fit the checkpoint."""
        limit, is_hard = position_limit(checkpoint.sizes)
        wanted = self.options.max_seq_length
        if is_hard and limit is not None and wanted is not None and wanted > limit:
            raise ValueError(
                f"max_seq_length={wanted}, but {checkpoint.identity.name} has positions for "
                f"{limit} tokens: pass at most {limit}"
            )

    def prepare(self) -> None:
        """Check the checkpoint and give workers the token, before any work starts."""
        if self._can_read_checkpoint():
            identity = self.checkpoint.identity
            if identity.is_directory:  # nothing to fetch; refuses files that changed since
                hub.download(identity, cache_dir=self.options.cache_dir)
            self.check_weights()
            self.check_tokenizer()
        hub.share_tokens_with_workers(self.repositories)

    def check_library(self, frame: Any) -> None:
        """Raise TypeError if the GPU is to tokenize a pandas frame."""
        check_library(self.options, frame)

    def check_tokenizer(self) -> None:
        """Raise NotEligibleError if the GPU is to tokenize, and cannot by what the files say."""
        if self.options.tokenizer == "gpu":
            check_tokenizer(self.options, self.checkpoint)

    def check_weights(self) -> None:
        """Raise CheckpointError if the headers of the weights do not fit the network."""
        from gpuclassify.models.loading import check_own_module, check_tensors

        check_tensors(self.checkpoint, self.options.cache_dir, self._build)
        if self._build is not None:
            check_own_module(self.checkpoint, self._build, self.options.unpack_inference_batch)

    def _can_read_checkpoint(self) -> bool:
        """Whether the checkpoint can be read here; a client that gives `labels` need not.

        Such a client must pin the Hub revision itself, because nobody else does it once for all.
        """
        if self._is_out_of_reach:
            return False
        try:
            _ = self.checkpoint
        except (hub.HubUnreachableError, hub.ModelNotFoundError) as err:
            if getattr(self.options, "labels", None) is None:
                raise
            is_directory = hub.is_directory_name(self.options.model)
            if not is_directory and not _COMMIT.fullmatch(self.options.revision or ""):
                raise type(err)(
                    f"{err}\nWith labels= the checkpoint may be out of this machine's reach, but "
                    "its revision must then be a full commit: pass revision= with 40 hex digits"
                ) from err
            logger.warning(
                "%s cannot be read here; its settings are checked in the first partition",
                self.options.model,
            )
            self._is_out_of_reach = True
        return not self._is_out_of_reach

    def _pinned(self) -> Any:
        """What tells this model from every other: its description, or as much as is known."""
        if not self._is_out_of_reach:
            with contextlib.suppress(hub.HubUnreachableError, hub.ModelNotFoundError):
                return self.checkpoint
        return (self.options.model, self.options.revision)

    def schema(self) -> pa.Schema:
        """The new columns: the model's, and what was read of each text as far as asked for."""
        return pa.schema([*self.output_fields(), *coverage_fields(self.options)])

    def output_fields(self) -> list[pa.Field]:
        """The columns made of the model's outputs; those in `new_columns` unless overridden."""
        return [pa.field(name, COLUMN_TYPES[kind]) for name, kind in self.new_columns.items()]


def _short(value: Any) -> str:
    shown = repr(value)
    if len(shown) <= _LONGEST_SHOWN:
        return shown
    return f"<{len(shown):,} characters: {shown[:_LONGEST_SHOWN]}...>"

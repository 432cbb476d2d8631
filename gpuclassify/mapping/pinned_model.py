"""PinnedModel: a mapper's model, pinned to a revision and described without its weights."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuclassify import hub
from gpuclassify.hub import Identity
from gpuclassify.hub.files import WEIGHTS
from gpuclassify.models.adapters import ADAPTER_WEIGHTS
from gpuclassify.models.checkpoint import (
    OWN_MODULE,
    STATIC,
    Checkpoint,
    CheckpointError,
    OwnModule,
    check_ids,
    checking_values,
    find_tokenizer,
    position_limit,
    read_checkpoint,
)
from gpuclassify.models.sentence_transformers import as_cross_encoder
from gpuclassify.models.tensors import check_headers, known_shapes
from gpuclassify.models.tokenizer_backend import load_backend
from gpuclassify.settings.options import FLOAT8
from gpuclassify.settings.paths import exists

if TYPE_CHECKING:
    import numpy as np
    import torch

# Models without transformers' layers, by layout.
WITHOUT_LAYERS = {OWN_MODULE: "a network of your own", STATIC: "a static model"}

logger = logging.getLogger(__name__)

PIN = "revision= with 40 hex digits"


class PinnedModel:
    """Description of the model in a mapper's settings, pinned to a revision, without its weights.

    The constructor reads nothing; small files such as ``config.json`` are read when needed, and the
    description made of them is pickled, so that a worker runs exactly the client's revision. With
    `has_own_module`, the user's code builds the network, and ``config.json`` may have any content.
    If the user's code also makes the columns (`has_own_columns`), the file's labels are ignored.
    """

    def __init__(
        self, options: Any, has_own_module: bool = False, has_own_columns: bool = False
    ) -> None:
        self.options = options
        self.has_own_module = has_own_module
        self.has_own_columns = has_own_columns
        self._checkpoint: Checkpoint | None = None
        self._is_out_of_reach = False  # cached in this process only

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name != "identity"}
        return state | {"_is_out_of_reach": False}

    @property
    def repositories(self) -> list[str]:
        """Hub names or local directories of the model and its base model, as in the settings."""
        return [name for name in (self.options.model, self.options.base_model) if name]

    @functools.cached_property
    def identity(self) -> Identity:
        """Name of the model with its commit, or with a digest of its local directory; cached."""
        if self._checkpoint is not None:
            return self._checkpoint.identity
        options = self.options
        return hub.resolve(options.model, options.revision, cache_dir=options.cache_dir)

    @property
    def checkpoint(self) -> Checkpoint:
        """Description of the model, read from its ``config.json`` and similar files, and cached."""
        while self._checkpoint is None:
            try:
                with checking_values(self.repositories[0]):
                    checkpoint = self.read()
                    self.check(checkpoint)
                    hash(checkpoint)  # raises for values other than strings, numbers and tuples
            except (OSError, ValueError):
                known = vars(self).get("identity")
                if known is None or not known.is_directory or hub.resolve(known.name) == known:
                    raise
                del self.identity  # files of the directory have been replaced
            else:
                self._checkpoint = checkpoint
        return self._checkpoint

    @property
    def is_described(self) -> bool:
        """Whether the model's description is in memory, so that `checkpoint` reads no file."""
        return self._checkpoint is not None

    @property
    def has_adapter(self) -> bool:
        """Whether the model is known to be, or to have, a LoRA adapter of a base model."""
        return self._checkpoint is not None and bool(self._checkpoint.adapter_json)

    @property
    def unpinned(self) -> str:
        """Advice for messages on how to pin the revision; empty if the settings pin it."""
        return "" if hub.is_pinned(self.options.model, self.options.revision) else PIN

    @property
    def identities(self) -> list[Identity]:
        """Distinct pinned repositories and directories to download for model and tokenizer."""
        checkpoint = self.checkpoint
        sources = [checkpoint.base, checkpoint.identity, checkpoint.tokenizer]
        return list(dict.fromkeys(source for source in sources if source is not None))

    @property
    def tokenizer_home(self) -> Identity:
        """Pinned repository or directory with the tokenizer's files."""
        return self.checkpoint.tokenizer or self.checkpoint.identity

    @property
    def prompt(self) -> str:
        """Text that the model expects before the first text of a pair; empty for single texts."""
        return self.checkpoint.prompt if self.options.pairing is not None else ""

    @property
    def pairing(self) -> tuple[Any, str] | None:
        """Query and truncation strategy for pairs of texts; None if the mapper reads single texts.

        The query, with the model's prompt, is the first text of all pairs; None if two columns make
        the pairs. For zero-shot classification, a tuple of second texts, such as hypotheses, takes
        its place: each text is paired with each of them. Strategies are named as in transformers.
        """
        pairing = self.options.pairing
        if pairing is None or not isinstance(pairing[0], str):
            return pairing
        query, truncation = pairing
        return self.prompt + query, truncation

    def prompted(self, texts: list[Any]) -> list[Any]:
        """Return the texts with the model's prompt before each text or each pair's first text.

        Texts are unchanged if all pairs have the same first text, because `pairing` has the prompt.
        """
        prompt, pairing = self.prompt, self.options.pairing
        if not prompt or (pairing is not None and isinstance(pairing[0], str)):
            return texts
        if pairing is not None and pairing[0] is None:
            return [(prompt + first, second) for first, second in texts]
        return [prompt + text for text in texts]

    def read(self) -> Checkpoint:
        """Read the checkpoint's description from its configuration files, without weights."""
        options = self.options
        checkpoint = read_checkpoint(
            self.identity,
            base_model=options.base_model,
            has_own_module=self.has_own_module,
            cache_dir=options.cache_dir,
            **options.declared,
        )
        if self.has_own_module and self.has_own_columns:
            checkpoint = replace(checkpoint, labels=())
        if options.pairing is not None:
            is_declared = options.declared.get("problem_type") is not None
            checkpoint = as_cross_encoder(checkpoint, not is_declared, options.cache_dir)
        return find_tokenizer(checkpoint, options.base_model, options.cache_dir)

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError or ValueError if a setting contradicts the model's files.

        Some layouts have one problem type, whatever the settings say. Positions may have a hard
        limit. Static models and networks of users have no layers for ``dtype="float8"``.
        """
        declared = self.options.declared.get("problem_type")
        if declared not in (None, checkpoint.problem_type):
            raise CheckpointError(
                f"problem_type={declared!r}, but the layout of {checkpoint.identity.name} makes it "
                f"a {checkpoint.problem_type} model: leave problem_type out, or pass "
                f"{checkpoint.problem_type!r}"
            )
        limit, is_hard = position_limit(checkpoint.sizes)
        wanted = self.options.max_seq_length
        if is_hard and limit is not None and wanted is not None and wanted > limit:
            raise ValueError(
                f"max_seq_length={wanted}, but {checkpoint.identity.name} has positions for "
                f"{limit} tokens: pass at most {limit}"
            )
        if getattr(self.options, "dtype", None) == FLOAT8 and checkpoint.layout in WITHOUT_LAYERS:
            raise ValueError(
                f'dtype="{FLOAT8}" is for layers of transformers, and {checkpoint.identity.name} '
                f"is {WITHOUT_LAYERS[checkpoint.layout]}: leave out dtype"
            )

    def fetch(self) -> None:
        """Download the model's files to this machine's cache, unless they are there."""
        for identity in self.identities:
            hub.download(identity, cache_dir=self.options.cache_dir)

    def check_directories(self) -> None:
        """Raise ModelChangedError if a local directory has changed since it was described."""
        for identity in self.identities:
            if identity.is_directory:
                hub.download(identity, cache_dir=self.options.cache_dir)

    def check_weights(self, module: OwnModule | None) -> None:
        """Raise CheckpointError if tensors in the weight files do not fit the network.

        `module` is the user's own network; None means the checkpoint's. Some networks are compared
        only when they are loaded, because importing torch takes seconds.
        """
        checkpoint = self.checkpoint
        if checkpoint.layout == STATIC:
            return  # reading the description has checked the header
        if module is None:
            check_headers(checkpoint, known_shapes(checkpoint), self.options.cache_dir)
            if checkpoint.base is not None:
                from gpuclassify.models.loading import build_without_memory, check_adapter

                network = build_without_memory(checkpoint)
                check_adapter(checkpoint, checkpoint.identity, network, self.options.cache_dir)
        elif not module.has_weights:
            from gpuclassify.models.loading import check_own_module, check_tensors

            check_tensors(checkpoint, self.options.cache_dir, module)
            check_own_module(checkpoint, module, self.options.unpack_inference_batch)

    def check_tokenizer(self) -> None:
        """Raise CheckpointError if the tokenizer has token ids that the model has no embedding for.

        Only a local ``tokenizer.json`` is checked, but not for own networks or static embeddings.
        """
        home = self.tokenizer_home
        file = Path(home.name, "tokenizer.json")
        is_late = self.checkpoint.layout in (OWN_MODULE, STATIC)  # ids are checked later
        if home.is_directory and not is_late and exists(file):
            check_ids(self.checkpoint, load_backend(file, file))

    def is_readable(self) -> bool:
        """Read the checkpoint's description; return False if it is out of this machine's reach.

        False is only returned if the settings have `labels`, which determine the columns, and pin
        the commit; else the error is raised. It is logged, and remembered in this process.
        """
        if self._is_out_of_reach:
            return False
        try:
            _ = self.checkpoint
        except (hub.HubUnreachableError, hub.ModelNotFoundError) as err:
            if not self.options.plans_without_model:
                raise
            if self.unpinned:
                raise type(err)(
                    f"{err}\nWith labels= the checkpoint may be out of this machine's reach, but "
                    f"its revision must then be a full commit: pass {self.unpinned}"
                ) from err
            logger.warning(
                "%s cannot be read here; its settings are checked in the first partition",
                self.repositories[0],
            )
            self._is_out_of_reach = True
        return not self._is_out_of_reach

    def describe(self) -> dict[str, Any]:
        """Return ``{"model_revision": revision}``: a commit, or the digest of a local directory."""
        return {"model_revision": self.identity.revision}

    def key(self) -> Any:
        """Return the model's part of Dask's keys: its description; its name if out of reach."""
        if not self._is_out_of_reach:
            with contextlib.suppress(hub.HubUnreachableError, hub.ModelNotFoundError):
                return self.checkpoint
        return (self.options.model, self.options.revision)

    @property
    def weights_files(self) -> dict[Identity, str]:
        """Name of the safetensors file with weights, by pinned repository or directory.

        If the weights are in shards, there is no such file: see `hub.read_tensor_shapes`.
        """
        if self.checkpoint.base is not None:
            return {self.checkpoint.base: WEIGHTS, self.checkpoint.identity: ADAPTER_WEIGHTS}
        return {self.checkpoint.identity: WEIGHTS}

    def weights_bytes(self, dtype: torch.dtype | np.dtype) -> dict[str, int]:
        """Return the bytes of each weight file's tensors, by file, if they are loaded as `dtype`.

        Keys are "name@revision/file". A user's own network counts as float32. Empty if a
        safetensors header cannot be read.
        """
        # A user's own module keeps the dtype of its weights, and torch casts inputs.
        # Embeddings have 16 bits beside 8-bit products, as all weights have during loading.
        item_bytes = 4 if self.has_own_module else max(2, dtype.itemsize)
        sizes = {}
        with contextlib.suppress(hub.HubUnreachableError, hub.ModelNotFoundError, ValueError):
            for identity, name in self.weights_files.items():
                shapes = hub.read_tensor_shapes(identity, name, cache_dir=self.options.cache_dir)
                numbers = sum(map(math.prod, shapes.values()))
                sizes[f"{identity}/{name}"] = numbers * item_bytes
            return sizes
        return {}

    def new_tokenizer(self) -> Any:
        """Return a new instance of the model's tokenizer, downloading its files but no weights."""
        from gpuclassify.models.tokenizer_files import load_tokenizer

        cache_dir = self.options.cache_dir
        directory = hub.download(self.tokenizer_home, cache_dir=cache_dir, has_weights=False)
        return load_tokenizer(self.checkpoint, directory)

"""Embedder: sentence embeddings as a list column."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from gpuclassify.mapping.columns import COLUMN_TYPES
from gpuclassify.mapping.heads import Head
from gpuclassify.mapping.pinned_model import PinnedModel
from gpuclassify.mapping.text_mapper import TextMapper
from gpuclassify.models.checkpoint import Checkpoint, CheckpointError
from gpuclassify.models.sentence_transformers import SentenceModel, read_embedding_checkpoint
from gpuclassify.settings.declared import declared, setting
from gpuclassify.settings.options import ModelOptions
from gpuclassify.settings.signatures import takes

EmbeddingDtype = Literal["float32", "float16"]
Pooling = Literal["mean", "cls", "last"]
_LEAST_LENGTH = 1e-12  # minimum divisor of a vector, as in torch


@declared
class EmbeddingOptions(ModelOptions):
    """Settings of mappers that embed texts, in addition to `ModelOptions`.

    Attributes
    ----------
    pooling : {"mean", "cls", "last"}
        Mean of a text's tokens, or its first or last token. Default: from the model's files, else
        the last token of a causal language model and the mean for any other.
    normalize : bool
        Scale embeddings to length 1. Default: from the model's files.
    truncate_dim : int
        Leading dimensions to keep. Default: from the files.
    prompt : str
        Prefix of every text, or "" for none. Default: the model's prompt.
    prompt_name : str
        One of the model's prompts, such as "query", instead of `prompt`.
    embedding_field : str
        Output column of the embedding. Default: none.
    embedding_dtype : {"float32", "float16"}
        Type of the column's numbers; float16 halves their size, and needs pandas frames.
    """

    pooling: Pooling | None = None
    normalize: bool | None = None
    truncate_dim: int | None = None
    prompt: str | None = setting(default=None, least=0)  # "" is none
    prompt_name: str | None = None
    embedding_field: str | None = None
    embedding_dtype: EmbeddingDtype = "float32"

    @property
    def declared(self) -> dict[str, Any]:
        """Dict of `pooling`, `normalize` and `truncate_dim`; None means as in the model's files."""
        return {name: getattr(self, name) for name in ("pooling", "normalize", "truncate_dim")}

    def check_together(self) -> None:
        """Raise TypeError or ValueError if settings contradict each other."""
        super().check_together()
        if self.prompt is not None and self.prompt_name is not None:
            raise ValueError(
                f"prompt={self.prompt!r} and prompt_name={self.prompt_name!r} both name a prompt: "
                "pass one of them"
            )
        if self.long_text == "lines":
            raise ValueError(
                'long_text="lines" is for scores of lines, and embeddings are none: pass '
                'long_text="windows", or make each line a row'
            )
        if self.base_model is not None:
            raise ValueError(
                f"base_model={self.base_model!r} has no meaning for embeddings, whose model "
                "carries its own sizes: leave it out"
            )


@declared
class EmbedderOptions(EmbeddingOptions):
    """Settings of `Embedder`, in addition to `EmbeddingOptions`.

    Attributes
    ----------
    embedding_field : str
        Output column: lists of `embedding_dtype` numbers, one per dimension that is kept.
    """

    embedding_field: str = "embedding"


class EmbeddingModel(PinnedModel):
    """Embedding model at a pinned commit or in a local directory."""

    @property
    def prompt(self) -> str:
        """Prefix of every text, from the settings or else the model; "" for none."""
        return self._prompt_of(sentence_model(self.checkpoint))

    def read(self) -> Checkpoint:
        """Return the model's description, read from its configuration files without weights."""
        options = self.options
        return read_embedding_checkpoint(
            self.identity, cache_dir=options.cache_dir, **options.declared
        )

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError if there is a prompt that the model would leave out of pooling."""
        super().check(checkpoint)
        sentence = sentence_model(checkpoint)
        prompt = self._prompt_of(sentence)
        if prompt and not sentence.pools_prompt:
            raise CheckpointError(
                f"{checkpoint.identity.name} leaves the prompt {prompt!r} out of its pooling, "
                'which this package does not do: use sentence-transformers, or pass prompt=""'
            )

    def _prompt_of(self, sentence: SentenceModel) -> str:
        prompt = self.options.prompt
        return sentence.prompt(self.options.prompt_name) if prompt is None else prompt


class EmbeddingHead(Head):
    """Head that converts a model's outputs to a column of embeddings."""

    def fields(self) -> list[pa.Field]:
        """Return the Arrow field of the column of embeddings, in a list."""
        options = self.options
        return [pa.field(options.embedding_field, COLUMN_TYPES[f"list<{options.embedding_dtype}>"])]

    @property
    def list_size(self) -> int:
        """Number of dimensions of an embedding after truncation; 0 if it is unknown."""
        return self.model.checkpoint.embedding_width or 0

    def activate(self, outputs: np.ndarray) -> np.ndarray:
        """Scale embeddings, (rows, dimensions), to length 1 if the settings or files say so."""
        return _unit(outputs) if sentence_model(self.model.checkpoint).is_normalized else outputs

    def cut(self, vectors: np.ndarray) -> np.ndarray:
        """Return the leading dimensions that the settings or the model's files keep, or else all.

        Shortened vectors are scaled to length 1 again only with the setting ``normalize=True``.
        """
        sentence = sentence_model(self.model.checkpoint)
        if sentence.truncate_dim is None:
            return vectors
        kept = vectors[:, : sentence.truncate_dim]
        return _unit(kept) if sentence.normalizes_cut else kept

    def columns(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Return the column of embeddings by its name, with the dtype `embedding_dtype`."""
        # Normalize again, because the mean of several windows is shorter.
        vectors = self.cut(self.activate(values))
        kind = np.dtype(self.options.embedding_dtype)
        largest = np.abs(vectors).max()
        if largest > np.finfo(kind).max:
            raise OverflowError(
                f"{self.model.identity.name} gives {largest:g}, which float16 cannot hold: pass "
                'embedding_dtype="float32" or normalize=True'
            )
        return {self.options.embedding_field: vectors.astype(kind)}


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), _LEAST_LENGTH)


def sentence_model(checkpoint: Checkpoint) -> SentenceModel:
    """Return an embedding model's settings (pooling, prompts, later steps) in its description."""
    assert checkpoint.sentence is not None, "read_embedding_checkpoint describes the pooling"
    return checkpoint.sentence


class Embedder(TextMapper[EmbedderOptions]):
    """Mapper that adds embeddings of texts, equal to sentence-transformers' ``encode``.

    They are written to the list column ``embedding`` by default.

    Reads models of sentence-transformers with a transformer and a pooling, or
    with static embeddings, and possibly dense layers and a normalization; static
    models of model2vec; and any encoder or decoder that transformers saved.
    Models with other components (other poolings, chat templates) are refused by
    a CheckpointError.

    A text is first cut to `max_chars`, then the prompt is put before it, then
    both are cut to `max_seq_length` tokens, by default the model's maximum. With
    ``long_text="windows"`` or "ends", the windows' embeddings are aggregated and,
    if the model normalizes, normalized again. The prompt precedes the whole
    text, so that only the first window has it.

    Examples
    --------
    >>> ddf = Embedder()(ddf)  # doctest: +SKIP
    >>> ddf = Embedder(model="intfloat/e5-base-v2", prompt="passage: ")(ddf)  # doctest: +SKIP
    """

    Options = EmbedderOptions
    model_type = EmbeddingModel
    head_type = EmbeddingHead
    family = "embedder"
    purpose = "sentence embeddings"
    licence = "Apache-2.0"
    defaults = {"model": "sentence-transformers/all-MiniLM-L6-v2"}

    if TYPE_CHECKING:

        @takes(EmbedderOptions)
        def __init__(self, **settings: object) -> None: ...

"""TokenCounter: count the tokens that texts have for a model."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from gpuclassify import hub
from gpuclassify.frames import Texts
from gpuclassify.hub import Identity
from gpuclassify.mapping.heads import Columns, Head
from gpuclassify.mapping.pinned_model import PinnedModel
from gpuclassify.mapping.runners import Outputs, Runner
from gpuclassify.mapping.stage_counts import COUNT
from gpuclassify.mapping.text_mapper import TextMapper
from gpuclassify.mapping.token_lengths import TokenLengths
from gpuclassify.models.checkpoint import TOKENIZER_FILES, CheckpointError, some_of
from gpuclassify.models.tokenizer_backend import NO_LIMIT
from gpuclassify.settings.declared import declared
from gpuclassify.settings.options import TextOptions
from gpuclassify.settings.signatures import takes
from gpuclassify.workers.run_context import RunStats, advance

if TYPE_CHECKING:
    from gpuclassify.tokenizing.text_tokenizer import TextTokenizer

_BLOCK_CHARS = 4_000_000


@declared
class TokenOptions(TextOptions):
    """Settings of `TokenCounter`, in addition to `TextOptions`.

    Attributes
    ----------
    model : str
        Hub name or local directory of any model or tokenizer; weights are not read.
    tokens_field : str
        Output column (Int64) of the count.
    special_tokens : bool
        Also count the special tokens that the tokenizer adds to a text.
    """

    tokens_field: str = "tokens"
    special_tokens: bool = False

    def check_together(self) -> None:
        """Raise TypeError or ValueError if settings contradict each other."""
        super().check_together()
        if self.max_chars is not None:
            raise ValueError(
                f"max_chars={self.max_chars} would count the tokens of texts that are cut, which "
                "nobody can add up: leave it out, or cut the column itself"
            )


@dataclass(frozen=True)
class TokenizerFiles:
    """Pinned repository or directory with a tokenizer, in place of a model's description."""

    identity: Identity
    base: None = None
    tokenizer: None = None


class PinnedTokenizer(PinnedModel):
    """Tokenizer in a directory or Hub repository, in place of a model; weights are ignored."""

    checkpoint: TokenizerFiles  # type: ignore[assignment]

    @property
    def repositories(self) -> list[str]:
        """Name of the repository or directory, in a list."""
        return [self.options.model]

    def read(self) -> TokenizerFiles:  # type: ignore[override]
        """Return the pinned repository or directory, and check that it has tokenizer files."""
        files = hub.list_files(self.identity, cache_dir=self.options.cache_dir)
        if not TOKENIZER_FILES & set(files):
            raise CheckpointError(
                f"{self.identity.name} has no tokenizer among its files {some_of(files)}: pass the "
                "model that its texts were tokenized for, such as the one it was trained from"
            )
        return TokenizerFiles(self.identity)

    def check(self, checkpoint: object) -> None:
        """Accept any tokenizer, because all of them can count."""

    def fetch(self) -> None:
        """Download the tokenizer's files, but no weights, to the cache, unless they are there."""
        cache_dir = self.options.cache_dir
        hub.download(self.checkpoint.identity, cache_dir=cache_dir, has_weights=False)

    def weights_bytes(self, dtype: object) -> dict[str, int]:
        """Return an empty dict of bytes by file of weights, because there are no weights."""
        return {}

    def new_tokenizer(self) -> Any:
        """Load a new tokenizer of transformers from the pinned files, downloaded if need be."""
        from gpuclassify.models.tokenizer_files import read_tokenizer

        identity, cache_dir = self.checkpoint.identity, self.options.cache_dir
        directory = hub.download(identity, cache_dir=cache_dir, has_weights=False)
        return read_tokenizer(identity.name, directory, is_for_counts=True)


class CountRunner(Runner):
    """Runner that counts tokens on the CPU; outputs are int64 (texts, 1)."""

    model: PinnedTokenizer

    @property
    def libraries(self) -> tuple[str, ...]:
        """Names of the packages that tokenize, whose versions may change counts."""
        return ("tokenizers", "transformers")

    def run(self, texts: Texts, stats: RunStats, name_text: Callable[[int], str]) -> Outputs:
        """Count the tokens of distinct texts; outputs are int64 (texts, 1)."""
        from gpuclassify.tokenizing.prefetch import text_blocks

        started = time.perf_counter()
        counts = [np.zeros(0, dtype=np.int64)]
        blocks = text_blocks(texts.char_counts, _BLOCK_CHARS, _BLOCK_CHARS)
        with self.lease(*self.device_and_dtype()) as tokenizer:
            for start, stop in blocks:
                counts.append(tokenizer.count(texts[start:stop]))
                advance(stop - start)
            special = self._special(tokenizer)
        stats.tokenize_seconds += time.perf_counter() - started
        stats.windows += len(texts)
        values = np.concatenate(counts) + special
        ones, all_read = np.ones(len(texts), np.int64), np.ones(len(texts), np.float32)
        return Outputs(values[:, None], ones, all_read)

    def token_lengths(self, texts: list[str]) -> TokenLengths:
        """Return the number of tokens of each text, in one window each."""
        with self.lease(*self.device_and_dtype()) as tokenizer:
            counts = tokenizer.count(texts) + self._special(tokenizer)
        return TokenLengths(counts, counts, np.ones_like(counts), None)

    def _special(self, tokenizer: TextTokenizer) -> int:
        return tokenizer.special_tokens if self.options.special_tokens else 0

    def lease(
        self, device: object, dtype: object
    ) -> contextlib.AbstractContextManager[TextTokenizer]:
        """Return a context manager that yields the tokenizer, and keeps it in memory meanwhile."""
        from gpuclassify.inference.residency import MODELS
        from gpuclassify.tokenizing.text_tokenizer import TextTokenizer

        key = (self.resident_key, str(device), str(dtype))
        return MODELS.lease(key, lambda: TextTokenizer(self.model.new_tokenizer(), NO_LIMIT))

    def device_and_dtype(self) -> tuple[Any, Any]:
        """Return "cpu" and NumPy's int64, without importing torch."""
        return "cpu", np.dtype(np.int64)

    def batch_bytes(self) -> int:
        """Return 0 as the bytes of the largest batch, because a block of texts is small."""
        return 0


class CountHead(Head):
    """Head that converts a runner's counts to the column of token counts."""

    def fields(self) -> list[pa.Field]:
        """Return the Arrow field of the token count, in a list."""
        return [pa.field(self.options.tokens_field, pa.int64(), metadata=COUNT)]

    def columns(self, values: np.ndarray) -> Columns:
        """Return the column of token counts by its name, from the runner's int64 (texts, 1)."""
        return {self.options.tokens_field: values[:, 0]}


class TokenCounter(TextMapper):
    """Mapper that counts the tokens of texts for a model.

    Counts are exact and of whole texts. Special tokens that the tokenizer adds,
    such as ``[CLS]``, are not counted unless ``special_tokens=True``, so that
    counts add up to a corpus's budget. `model` may be any model or tokenizer;
    weights are not read, and no GPU is used.

    Examples
    --------
    >>> count = TokenCounter(model="Qwen/Qwen3-8B")
    >>> ddf = ddf.pipe(count)  # doctest: +SKIP
    >>> ddf["tokens"].sum().compute()  # doctest: +SKIP
    """

    Options = TokenOptions
    model_type = PinnedTokenizer
    runner_type = CountRunner
    head_type = CountHead
    family = "tokens"
    purpose = "tokens of texts, for any model"
    licence = "the model's"

    if TYPE_CHECKING:

        @takes(TokenOptions)
        def __init__(self, **settings: Any) -> None: ...

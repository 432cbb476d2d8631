"""Perplexity: score texts by the negative log-likelihood that a decoder gives their tokens."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from gpuclassify.classifiers.questions.lora import LoraCheckpoint, LoraModel, most_positions
from gpuclassify.classifiers.questions.runners import DecoderRunner
from gpuclassify.frames import Texts
from gpuclassify.hub import Identity
from gpuclassify.mapping.heads import FLOAT32, Columns, Head, named_columns, named_fields
from gpuclassify.mapping.runners import EncoderRunner, Outputs
from gpuclassify.mapping.stage_counts import COUNT
from gpuclassify.mapping.text_mapper import TextMapper
from gpuclassify.models.checkpoint import position_limit
from gpuclassify.settings.declared import declared, setting
from gpuclassify.settings.options import MODEL, Dtype, LongText, ModelOptions, PaddingSide
from gpuclassify.settings.signatures import takes
from gpuclassify.workers.run_context import RunStats

if TYPE_CHECKING:
    import torch

    from gpuclassify.classifiers.questions.decoder import Decoder
    from gpuclassify.inference.loaded_model import LoadedModel

MOST_TOKENS = 2_048  # default length of a window, unless the model takes fewer tokens


@declared
class PerplexityOptions(ModelOptions):
    """Settings of `Perplexity`, in addition to `ModelOptions`.

    Attributes
    ----------
    model : str
        Any decoder for ``AutoModelForCausalLM``, on the Hub or in a directory.
    max_seq_length : int
        Maximum tokens of a window. Default: 2,048, or the model's limit if it is smaller.
    window_overlap : int
        Tokens that a window shares with the one before it, which are context and not scored again.
        Default: an eighth of a window, at least 1.
    nll_field : str
        Output column (float32) of the mean negative log-likelihood per token, in nats.
    bits_per_byte_field : str
        Output column (float32) of the bits per byte of the text in UTF-8.
    tokens_field : str
        Output column (Int64) of the number of tokens that are scored.
    """

    long_text: LongText = "windows"
    dtype: Dtype | None = setting(default=None, group=MODEL)  # 8-bit products are for encoders
    padding_side: PaddingSide | None = "right"
    window_overlap: int | None = setting(default=None, least=1)  # each token has a context
    nll_field: str | None = "nll"
    bits_per_byte_field: str | None = "bits_per_byte"
    tokens_field: str | None = "nll_tokens"

    def check_together(self) -> None:
        """Raise TypeError or ValueError if settings contradict each other."""
        super().check_together()
        fixed: dict[str, Any] = {"long_text": "windows", "window_aggregation": "mean"}
        fixed |= {"base_model": None, "padding_side": "right"}
        for name, value in fixed.items():
            if (passed := getattr(self, name)) != value:
                raise ValueError(
                    f"{name}={passed!r} has no meaning for perplexity, which is that of whole "
                    "texts under model=: leave it out, and cut texts by max_chars="
                )
        if None is self.nll_field is self.bits_per_byte_field is self.tokens_field:
            raise ValueError(
                "there is no column to write: name nll_field=, bits_per_byte_field= or "
                "tokens_field="
            )

    def overlap_of(self, window_tokens: int) -> int:
        """Return the number of tokens, at least 1, that neighbouring windows share."""
        return max(1, super().overlap_of(window_tokens) or 0)

    def cut_of(self, window_tokens: int) -> dict[str, Any]:
        """Return arguments of `TextTokenizer` for windows, with special tokens once per text."""
        return {**super().cut_of(window_tokens), "has_special_once": True}


class PerplexityModel(LoraModel):
    """Decoder of `model`, pinned to a commit; a `LoraModel` without an adapter."""

    @property
    def repositories(self) -> list[str]:
        """Hub name or directory of the decoder, in a list."""
        return [self.options.model]

    def resolve_base(self) -> Identity:
        """Return the decoder, pinned to a commit, or to a digest of its directory."""
        return self.identity

    def resolve_adapter(self) -> None:
        """Return None, because there is no adapter."""
        return

    def read(self) -> LoraCheckpoint:
        """Read the decoder's configuration, without weights, and choose the length of windows.

        The length is the result's `max_tokens`.
        """
        checkpoint, asked = super().read(), self.options.max_seq_length
        most = most_positions(checkpoint.sizes) or position_limit(checkpoint.sizes)[0]
        if asked is not None and most_positions(checkpoint.sizes) and asked > most:
            raise ValueError(
                f"max_seq_length={asked} is more than the {most} tokens up to which "
                f"{self.options.model} has the same positions for all texts: pass at most that"
            )
        return replace(checkpoint, max_tokens=asked or min(most or MOST_TOKENS, MOST_TOKENS))


class LikelihoodRunner(DecoderRunner, EncoderRunner):
    """Runner of a decoder over windows of texts.

    Outputs are float32 (texts, 3): negative log-likelihood per token in nats, bits per byte, and
    the number of tokens scored. The first two are NaN if no token of the text is scored.
    """

    @contextlib.contextmanager
    def lease(self, device: torch.device, dtype: torch.dtype) -> Iterator[LoadedModel]:
        """Yield the loaded network for a ``with`` block, which keeps it in memory."""
        with self.lease_decoder(device, dtype) as decoder:
            key = (self.model.checkpoint, self._context)
            yield decoder.attached(key, lambda: self._load(decoder))

    @property
    def _context(self) -> int:
        """Number of leading tokens that a window shares with the text's window before it."""
        overlap: int = self.options.overlap_of(self.model.checkpoint.max_tokens)
        return overlap

    def _load(self, decoder: Decoder) -> LoadedModel:
        from gpuclassify.classifiers.questions.decoder import LikelihoodNetwork
        from gpuclassify.inference.loaded_model import LoadedModel

        def new_tokenizer() -> Any:
            tokenizer = decoder.new_tokenizer()
            # A special token's name in a text, such as "<s>", is text.
            tokenizer.backend_tokenizer.encode_special_tokens = True
            return tokenizer

        return LoadedModel(
            module=LikelihoodNetwork(decoder, self._context),
            device=decoder.device,
            dtype=decoder.dtype,
            new_tokenizer=new_tokenizer,
            tokenizer=decoder.tokenizer,
            pad_id=0,  # any id would do: padding is masked, or follows the tokens read
            max_tokens=self.model.checkpoint.max_tokens,
            accepts_positions=False,
            score_rule=None,
            output_size=4,
            needs_single_rows=False,
        )

    def run(self, texts: Texts, stats: RunStats, name_text: Callable[[int], str]) -> Outputs:
        """Compute likelihood, bits per byte, and number of scored tokens of each distinct text."""
        windows = super().run(texts, stats, name_text)
        assert windows.counts is not None
        starts = np.cumsum(windows.counts) - windows.counts
        # Sums over the tokens that the previous window has not scored; all in a first window.
        parts = windows.values[:, 2:].astype(np.float64)
        parts[starts] = windows.values[starts, :2]
        nats, tokens = np.add.reduceat(parts, starts, axis=0).T
        lengths = [len(text.encode("utf-8", "surrogatepass")) for text in texts]
        is_scored = tokens > 0
        per_token = np.where(is_scored, nats / np.maximum(tokens, 1), np.nan)
        bits = np.where(is_scored, nats / math.log(2) / np.maximum(lengths, 1), np.nan)
        values = np.stack([per_token, bits, tokens], axis=1).astype(np.float32)
        return Outputs(values, windows.text_windows, windows.seen_share)


class LikelihoodHead(Head):
    """Head that converts outputs to columns of likelihood, bits per byte and number of tokens."""

    def fields(self) -> list[pa.Field]:
        """Return the Arrow fields of the columns that the settings name."""
        options = self.options
        numbers = named_fields((options.nll_field, FLOAT32), (options.bits_per_byte_field, FLOAT32))
        counts = named_fields((options.tokens_field, pa.int64()))
        return [*numbers, *(field.with_metadata(COUNT) for field in counts)]

    def columns(self, values: np.ndarray) -> Columns:
        """Return the columns in `fields` by name, null for NaN; `values` are float32 (texts, 3)."""
        options = self.options
        nll, bits = (pa.array(values[:, n], FLOAT32, mask=np.isnan(values[:, n])) for n in (0, 1))
        return named_columns(
            (options.nll_field, nll),
            (options.bits_per_byte_field, bits),
            (options.tokens_field, values[:, 2].astype(np.int64)),
        )

    def certainties(self, values: np.ndarray) -> np.ndarray:
        """Return each text's mean negative log-likelihood, (texts,); 0 if no token is scored."""
        return np.nan_to_num(values[:, 0])


class Perplexity(TextMapper[PerplexityOptions]):
    """Mapper that scores texts by how well a decoder predicts them.

    Writes the mean negative log-likelihood per token, whose exponential is the
    perplexity; the bits per byte, which compare models with different tokenizers;
    and the number of tokens scored. All are computed over the whole text: a long
    text is read in windows, and each token is scored once. After the first window,
    each token has at least `window_overlap` tokens of context.

    The first token of a text has no context. It is scored only if the tokenizer
    puts a token before texts, such as ``<s>``. A text without a scored token has
    null scores. To select texts, compare columns, as in
    ``Select("bits_per_byte < 1.2")``, or divide them into buckets by score.

    Examples
    --------
    >>> perplexity = Perplexity(model="Qwen/Qwen3-0.6B-Base")
    >>> ddf = ddf.pipe(perplexity)  # doctest: +SKIP
    """

    Options = PerplexityOptions
    model_type = PerplexityModel
    runner_type = LikelihoodRunner
    head_type = LikelihoodHead
    purpose = "perplexity and bits per byte of texts under any decoder"
    licence = "the model's"

    if TYPE_CHECKING:

        @takes(PerplexityOptions)
        def __init__(self, **settings: Any) -> None: ...

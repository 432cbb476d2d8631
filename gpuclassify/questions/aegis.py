"""Safety of content, by what a guard model answers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from gpuclassify.frames import Texts
from gpuclassify.mapping.columns import LABELS, ReadShare
from gpuclassify.mapping.heads import Columns, LabelHead, named_columns, named_fields
from gpuclassify.mapping.runners import NonFiniteOutputError, Outputs, TokenLengths
from gpuclassify.mapping.text_mapper import TextMapper
from gpuclassify.questions.answers import ANSWER_LABELS, final_verdict, read_answer
from gpuclassify.questions.lora import (
    BASE_MODEL,
    DEFENSIVE,
    MAX_TOKENS,
    LoraCheckpoint,
)
from gpuclassify.questions.lora_model import DecoderRunner, LoraModel, LoraOptions, adapter_key
from gpuclassify.questions.template import full_digest, read_template
from gpuclassify.settings.options import StrPath
from gpuclassify.settings.signatures import takes
from gpuclassify.workers.run_context import RunStats

if TYPE_CHECKING:
    from gpuclassify.questions.decoder import Decoder
    from gpuclassify.questions.prompt_tokens import PromptTokenizer
    from gpuclassify.tokenizing.token_batch import TokenBatch

MAX_NEW_TOKENS = 100


@dataclass(frozen=True, kw_only=True)
class AegisOptions(LoraOptions):
    """Settings of the Aegis classifier, beside those of `LoraOptions`.

    Attributes
    ----------
    template : str or path
        The safety prompt: a text (with a line break), or the path of a file. Default: the one in
        the model's README.md.
    template_digest : str
        sha256 of a prompt of your own, for an empty document.
    categories_field : str
        Output column (list of strings) of all the categories in the answer.
    keep_raw : bool
        Write the answer itself to `raw_field`. Answers are then decoded to their end.
    raw_field : str
        Output column of the answer.
    """

    template: StrPath | None = None
    template_digest: str | None = None
    categories_field: str | None = None
    keep_raw: bool = False
    raw_field: str | None = "_aegis_raw_pred"

    def check(self) -> None:
        """See `ModelOptions.check`."""
        super().check()
        if self.template_digest is not None:
            full_digest(self.template_digest)
        if self.has_windows:
            raise ValueError(
                f'long_text="{self.long_text}" has no meaning for a prompt: a document that is too '
                "long loses its end, and truncated_field= says which ones did"
            )


class AegisModel(LoraModel):
    """An Aegis adapter, with the prompt from its model card."""

    def read(self) -> LoraCheckpoint:
        """Read what adapter and decoder declare, and the prompt."""
        checkpoint, options = super().read(), self.options
        prompt = read_template(
            options.template, options.template_digest, checkpoint.adapter, options.cache_dir
        )
        return replace(checkpoint, prompt=prompt)


class AnswerRunner(DecoderRunner):
    """Asks a decoder about each text, in the model's prompt, and gives its answers."""

    options: AegisOptions

    @property
    def changes_texts(self) -> bool:
        """The model reads prompts."""
        return True

    def run(self, texts: Texts, stats: RunStats, name_text: Callable[[int], str]) -> Outputs:
        """The answer about each text, as objects (texts,); see `Runner.run`."""
        import torch

        device, dtype = self.device_and_dtype()
        with self.lease_decoder(device, dtype) as decoder:
            started = time.perf_counter()
            tokenizer = self._prompt_tokenizer(decoder)
            prompts = tokenizer(texts.to_list())
            stats.tokenize_seconds += time.perf_counter() - started
            stats.truncated_texts += prompts.truncated
            stats.windows += len(texts)
            answers = self._answer(decoder, tokenizer, prompts, stats)
        failed = [row for row, answer in enumerate(answers) if answer is None]
        if failed:
            stats.rescued_texts += len(failed)
            with self.lease_decoder(device, torch.float32) as decoder:
                for row in failed:
                    (answers[row],) = self._answer(decoder, tokenizer, prompts.take([row]), stats)
                    if answers[row] is None:
                        raise NonFiniteOutputError(
                            f"{self.options.model} gives NaN or infinity for {name_text(row)}, "
                            "also alone and in float32: check the weights, or remove the row"
                        )
        read = ReadShare(np.ones(len(texts), np.int64), tokenizer.seen_share(prompts))
        return Outputs(np.asarray(answers, dtype=object), np.arange(len(texts)), read)

    def token_lengths(self, texts: list[str]) -> TokenLengths:
        """How long texts are in the prompt; see `Runner.token_lengths`."""
        tokenizer = self._new_prompt_tokenizer(self.model.new_tokenizer)
        tokens = tokenizer(texts)
        whole = tokens.lengths if tokens.whole_lengths is None else tokens.whole_lengths
        ones = np.ones(len(texts), dtype=np.int64)
        return TokenLengths(whole, tokens.lengths, ones, tokenizer.max_tokens)

    def lease(self, device: Any, dtype: Any) -> contextlib.AbstractContextManager[Decoder]:
        """The decoder in memory; see `Runner.lease`."""
        return self.lease_decoder(device, dtype)

    def is_decided(self, answer: str, is_complete: bool) -> bool:
        """Whether further tokens of an answer cannot change any column."""
        if self.options.keep_raw:
            return is_complete
        needs_all = self.options.categories_field is not None
        return read_answer(answer, is_complete, needs_all) is not None

    def _answer(
        self,
        decoder: Decoder,
        tokenizer: PromptTokenizer,
        prompts: TokenBatch,
        stats: RunStats,
    ) -> list[str | None]:
        from gpuclassify.questions.generation import AnswerTask, answer

        task = AnswerTask(
            decoder=decoder,
            adapter=adapter_key(self.model.checkpoint.adapter),
            prefix=tokenizer.prefix,
            is_decided=self.is_decided,
            max_new_tokens=MAX_NEW_TOKENS,
        )
        key = (self.model.checkpoint, str(decoder.device), str(decoder.dtype))
        return answer(task, key, prompts, self.batch_settings(), stats)

    def _prompt_tokenizer(self, decoder: Decoder) -> PromptTokenizer:
        """The one that all mappers with this prompt share."""
        key = (self.model.checkpoint.prompt, self.options.max_seq_length)
        return decoder.attached(key, lambda: self._new_prompt_tokenizer(decoder.new_tokenizer))

    def _new_prompt_tokenizer(self, new_tokenizer: Callable[[], Any]) -> PromptTokenizer:
        from gpuclassify.questions.prompt_tokens import PromptTokenizer

        prompt, length = self.model.checkpoint.prompt, self.options.max_seq_length
        assert prompt is not None and length is not None, "both have values in every Aegis"
        return PromptTokenizer(new_tokenizer(), prompt.head, prompt.tail, length)


class AnswerHead(LabelHead):
    """Label and categories of a safety model's answers."""

    @property
    def labels(self) -> list[str]:
        """``unknown``, ``safe`` and ``O1`` to ``O13``."""
        return list(ANSWER_LABELS)

    def fields(self) -> list[pa.Field]:
        """Label, categories and answer, as far as they are asked for."""
        return named_fields(
            (self.label_field, pa.string()),
            (self.options.categories_field, LABELS),
            (self._raw_field, pa.string()),
        )

    def columns(self, values: np.ndarray) -> Columns:
        """Columns for the answers' texts, object (texts,)."""
        categories = [list(final_verdict(answer).categories) for answer in values]
        return named_columns(
            (self.label_field, _labels(values).tolist()),
            (self.options.categories_field, pa.array(categories, LABELS)),
            (self._raw_field, values.tolist()),
        )

    def passes(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Which texts have a wanted label."""
        return self.passes_label(_labels(values))

    @property
    def _raw_field(self) -> str | None:
        return self.options.raw_field if self.options.keep_raw else None


def _labels(answers: np.ndarray) -> np.ndarray:
    return np.asarray([final_verdict(answer).label for answer in answers], dtype=object)


class AegisClassifier(TextMapper):
    """Labels content ``safe``, or with the one of 13 categories that makes it unsafe.

    Asks LlamaGuard-7b with one of NVIDIA's two adapters about each text, in the
    prompt that the model was tuned on. ``O1`` to ``O13`` are that prompt's
    categories; ``unknown`` is an answer in another form, or with several
    categories, all of which `categories_field` gives. The constant part of the
    prompt is run once a process, and answers are decoded only as far as they
    decide the label.

    Parameters
    ----------
    model : str
        The adapter; "nvidia/Aegis-AI-Content-Safety-LlamaGuard-Permissive-1.0" is the other.
    max_seq_length : int
        Tokens of the whole prompt. A document that is too long loses its end, never the prompt.

    Examples
    --------
    >>> classifier = AegisClassifier(filter_by="safe", token="hf_...")  # doctest: +SKIP
    >>> ddf = ddf.pipe(classifier)  # doctest: +SKIP
    """

    Options = AegisOptions
    model_type = AegisModel
    runner_type = AnswerRunner
    head_type = AnswerHead
    family = "aegis"
    purpose = "safety of content, 13 categories"
    is_gated = True
    licence = "Llama 2 Community License"
    published_labels = ANSWER_LABELS
    defaults = {
        "model": DEFENSIVE,
        "base_model": BASE_MODEL,
        "label_field": "aegis_pred",
        "max_chars": 6000,
        "max_seq_length": MAX_TOKENS,
    }

    if TYPE_CHECKING:

        @takes(AegisOptions)
        def __init__(self, **settings: Any) -> None: ...

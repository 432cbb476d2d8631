"""What runs a decoder with an adapter: the decoder in memory, and its answers about texts."""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuclassify import hub
from gpuclassify.frames import Texts
from gpuclassify.hub import Identity
from gpuclassify.mapping.columns import ReadShare
from gpuclassify.mapping.runners import NetworkRunner, NonFiniteOutputError, Outputs, TokenLengths
from gpuclassify.questions.lora import LoraModel, check_lora_tensors
from gpuclassify.workers.run_context import RunStats

if TYPE_CHECKING:
    from gpuclassify.questions.decoder import Decoder
    from gpuclassify.questions.prompt_tokens import PromptTokenizer
    from gpuclassify.tokenizing.text_tokenizer import TokenBatch


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


class AnswerRunner(DecoderRunner):
    """Asks a decoder about each text, in the model's prompt, and gives its answers.

    A subclass says by `is_decided` what an answer has to tell.
    """

    max_new_tokens = 100

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
            tokenizer = decoder.attached(  # which all mappers with this prompt share
                (self.model.checkpoint.prompt, self.options.max_seq_length),
                lambda: self._new_prompt_tokenizer(decoder.new_tokenizer),
            )
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

    @abstractmethod
    def is_decided(self, answer: str, is_complete: bool) -> bool:
        """Whether further tokens of an answer cannot change any column."""

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
            max_new_tokens=self.max_new_tokens,
        )
        key = (self.model.checkpoint, str(decoder.device), str(decoder.dtype))
        return answer(task, key, prompts, self.batch_settings(), stats)

    def _new_prompt_tokenizer(self, new_tokenizer: Callable[[], Any]) -> PromptTokenizer:
        from gpuclassify.questions.prompt_tokens import PromptTokenizer

        prompt, length = self.model.checkpoint.prompt, self.options.max_seq_length
        assert prompt is not None and length is not None, "a mapper with a prompt has both"
        return PromptTokenizer(new_tokenizer(), prompt.head, prompt.tail, length)

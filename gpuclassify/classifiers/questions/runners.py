"""Runners of decoders: load a decoder, ask it prompts, and read or decode its answers."""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuclassify import hub
from gpuclassify.classifiers.questions.lora import LoraModel, check_lora_tensors
from gpuclassify.frames import Texts
from gpuclassify.mapping.runners import NetworkRunner, NonFiniteOutputError, Outputs
from gpuclassify.mapping.token_lengths import TokenLengths
from gpuclassify.workers.run_context import RunStats

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from gpuclassify.classifiers.questions.decoder import Decoder
    from gpuclassify.classifiers.questions.generation import Reader
    from gpuclassify.classifiers.questions.prompt_tokens import Prompt, PromptTokenizer
    from gpuclassify.tokenizing.text_tokenizer import TokenBatch


class DecoderRunner(NetworkRunner):
    """Base class of runners that use a decoder with an optional LoRA adapter."""

    model: LoraModel

    @property
    def resident_key(self) -> Hashable:
        """Key of the decoder in memory, equal for all mappers that use it."""
        return self.model.checkpoint.base

    def check_weights(self) -> None:
        """Raise CheckpointError if tensors do not fit the model, or `Decoder` cannot run it."""
        from gpuclassify.classifiers.questions.decoder import check_runs

        check_lora_tensors(self.model.checkpoint, self.options.cache_dir)
        check_runs(self.model.checkpoint.sizes, self.model.checkpoint.base.name)

    @contextlib.contextmanager
    def lease_decoder(self, device: torch.device, dtype: torch.dtype) -> Iterator[Decoder]:
        """Yield the decoder for a ``with`` block, which keeps it in memory.

        This mapper's adapter, if any, is loaded, but another one may be active: see `Decoder.use`.
        """
        from gpuclassify.classifiers.questions.decoder import load_decoder

        cache_dir, checkpoint = self.options.cache_dir, self.model.checkpoint

        def load() -> Decoder:
            directory = hub.download(checkpoint.base, cache_dir=cache_dir)
            return load_decoder(directory, device, dtype)

        key = (checkpoint.base, str(device), str(dtype))

        with self.lease_loaded(key, load, device, dtype) as decoder:
            if checkpoint.adapter is not None:
                directory = hub.download(checkpoint.adapter, cache_dir=cache_dir)
                # The name includes the revision.
                decoder.add_adapter(str(checkpoint.adapter), directory)
            yield decoder


class PromptRunner(DecoderRunner):
    """Base class of runners that put texts into prompts, and ask a decoder."""

    def lease(
        self, device: torch.device, dtype: torch.dtype
    ) -> contextlib.AbstractContextManager[Decoder]:
        """Return a context manager that yields the decoder: see `lease_decoder`."""
        return self.lease_decoder(device, dtype)

    def answers(
        self,
        prompts: TokenBatch,
        prefix: np.ndarray,
        new_reader: Callable[[Decoder], Reader],
        stats: RunStats,
        text_of: np.ndarray,
        name_text: Callable[[int], str],
    ) -> list[Any]:
        """Run prompts through the decoder, and return the reader's answer to each, in order.

        Most prompts begin with the token ids in `prefix`, int32 (tokens,). `text_of` has the index
        of each prompt's text, int64 (prompts,). A prompt with non-finite logits runs again, alone
        and in float32. Raises NonFiniteOutputError, with the name that `name_text` returns for the
        text's index, if they are still not finite. Counts are added to `stats`.
        """
        import torch

        from gpuclassify.classifiers.questions.generation import AnswerTask, answer

        adapter = self.model.checkpoint.adapter

        def ask(decoder: Decoder, batch: TokenBatch) -> list[Any]:
            name = None if adapter is None else str(adapter)
            task = AnswerTask(decoder, name, prefix, new_reader(decoder))
            key = (self.model.checkpoint, str(decoder.device), str(decoder.dtype))
            return answer(task, key, batch, self.options, stats)

        device, dtype = self.device_and_dtype()
        with self.lease_decoder(device, dtype) as decoder:
            answers = ask(decoder, prompts)
        failed = [row for row, one in enumerate(answers) if one is None]
        if failed:
            stats.rescued.update(text_of[failed].tolist())
            with self.lease_decoder(device, torch.float32) as decoder:
                for row in failed:
                    (answers[row],) = ask(decoder, prompts.take([row]))
                    if answers[row] is None:
                        name = name_text(int(text_of[row]))
                        raise NonFiniteOutputError(
                            f"{self.options.model} gives NaN or infinity for {name}, also "
                            "alone and in float32: check the weights, or remove the row"
                        )
        return answers

    def free_answers(
        self,
        prompts: TokenBatch,
        prefix: np.ndarray,
        is_decided: Callable[[str, bool], bool],
        max_new_tokens: int,
        stats: RunStats,
        text_of: np.ndarray,
        name_text: Callable[[int], str],
    ) -> list[str]:
        """Return the text that the decoder writes after each prompt, decoded greedily.

        Decoding ends as in `FreeReader`, and other arguments are as in `answers`. The text lacks
        special tokens.
        """
        from gpuclassify.classifiers.questions.generation import FreeReader

        def new_reader(decoder: Decoder) -> Reader:
            return FreeReader(decoder, is_decided, max_new_tokens)

        answers = self.answers(prompts, prefix, new_reader, stats, text_of, name_text)
        return [one.text for one in answers]

    def prompt_tokenizer(
        self, prompt: Prompt, tokenizer: PreTrainedTokenizerBase, counts_rest: bool = False
    ) -> PromptTokenizer:
        """Make a tokenizer of prompts that cuts the text in `text_field` if a prompt is too long.

        The tokens after a cut are counted if `counts_rest` is true, or if `seen_field` is set.
        `tokenizer` is configured, and must not be shared.
        """
        from gpuclassify.classifiers.questions.prompt_tokens import PromptTokenizer

        main = prompt.columns.index(self.options.text_field)
        length = self.model.checkpoint.max_tokens
        counts_rest = counts_rest or self.options.seen_field is not None
        return PromptTokenizer(tokenizer, prompt, length, main, counts_rest=counts_rest)

    def token_lengths(self, texts: list[str]) -> TokenLengths:
        """Count the tokens of each text's prompt before cutting, and of the prompts that are run.

        If a text has a prompt per criterion, only the prompts of the first criterion are counted.
        """
        prompt = self.model.checkpoint.prompts[0]
        tokenizer = self.prompt_tokenizer(prompt, self.model.new_tokenizer(), counts_rest=True)
        rows = [self.columns_of(text) for text in texts]
        tokens = tokenizer(rows)
        whole = tokens.lengths if tokens.whole_lengths is None else tokens.whole_lengths
        windows, counts = self.windows_of(rows, tokenizer)
        lengths = tokenizer(windows).lengths if self.options.has_windows else tokens.lengths
        return TokenLengths(whole, lengths, counts, tokenizer.max_tokens)

    def windows_of(
        self, rows: list[tuple[str, ...]], tokenizer: PromptTokenizer
    ) -> tuple[list[tuple[str, ...]], np.ndarray]:
        """Return the columns' texts of the prompts that are run, and the number of prompts per row.

        If texts are read in windows, a row has a prompt per window. The numbers are int64 (rows,).
        """
        if not self.options.has_windows:
            return rows, np.ones(len(rows), dtype=np.int64)
        overlap = self.options.overlap_of(tokenizer.window_tokens) or 0
        windows = [tokenizer.windows(text, overlap) for (text,) in rows]
        counts = np.array([len(spans) for spans in windows], dtype=np.int64)
        return [(one,) for spans in windows for one in spans], counts

    def columns_of(self, text: str) -> tuple[str, ...]:
        """Return the texts of a row's prompt columns; here, `text` is the only one, in a tuple."""
        return (text,)


class AnswerRunner(PromptRunner):
    """Base class of runners that ask a decoder about each text, and decode answers greedily."""

    max_new_tokens = 100

    def run(self, texts: Texts, stats: RunStats, name_text: Callable[[int], str]) -> Outputs:
        """Decode an answer for each distinct text; the outputs' values are str objects (texts,)."""
        (prompt,) = self.model.checkpoint.prompts
        with self.lease_decoder(*self.device_and_dtype()) as decoder:
            started = time.perf_counter()
            tokenizer = decoder.attached(  # shared by all mappers with this prompt
                (prompt, self.options.max_seq_length, self.options.seen_field is None),
                lambda: self.prompt_tokenizer(prompt, decoder.new_tokenizer()),
            )
            prompts = tokenizer([(text,) for text in texts])
            stats.tokenize_seconds += time.perf_counter() - started
            stats.windows += len(texts)
            until = self.is_decided, self.max_new_tokens
            alone = np.arange(len(texts)), name_text  # one prompt per text
            answers = self.free_answers(prompts, tokenizer.prefix, *until, stats, *alone)
        seen, ones = tokenizer.seen_share(prompts), np.ones(len(texts), np.int64)
        return Outputs(np.asarray(answers, dtype=object), ones, seen)

    @abstractmethod
    def is_decided(self, answer: str, is_complete: bool) -> bool:
        """Return whether decoding can end, because more tokens would not change any output column.

        `answer` is the text decoded so far. `is_complete` says whether the answer is at its end:
        the decoder has ended it, or it has `max_new_tokens` tokens.
        """

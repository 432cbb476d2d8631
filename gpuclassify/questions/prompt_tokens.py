"""Documents in a prompt, tokenized as a whole and cut so that the prompt's end survives."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuclassify.tokenizing.text_tokenizer import TokenBatch, flat_batch

# How documents may begin: none of their tokens may be taken for a part of the prompt.
_PROBES = ("a", "The", "7", "é", "\n", " ", "-")
# Encodings are alive together, at over 100 bytes a token and thousands of tokens a prompt.
_BLOCK_PROMPTS = 2_048


class PromptTokenizer:
    """Tokenizes ``head + document + tail``; a document that makes it too long loses its end.

    The whole prompt is tokenized at once, because tokens can reach across the seams. The tokenizer
    is one of the tokenizers library, which says where in the text each token stands; it is
    configured here and must not be shared. ValueError: the prompt alone leaves a document no room.
    """

    def __init__(self, tokenizer: Any, head: str, tail: str, max_tokens: int) -> None:
        self.head, self.tail, self.max_tokens = head, tail, max_tokens
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_padding()
        self._backend.no_truncation()
        self._fixed_tokens = len(self._backend.encode(head + tail).ids)
        if self._fixed_tokens >= max_tokens:
            raise ValueError(
                f"the prompt itself has {self._fixed_tokens} tokens, so "
                f"max_seq_length={max_tokens} leaves no room for a document: pass a larger one"
            )

    def __call__(self, documents: Sequence[str]) -> TokenBatch:
        """The prompts' tokens; `whole_lengths` are those that they had before any cut."""
        rows: list[np.ndarray] = []
        for start in range(0, len(documents), _BLOCK_PROMPTS):
            block = documents[start : start + _BLOCK_PROMPTS]
            prompts = [self.head + document + self.tail for document in block]
            for encoding in self._backend.encode_batch_fast(prompts):
                rows.append(np.asarray(encoding.ids, dtype=np.int32))
        whole_lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        for row in np.flatnonzero(whole_lengths > self.max_tokens).tolist():
            rows[row] = self._cut(documents[row])
        return flat_batch(rows, whole_lengths=whole_lengths)

    @functools.cached_property
    def prefix(self) -> np.ndarray:
        """The tokens with which the prompts of all ordinary documents begin, int32."""
        probes = [self._backend.encode(self.head + probe + self.tail).ids for probe in _PROBES]
        first, *others = [np.asarray(ids, dtype=np.int32) for ids in probes]
        return first[: min(shared_length(first, other) for other in others)]

    def seen_share(self, prompts: TokenBatch) -> np.ndarray:
        """Share of each document's tokens that is in its prompt, float32 (documents,)."""
        assert prompts.whole_lengths is not None
        document = np.maximum(prompts.whole_lengths - self._fixed_tokens, 1)
        lost = prompts.whole_lengths - prompts.lengths
        return np.clip(1 - lost / document, 0, 1).astype(np.float32)

    def _cut(self, document: str) -> np.ndarray:
        """The tokens of the prompt with as much of the document as fits."""
        while True:
            encoding = self._backend.encode(self.head + document + self.tail)
            excess = len(encoding.ids) - self.max_tokens
            if excess <= 0:
                return np.asarray(encoding.ids, dtype=np.int32)
            begin, end = len(self.head), len(self.head) + len(document)
            starts = [start - begin for start, _ in encoding.offsets if begin <= start < end]
            chars = starts[-excess] if excess < len(starts) else 0
            # Tokens merge anew at the new seam, so what is left may still be a token too long.
            document = document[: max(0, min(chars, len(document) - 1))]


def shared_length(first: np.ndarray, second: np.ndarray) -> int:
    """With how many equal tokens two rows begin."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length

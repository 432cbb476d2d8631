"""Texts to tokens on the host: cut to a length or into windows, never padded."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuclassify.tokenizing.token_batch import TokenBatch, flat_batch


@dataclass(frozen=True)
class TextTokens:
    """Tokens of one text: its only window, or all of them.

    Attributes
    ----------
    windows : list of ndarray of int32
        Special tokens included. One, unless the tokenizer was asked for overlapping windows.
    type_ids : list of ndarray of int32, optional
        Segment ids of each window.
    whole_length : int
        Tokens of the whole text; more than the only window has if it was cut.
    """

    windows: list[np.ndarray]
    type_ids: list[np.ndarray] | None
    whole_length: int


class TextTokenizer:
    """A Hugging Face tokenizer that cuts at a fixed length and never pads.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
        Is configured here and must not be shared: its truncation is state, and changing it while
        another thread tokenizes is an error in the tokenizers library.
    max_tokens : int
        Most tokens of a text, special tokens included.
    overlap : int, optional
        Cut long texts into windows that share this many tokens, instead of dropping their rest.

    Raises
    ------
    ValueError
        Special tokens and overlap leave a window no room.
    """

    def __init__(self, tokenizer: Any, max_tokens: int, overlap: int | None = None) -> None:
        self.max_tokens = max_tokens
        self.overlap = overlap
        self._tokenizer = tokenizer
        self._special_tokens = tokenizer.num_special_tokens_to_add(pair=False)
        room = max_tokens - self._special_tokens
        if room < 1 or (overlap or 0) >= room:
            shared = "" if overlap is None else f" and window_overlap={overlap}"
            raise ValueError(
                f"max_seq_length={max_tokens} leaves no room for text beside "
                f"{self._special_tokens} special tokens{shared}: pass a larger max_seq_length"
            )
        self._has_type_ids = False
        if "token_type_ids" in tokenizer.model_input_names:
            found = tokenizer("a probe", return_token_type_ids=True)  # which resets its backend
            self._has_type_ids = any(found["token_type_ids"])
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_padding()
            self._backend.enable_truncation(
                max_tokens, stride=overlap or 0, direction=tokenizer.truncation_side
            )
        fillers = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        self._filler: int = next((number for number in fillers if number is not None), 0)

    @property
    def backend(self) -> Any:
        """The ``tokenizers.Tokenizer`` that does the work; None for one written in Python."""
        return self._backend

    @functools.cached_property
    def fingerprint(self) -> Hashable:
        """Equal for tokenizers that give every text equal tokens before anything is cut.

        One written in Python has no complete description, and equals itself only.
        """
        if self._backend is None:
            return id(self)
        description = json.loads(self._backend.to_str())
        description.pop("truncation")
        description.pop("padding")
        digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
        side = self._tokenizer.truncation_side
        return (digest, side, self._has_type_ids, self._filler)

    def __call__(self, texts: Sequence[str]) -> TokenBatch:
        """Tokenize `texts`, special tokens included: of each text its first window."""
        rows = self.encode(texts)
        whole = np.fromiter((row.whole_length for row in rows), dtype=np.int64, count=len(rows))
        types = [row.type_ids[0] for row in rows if row.type_ids is not None]
        return flat_batch([row.windows[0] for row in rows], types, whole)

    def encode(self, texts: Sequence[str]) -> list[TextTokens]:
        """Tokenize each of `texts`.

        An empty text of a tokenizer without special tokens becomes its first-or-last-of-text token,
        because a model cannot read nothing.
        """
        if self._backend is None:
            return list(map(self._encode_slowly, texts))
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=True)
        return list(map(self._read, encodings))

    def _read(self, encoding: Any) -> TextTokens:
        pieces = [encoding, *encoding.overflowing]
        inner = sum(map(len, pieces)) - self._special_tokens * len(pieces)
        repeated = (self.overlap or 0) * (len(pieces) - 1)
        whole_length = inner - repeated + self._special_tokens
        kept = pieces[:1] if self.overlap is None else pieces
        types = [piece.type_ids for piece in kept] if self._has_type_ids else None
        return self._text_tokens([piece.ids for piece in kept], types, whole_length)

    def _encode_slowly(self, text: str) -> TextTokens:
        """For the few tokenizers that are written in Python, which cut but give no rest."""
        tokenizer = self._tokenizer
        inner = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        room = self.max_tokens - self._special_tokens
        overlap = self.overlap or 0
        starts = range(0, max(len(inner) - overlap, 1), room - overlap)
        pieces = [inner[start : start + room] for start in starts]
        if tokenizer.truncation_side == "left":
            ends = [len(inner) - start for start in starts]
            pieces = [inner[max(end - room, 0) : end] for end in ends]
        whole_length = len(inner) + self._special_tokens
        if self.overlap is None:
            pieces = pieces[:1]
        ids = [tokenizer.build_inputs_with_special_tokens(piece) for piece in pieces]
        types = [tokenizer.create_token_type_ids_from_sequences(piece) for piece in pieces]
        return self._text_tokens(ids, types if self._has_type_ids else None, whole_length)

    def _text_tokens(
        self, ids: list[list[int]], type_ids: list[list[int]] | None, whole_length: int
    ) -> TextTokens:
        windows = [np.asarray(window or [self._filler], dtype=np.int32) for window in ids]
        types = None
        if type_ids is not None:
            types = [np.asarray(window or [0], dtype=np.int32) for window in type_ids]
        return TextTokens(windows, types, max(whole_length, 1))

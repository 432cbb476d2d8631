"""WordPiece tokenization on the GPU, for those texts whose ids are proven to be the tokenizer's.

libcudf normalizes and tokenizes like the Hugging Face tokenizer of BERT, but not always: some
scripts, long words and special tokens spelt out in a text differ. `find_doubtful` tells those
texts: they are left to the host's tokenizer, and named.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpuclassify.frames.texts import DeviceTexts
from gpuclassify.tokenizing.token_batch import TokenBatch
from gpuclassify.tokenizing.wordpiece_rules import NotEligibleError, WordPieceRules, read_rules
from gpuclassify.tokenizing.wordpiece_screen import find_doubtful, probe_texts

# Normalizing takes 12 bytes of the GPU for each byte of text, finding doubtful texts about as much.
BLOCK_BYTES = 32 << 20
# Stands before the texts of a block: libcudf reserves one word too few if the first text begins
# with a space, and a block must not be empty.
_FIRST_TEXT = "a"


class GpuTokens(NamedTuple):
    """Token ids of many texts, end to end, on the device.

    Attributes
    ----------
    ids : Tensor of int32, shape (tokens,)
        On the GPU, complete, special tokens included.
    offsets : ndarray of int64, shape (texts + 1,)
        Text i has ``ids[offsets[i]:offsets[i + 1]]``: nothing if it is null or left to the host.
    whole_lengths : ndarray of int64, shape (texts,)
        Tokens that each text had before it was cut; 0 where there are none.
    fallback_rows : ndarray of int64
        The texts that the host's tokenizer has to do, ascending.
    """

    ids: Tensor
    offsets: np.ndarray
    whole_lengths: np.ndarray
    fallback_rows: np.ndarray


class GpuWordPiece:
    """Tokenizes cudf strings on the GPU as a Hugging Face tokenizer does on the host.

    Parameters
    ----------
    backend : tokenizers.Tokenizer
        ``backend_tokenizer`` of the model's tokenizer.
    max_tokens : int
        Most tokens of a text, special tokens included; the rest is dropped.
    block_bytes : int
        Most bytes of the texts that are tokenized at once; a longer text is left to the host.

    Raises
    ------
    NotEligibleError
        The tokenizer has other rules, or the installed cudf is found to tokenize otherwise.
    """

    def __init__(self, backend: Any, max_tokens: int, block_bytes: int = BLOCK_BYTES) -> None:
        import cudf
        from cudf.core.character_normalizer import CharacterNormalizer
        from cudf.core.wordpiece_tokenize import WordPieceVocabulary

        self.rules = read_rules(backend)
        self._room = max_tokens - self.rules.added_count
        self._block_bytes = block_bytes
        # Without special tokens, which libcudf would find in lower case too.
        self._normalizer = CharacterNormalizer(self.rules.is_lowercase)
        self._vocabulary = WordPieceVocabulary(cudf.Series(list(self.rules.vocabulary)))
        self._first = cudf.Series([_FIRST_TEXT])
        self._check(backend)

    def __call__(self, texts: Any) -> GpuTokens:
        """Tokenize a cudf Series of strings; null rows get no tokens.

        cuDF works on the default stream, and so does this. When it returns, the ids are complete;
        a reader on another stream calls their ``record_stream``.
        """
        with torch.cuda.stream(torch.cuda.default_stream()):
            return self._tokenize(texts, self._room, self._block_bytes)

    def _tokenize(self, texts: Any, room: int, block_bytes: int) -> GpuTokens:
        sizes = texts.str.byte_count().fillna(0).to_numpy()
        blocks = [
            self._block(texts.iloc[start:stop], room, is_small)
            for start, stop, is_small in byte_blocks(sizes, block_bytes)
        ]
        if not blocks:
            none = np.zeros(0, dtype=np.int64)
            ids = torch.zeros(0, dtype=torch.int32, device="cuda")
            return GpuTokens(ids, np.zeros(1, dtype=np.int64), none, none)
        ids, lengths, whole, is_left = map(torch.cat, zip(*blocks, strict=True))
        return GpuTokens(
            ids,
            offsets_of(lengths.cpu().numpy()),
            whole.cpu().numpy(),
            np.flatnonzero(is_left.cpu().numpy()),
        )

    def _block(self, part: Any, room: int, is_small: bool) -> tuple[Tensor, ...]:
        """Ids, lengths, whole lengths and which texts are left to the host, of one block."""
        is_null = _tensor(part.isnull())
        if not is_small:
            nothing = torch.zeros(len(part), dtype=torch.int64, device=is_null.device)
            return nothing[:0].int(), nothing, nothing, ~is_null
        flat, counts, is_left = self._ragged(part.fillna(""))
        is_done = ~(is_left | is_null)
        starts = counts.cumsum(0) - counts
        ids, lengths = with_special_tokens(
            flat, starts[1:][is_done], counts[1:][is_done], self.rules, room
        )
        all_lengths = torch.zeros_like(counts[1:])
        all_lengths[is_done] = lengths
        whole = torch.where(is_done, counts[1:] + self.rules.added_count, 0)
        return ids, all_lengths, whole, is_left & ~is_null

    def _ragged(self, part: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Ids without special tokens, their counts with that of `_FIRST_TEXT`, doubtful texts."""
        import cudf

        texts = cudf.concat([self._first.astype(part.dtype), part], ignore_index=True)
        codes = _tensor(texts.str.code_points())
        chars = _tensor(texts.str.len()).long()
        is_left = find_doubtful(codes, chars, self.rules.special)[1:]
        lists = self._vocabulary.tokenize(self._normalizer.normalize(texts))
        return _tensor(lists.list.leaves), _tensor(lists.list.len()).long(), is_left

    def _check(self, backend: Any) -> None:
        """Compare every safe character with the tokenizer itself: either library may change."""
        import cudf
        from tokenizers import Tokenizer

        host = Tokenizer.from_str(backend.to_str())
        host.no_padding()
        host.no_truncation()
        texts = probe_texts()
        with torch.cuda.stream(torch.cuda.default_stream()):
            found = self._tokenize(cudf.Series(texts), sys.maxsize, BLOCK_BYTES)
        ids, offsets = found.ids.cpu().numpy(), found.offsets
        for row, encoding in enumerate(host.encode_batch_fast(texts, add_special_tokens=True)):
            if ids[offsets[row] : offsets[row + 1]].tolist() != encoding.ids:
                raise NotEligibleError(
                    f"cudf {cudf.__version__} gives other ids than the tokenizer for a text of the "
                    f"characters U+{ord(texts[row][1]):04X} to U+{ord(texts[row][-1]):04X}"
                )


def with_special_tokens(
    flat: Tensor, starts: Tensor, counts: Tensor, rules: WordPieceRules, room: int
) -> tuple[Tensor, Tensor]:
    """Rows of ids end to end, each cut to `room` and between the special tokens.

    Parameters
    ----------
    flat : Tensor of int32, shape (ids,)
    starts, counts : Tensor of int64, shape (rows,)
        Where each row is in `flat`.
    rules : WordPieceRules
    room : int
        Most ids of a row beside special tokens.

    Returns
    -------
    ids : Tensor of int32
    lengths : Tensor of int64, shape (rows,)
    """
    kept = counts.clamp(max=room)
    lengths = kept + rules.added_count
    ends = lengths.cumsum(0)
    begins = ends - lengths
    ids = flat.new_empty(int(lengths.sum()))
    ids[_positions(begins + len(rules.prefix), kept)] = flat[_positions(starts, kept)]
    for place, token in enumerate(rules.prefix):
        ids[begins + place] = token
    for place, token in enumerate(rules.suffix):
        ids[ends - len(rules.suffix) + place] = token
    return ids, lengths


def _positions(starts: Tensor, lengths: Tensor) -> Tensor:
    """The numbers from each of `starts` on, as many as `lengths` says, end to end."""
    ends = lengths.cumsum(0)
    shifts = starts - (ends - lengths)
    count = int(lengths.sum())
    shift = torch.repeat_interleave(shifts, lengths, output_size=count)
    return torch.arange(count, device=starts.device) + shift


def tokenize_texts(
    texts: DeviceTexts,
    on_gpu: Callable[[Any], GpuTokens],
    on_host: Callable[[Sequence[Any]], TokenBatch],
) -> tuple[TokenBatch, int]:
    """Tokens of every text, and how many texts `on_gpu` left to `on_host`.

    Parameters
    ----------
    texts : DeviceTexts
        Without null.
    on_gpu : callable
        `GpuWordPiece`.
    on_host : callable
        The tokenizer that it stands in for.

    Returns
    -------
    tokens : TokenBatch
        Ids on the GPU, complete for a reader on the default stream, or on one that waits for it.
    host_count : int
    """
    found = on_gpu(texts.series)
    left = found.fallback_rows
    if len(left):
        found = merge(found, on_host(texts.take(left).to_list()))
    return TokenBatch(found.ids, found.offsets, whole_lengths=found.whole_lengths), len(left)


def merge(tokens: GpuTokens, host: TokenBatch) -> GpuTokens:
    """`tokens` with what the host's tokenizer gave for ``tokens.fallback_rows``, in that order.

    The rows are still named, so that they can be counted.
    """
    device = tokens.ids.device
    starts, lengths = tokens.offsets[:-1].copy(), np.diff(tokens.offsets)
    starts[tokens.fallback_rows] = len(tokens.ids) + host.offsets[:-1]
    lengths[tokens.fallback_rows] = host.lengths
    whole = tokens.whole_lengths.copy()
    whole[tokens.fallback_rows] = host.lengths if host.whole_lengths is None else host.whole_lengths
    flat = torch.cat([tokens.ids, torch.from_numpy(host.ids).to(device)])
    at = _positions(torch.from_numpy(starts).to(device), torch.from_numpy(lengths).to(device))
    return GpuTokens(flat[at], offsets_of(lengths), whole, tokens.fallback_rows)


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Where rows of these lengths begin and end, int64 (rows + 1,)."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])


def byte_blocks(sizes: np.ndarray, limit: int) -> Iterator[tuple[int, int, bool]]:
    """Texts of up to `limit` bytes together: first, behind the last, and whether they fit.

    A text above the limit is alone.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    start = 0
    while start < len(sizes):
        before = ends[start] - sizes[start]
        stop = max(int(np.searchsorted(ends, before + limit, side="right")), start + 1)
        yield start, stop, bool(ends[stop - 1] - before <= limit)
        start = stop


def _tensor(series: Any) -> Tensor:
    """A cudf Series without nulls as a tensor that shares its memory."""
    return torch.as_tensor(series.values, device="cuda")


__all__ = ["GpuTokens", "GpuWordPiece", "NotEligibleError", "merge", "tokenize_texts"]

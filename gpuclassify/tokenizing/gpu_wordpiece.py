"""``tokenizer="gpu"``: WordPiece by libcudf, for a column of cudf that stays on the GPU.

libcudf normalizes and tokenizes like the Hugging Face tokenizer of BERT, but not always: some
scripts, long words and special tokens spelt out in a text differ. `read_rules` refuses tokenizers
of other rules; `find_doubtful` tells the texts whose ids are not proven to be the tokenizer's,
which the host's tokenizer does. Nothing else in the package imports this module unless the GPU is
asked for: ``tokenizer="auto"`` means the host until a measurement on a GPU says otherwise.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from gpuclassify import hub
from gpuclassify.frames import HostTexts, backend_of
from gpuclassify.models.checkpoint import STATIC, Checkpoint
from gpuclassify.models.tokenizer_backend import load_backend
from gpuclassify.settings.options import ModelOptions
from gpuclassify.tokenizing.text_tokenizer import (
    TextTokenizer,
    TokenBatch,
    Windows,
    offsets_of,
    only_windows,
)
from gpuclassify.workers.device_errors import is_out_of_memory, with_memory_released
from gpuclassify.workers.run_context import RunStats

# libcudf takes a word of 200 bytes or more for unknown, and a character has up to 4 bytes.
LONGEST_WORD_CHARS = 49
# Normalizing takes 12 bytes of the GPU for each byte of text, finding doubtful texts about as much.
BLOCK_BYTES = 32 << 20
# Stands before the texts of a block: libcudf reserves one word too few if the first text begins
# with a space, and a block must not be empty.
_FIRST_TEXT = "a"
_HOST = 'pass tokenizer="host"'

# Code points, first and last of each range, of which the rules of both were compared. In all of
# them a character becomes at most one, and the same one; whether it is a word of its own, parts two
# words or is dropped agrees.
SAFE = (
    (0x0000, 0x06FF),  # Latin, combining marks, Greek, Cyrillic, Armenian, Hebrew, Arabic
    (0x0900, 0x097F),  # Devanagari
    (0x0E00, 0x0E7F),  # Thai
    (0x1E00, 0x2BFF),  # more Latin and Greek, punctuation, currencies, mathematics, symbols
    (0x3000, 0x302D),  # CJK punctuation
    (0x3030, 0x30FF),  # Hiragana and Katakana
    (0x3400, 0x4DBF),  # CJK ideographs
    (0x4E00, 0x9FFF),
    (0xFE00, 0xFE0F),  # which form an emoji has
    (0xFEFF, 0xFFEF),  # byte order mark, full and half width forms
    (0xFFFD, 0xFFFD),  # what a broken encoding left
    (0x1F000, 0x1FAFF),  # emoji
)
# Characters that end a word, or are one. Others do so too: a longer run than there is does no harm.
BREAKS = (
    (0x0009, 0x000A),
    (0x000D, 0x000D),
    (0x0020, 0x002F),
    (0x003A, 0x0040),
    (0x005B, 0x0060),
    (0x007B, 0x007E),
    (0x00A0, 0x00A0),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
)

logger = logging.getLogger(__name__)


class NotEligibleError(ValueError):
    """Error of a tokenizer that follows rules that the GPU does not."""


# What a mapper with tokenizer="gpu" asks.


def check_tokenizer(options: ModelOptions, checkpoint: Checkpoint, changes_texts: bool) -> None:
    """Raise NotEligibleError if the checkpoint's files say that the GPU cannot tokenize for it.

    They may not say: then the first partition tells, with the tokenizer itself. A model that
    `changes_texts` is given other texts than those of the column.
    """
    if changes_texts:
        raise _other_texts(options)
    if checkpoint.layout == STATIC:
        raise refused(options, "a static model has no special tokens: tokenize on the host")
    home = checkpoint.tokenizer or checkpoint.identity
    description = hub.read_text(home, "tokenizer.json", cache_dir=options.cache_dir)
    if description is None:
        return
    try:
        read_rules(load_backend(description, f"tokenizer.json of {home}"))
    except NotEligibleError as err:
        raise refused(options, err) from err


def check_library(frame: Any) -> None:
    """Raise TypeError unless it is a frame of cudf."""
    if not backend_of(frame).__name__.endswith(".cudf"):
        raise TypeError(
            'tokenizer="gpu" tokenizes columns of cudf frames, and this frame is one of pandas: '
            'move it with ddf.to_backend("cudf"), or in a Pipeline with backend="cudf", or '
            f"{_HOST}"
        )


def refused(options: ModelOptions, reason: object) -> NotEligibleError:
    """Return the error for a model whose texts the GPU cannot tokenize, for this reason."""
    return NotEligibleError(
        f'tokenizer="gpu" does not suit {options.model}: {reason} (tokenizer="host")'
    )


def _other_texts(options: ModelOptions) -> NotEligibleError:
    reason = "it is given other texts than those of the column: tokenize on the host"
    return refused(options, reason)


class TextReader(Protocol):
    """Part of a runner that says where its model runs, and on which texts."""

    @property
    def options(self) -> ModelOptions:
        """Settings of the mapper."""

    @property
    def changes_texts(self) -> bool:
        """Whether the model is given other texts than those of the column."""

    def device_and_dtype(self) -> tuple[Any, Any]:
        """Return device and dtype that the model runs with in this process."""


def device_texts(
    runner: TextReader, frame: Any, column: str, max_chars: int | None
) -> DeviceTexts | HostTexts:
    """Return the strings of a cudf frame's column, left on the GPU; on the host if there is none.

    TypeError or ValueError if the frame or the model is not on a GPU.
    """
    if runner.changes_texts:
        raise _other_texts(runner.options)
    check_library(frame)
    device = runner.device_and_dtype()[0]
    if device.type != "cuda":
        raise ValueError(
            f'tokenizer="gpu" makes tokens on a CUDA device, and device={runner.options.device!r} '
            f"is another one here: {_HOST}"
        )
    series = backend_of(frame).text_series(frame, column, max_chars)
    return HostTexts([None] * len(frame)) if series is None else DeviceTexts(series)


class DeviceTexts:
    """Texts that stay on the GPU, as a cudf.Series, until they are tokens; see `frames.Texts`."""

    def __init__(self, series: Any) -> None:
        self.series = series

    def __len__(self) -> int:
        return len(self.series)

    def __getitem__(self, bounds: slice) -> DeviceTexts:
        return type(self)(self.series.iloc[bounds])

    def fold(self, max_chars: int | None) -> tuple[DeviceTexts, np.ndarray]:
        """Return distinct texts, compared on the GPU; see `frames.Texts.fold`."""
        texts = self.series if max_chars is None else self.series.str.slice(0, max_chars)
        series = type(texts)
        positions, distinct = texts.factorize()
        return type(self)(series(distinct)), series(positions).to_numpy().astype(np.int64)

    def take(self, places: np.ndarray) -> DeviceTexts:
        """Return the texts at these places, in that order."""
        return type(self)(self.series.take(places))

    @property
    def char_counts(self) -> np.ndarray:
        """Characters of each text, int64 (texts,); 0 for null."""
        return self.series.str.len().fillna(0).to_numpy().astype(np.int64)

    def to_list(self) -> list[Any]:
        """Return the texts on the host, None for null."""
        return self.series.to_arrow().to_pylist()


class DeviceSource:
    """Texts on a GPU, tokenized there; the ones left over go through the host's tokenizer.

    Mappers of one pass do not share these tokens: making them again costs less than keeping them.
    """

    def __init__(self, options: ModelOptions, texts: DeviceTexts, on_host: TextTokenizer) -> None:
        try:
            self._on_gpu = gpu_tokenizer(on_host)
        except NotEligibleError as err:
            raise refused(options, err) from err
        self._texts = texts
        self._on_host = on_host

    @property
    def char_counts(self) -> np.ndarray:
        """Characters of each text, int64 (texts,)."""
        return self._texts.char_counts

    def windows(self, start: int, stop: int, stats: RunStats) -> Windows:
        """Tokenize the texts from `start` to `stop`; without memory for that, on the host."""
        block = self._texts[start:stop]
        try:
            tokens, host_count = with_memory_released(
                lambda: tokenize_texts(block, self._on_gpu, self._on_host)
            )
        except (RuntimeError, MemoryError) as err:
            if not is_out_of_memory(err):
                raise
            logger.warning("the GPU has no memory to tokenize %d texts: the host does", len(block))
            tokens, host_count = self._on_host(block.to_list()), len(block)
        stats.host_fallback_texts += host_count
        stats.gpu_tokenized_texts += len(block) - host_count
        return only_windows(tokens)


_built: WeakKeyDictionary[TextTokenizer, GpuWordPiece] = WeakKeyDictionary()
_building = threading.Lock()


def gpu_tokenizer(on_host: TextTokenizer) -> GpuWordPiece:
    """Return the GPU's counterpart of `on_host`, built once; NotEligibleError if there is none."""
    if on_host.backend is None:
        raise NotEligibleError("its tokenizer is written in Python: tokenize on the host")
    if on_host.cuts_left:
        raise NotEligibleError("it cuts texts on the left: tokenize on the host")
    with _building:
        if on_host not in _built:
            _built[on_host] = GpuWordPiece(on_host.backend, on_host.max_tokens)
        return _built[on_host]


def tokenize_texts(
    texts: DeviceTexts,
    on_gpu: Callable[[Any], GpuTokens],
    on_host: Callable[[Sequence[Any]], TokenBatch],
) -> tuple[TokenBatch, int]:
    """Return the tokens of every text, none of them null, and how many `on_gpu` left to `on_host`.

    Ids are on the GPU, complete for a reader on the default stream, or on one that waits for it.
    """
    tokens = on_gpu(texts.series)
    left = tokens.fallback_rows
    if len(left):
        tokens = merge(tokens, on_host(texts.take(left).to_list()))
    return TokenBatch(tokens.ids, tokens.offsets, whole_lengths=tokens.whole_lengths), len(left)


# Which tokenizers.


@dataclass(frozen=True)
class WordPieceRules:
    """Rules of a tokenizer that the GPU has to know."""

    # The token of each id; something that no text contains where an id has none.
    vocabulary: tuple[str, ...]
    is_lowercase: bool  # letters lose case and accents
    prefix: tuple[int, ...]  # ids before those of a text
    suffix: tuple[int, ...]
    special: tuple[str, ...]  # tokens that have one id wherever they are spelt out

    @property
    def added_count(self) -> int:
        """Count of special tokens that every text gets."""
        return len(self.prefix) + len(self.suffix)


def read_rules(backend: Any) -> WordPieceRules:
    """Return a ``tokenizers.Tokenizer``'s rules for single texts; NotEligibleError for others."""
    description = json.loads(backend.to_str())
    model = description["model"]
    for name, wanted in (
        ("type", "WordPiece"),
        ("continuing_subword_prefix", "##"),
        ("unk_token", "[UNK]"),
    ):
        _require(model.get(name) == wanted, f"its model's {name} is {model.get(name)!r}")
    longest = model["max_input_chars_per_word"]
    _require(longest >= LONGEST_WORD_CHARS, f"it gives up on words of {longest + 1} characters")
    _require("[UNK]" in model["vocab"], "its vocabulary has no [UNK]")
    splitter = (description["pre_tokenizer"] or {}).get("type")
    _require(splitter == "BertPreTokenizer", f"its pre-tokenizer is {splitter}")
    side = (description["truncation"] or {}).get("direction", "Right")
    _require(side == "Right", "it cuts texts on the left")
    prefix, suffix = _read_added(description["post_processor"] or {})
    return WordPieceRules(
        _rows(model["vocab"]),
        _reads_lowercase(description["normalizer"] or {}),
        prefix,
        suffix,
        tuple(map(_read_special, description["added_tokens"])),
    )


def _require(is_met: bool, reason: str) -> None:
    if not is_met:
        raise NotEligibleError(f"{reason}, which cudf cannot do: tokenize on the host")


def _rows(vocabulary: dict[str, int]) -> tuple[str, ...]:
    tokens = {number: token for token, number in vocabulary.items()}
    _require(len(tokens) == len(vocabulary), "two tokens of its vocabulary have one id")
    # A word has no space, so that none equals the token of an unused id.
    return tuple(tokens.get(number, f" {number}") for number in range(max(tokens) + 1))


def _reads_lowercase(normalizer: dict[str, Any]) -> bool:
    kind = normalizer.get("type")
    _require(kind == "BertNormalizer", f"its normalizer is {kind}")
    for name in ("clean_text", "handle_chinese_chars"):
        _require(normalizer[name], f"its normalizer has {name}={normalizer[name]}")
    is_lowercase, strips = normalizer["lowercase"], normalizer["strip_accents"]
    _require(
        strips in (None, is_lowercase), f"it has lowercase={is_lowercase}, strip_accents={strips}"
    )
    return is_lowercase


def _read_added(processor: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids before and after those of a single text."""
    kind = processor.get("type")
    if kind == "BertProcessing":
        return (processor["cls"][1],), (processor["sep"][1],)
    _require(kind == "TemplateProcessing", f"its post-processor is {kind}")
    sides: list[list[int]] = [[]]
    for piece in processor["single"]:
        [(name, value)] = piece.items()
        _require(value["type_id"] == 0, "it gives a single text segment ids other than 0")
        if name == "Sequence":
            sides.append([])
        else:
            sides[-1] += processor["special_tokens"][value["id"]]["ids"]
    _require(len(sides) == 2 and any(sides), "its template adds no token to a text, or repeats it")
    return tuple(sides[0]), tuple(sides[1])


def _read_special(token: dict[str, Any]) -> str:
    _require(not token["normalized"], f"it finds {token['content']!r} in normalized text")
    return token["content"]


# Which texts.


def find_doubtful(codes: Tensor, chars: Tensor, special: Sequence[str]) -> Tensor:
    """Tell which texts, bool (texts,), may get other ids from libcudf than from the tokenizer.

    `codes` are each character's UTF-8 bytes as one number, int32, as ``Series.str.code_points``
    gives them; `chars` how many characters each text has; `special` tokens no text may contain.
    """
    places = [torch.nonzero(~_is_in(codes, SAFE)), _long_words(codes)]
    places += [_spelt(codes, token) for token in special]
    rows = torch.searchsorted(chars.cumsum(0), torch.cat(places).flatten(), right=True)
    is_doubtful = torch.zeros(len(chars), dtype=torch.bool, device=codes.device)
    is_doubtful[rows] = True
    return is_doubtful


def _is_in(codes: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Tell which characters are in one of the ranges of code points.

    Packed UTF-8 keeps the order of code points. Four bytes make a negative number, and are in order
    among themselves.
    """
    bounds = sorted((pack(chr(first)), pack(chr(last)) + 1) for first, last in ranges)
    edges = torch.tensor(bounds, dtype=torch.int32, device=codes.device).flatten()
    return torch.bucketize(codes, edges, right=True, out_int32=True) % 2 == 1


def _long_words(codes: Tensor) -> Tensor:
    """Return where more than `LONGEST_WORD_CHARS` characters without a break begin, (places, 1).

    One text's end and the next one's beginning may count as one word: that does no harm.
    """
    breaks = _is_in(codes, BREAKS).cumsum(0, dtype=torch.int32)
    before = torch.nn.functional.pad(breaks, (1, 0))  # breaks before each character
    window = LONGEST_WORD_CHARS + 1
    return torch.nonzero(before[window:] == before[:-window])


def _spelt(codes: Tensor, token: str) -> Tensor:
    """Return where `token` begins, (places, 1)."""
    starts = torch.nonzero(codes == pack(token[0]))
    for distance, char in enumerate(token[1:], 1):
        ahead = starts + distance
        is_there = ahead < len(codes)
        is_there &= codes[ahead.clamp(max=len(codes) - 1)] == pack(char)
        starts = starts[is_there].unsqueeze(1)
    return starts


def pack(char: str) -> int:
    """Return a character's UTF-8 bytes as a signed number of 32 bits."""
    number = int.from_bytes(char.encode(), "big")
    return number - (1 << 32) if number >= 1 << 31 else number


def probe_texts() -> list[str]:
    """Return texts that hold every safe character, within a word and alone."""
    chars = [chr(code) for first, last in SAFE for code in range(first, last + 1)]
    groups = [chars[start : start + 32] for start in range(0, len(chars), 32)]
    return [" ".join(f"a{char}b {char}" for char in group) for group in groups]


# Tokens.


class GpuTokens(NamedTuple):
    """Token ids of many texts, end to end."""

    ids: Tensor  # on the GPU, special tokens included, int32 (tokens,)
    # Text i has `ids[offsets[i]:offsets[i + 1]]`: nothing if it is null or left to the host.
    offsets: np.ndarray  # int64 (texts + 1,)
    whole_lengths: np.ndarray  # before texts were cut, 0 where there are none; int64 (texts,)
    fallback_rows: np.ndarray  # texts that the host's tokenizer has to do, ascending, int64


class GpuWordPiece:
    """Tokenizer of cudf strings on the GPU that gives what a Hugging Face one gives on the host.

    `backend` is the ``backend_tokenizer`` of the model's tokenizer. At most `block_bytes` of text
    are tokenized at once; a longer text is left to the host. NotEligibleError if the tokenizer has
    other rules, or the installed cudf is found to tokenize otherwise.
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
        """Return ids, lengths, whole lengths and which texts are left to the host, of one block."""
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
        """Return ids without special tokens, counts including `_FIRST_TEXT`'s, doubtful texts."""
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
            tokens = self._tokenize(cudf.Series(texts), sys.maxsize, BLOCK_BYTES)
        ids, offsets = tokens.ids.cpu().numpy(), tokens.offsets
        for row, encoding in enumerate(host.encode_batch_fast(texts, add_special_tokens=True)):
            if ids[offsets[row] : offsets[row + 1]].tolist() != encoding.ids:
                raise NotEligibleError(
                    f"cudf {cudf.__version__} gives other ids than the tokenizer for a text of the "
                    f"characters U+{ord(texts[row][1]):04X} to U+{ord(texts[row][-1]):04X}"
                )


def with_special_tokens(
    flat: Tensor, starts: Tensor, counts: Tensor, rules: WordPieceRules, room: int
) -> tuple[Tensor, Tensor]:
    """Return ids and lengths of rows, each cut to `room` ids and put between the special tokens.

    `starts` and `counts` tell where each row is in `flat`.
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
    """Return the numbers from each of `starts` on, as many as `lengths` says, end to end."""
    ends = lengths.cumsum(0)
    shifts = starts - (ends - lengths)
    count = int(lengths.sum())
    shift = torch.repeat_interleave(shifts, lengths, output_size=count)
    return torch.arange(count, device=starts.device) + shift


def merge(tokens: GpuTokens, host: TokenBatch) -> GpuTokens:
    """Return `tokens` with the host tokenizer's ids for ``tokens.fallback_rows``, in that order.

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


def byte_blocks(sizes: np.ndarray, limit: int) -> Iterator[tuple[int, int, bool]]:
    """Yield blocks of texts of up to `limit` bytes: first, behind the last, and whether they fit.

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
    """Return a cudf Series without nulls as a tensor that shares its memory."""
    return torch.as_tensor(series.values, device="cuda")

"""Texts to tokens on the host: cut to a length or into windows, ragged, never padded."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import sys
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpuclassify.tokenizing.gaps import Words, prefix_end, steps_of, word_cache

# Of English text; WordPiece and Unigram vocabularies have 4 to 5, and another look costs more.
MOST_CHARS_PER_TOKEN = 6


class TextTokenizer:
    """Hugging Face tokenizer that cuts at a fixed length, special tokens included, and never pads.

    The `tokenizer` is configured here and must not be shared: its truncation is state, and changing
    it while another thread tokenizes is an error in the tokenizers library.

    With an `overlap`, long texts are cut into windows that share so many tokens, instead of losing
    their rest. `counts_rest` says whether `TextTokens.whole_length` has to be known of texts that
    are cut. If not, no more of a long text is tokenized than a prefix that is proven to begin with
    the same tokens.

    With `end_chars`, the first tokens of so many characters from the beginning and the last tokens
    of so many from the end are read of texts with more than twice as many, and of others those of
    the beginning: what FinePDFs reads, whose ``create_text_chunks`` also drops the word at a cut.

    With a `pairing`, a query and a `PairTruncation`, each text is the second of a pair that the
    query begins; where the query is None, texts are tuples of two.

    ValueError if special tokens, of which a window has `special_tokens`, and overlap leave no room.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_tokens: int,
        overlap: int | None = None,
        *,
        counts_rest: bool = True,
        end_chars: int | None = None,
        pairing: tuple[str | None, str] | None = None,
    ) -> None:
        self.max_tokens = max_tokens
        self.overlap = overlap
        self.counts_rest = counts_rest
        self.end_chars = end_chars
        self.pairing = pairing
        self._tokenizer = tokenizer
        is_pair = pairing is not None
        self.special_tokens: int = tokenizer.num_special_tokens_to_add(pair=is_pair)
        self.unknown_id: int | None = tokenizer.unk_token_id
        self._room = max_tokens - self.special_tokens
        if self._room < 1 or (overlap or 0) >= self._room:
            shared = "" if overlap is None else f" and window_overlap={overlap}"
            raise ValueError(
                f"max_seq_length={max_tokens} leaves no room for text beside "
                f"{self.special_tokens} special tokens{shared}: pass a larger max_seq_length"
            )
        # The `tokenizers.Tokenizer` that does the work; None for one written in Python.
        self.backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._first_chars = sys.maxsize
        if self.backend is not None:
            self.backend.no_padding()
            self.backend.no_truncation()
            self._frame = frame_of(self.backend, is_pair)
            types = self._frame[1]
            reads_prefix = self.cuts_once and not counts_rest and not self.cuts_left
            self.words = word_cache(self.backend)
            if reads_prefix and self.words.ends_words:
                self._first_chars = MOST_CHARS_PER_TOKEN * self._room
        else:
            probes = ["a probe"] * (1 + is_pair)
            types = tokenizer(*probes, return_token_type_ids=True)["token_type_ids"]
        # Classes of transformers 5 no longer name segment ids that those of 4 gave.
        inputs = tokenizer.init_kwargs.get("model_input_names", ["token_type_ids"])
        self._has_type_ids = "token_type_ids" in inputs and any(types)
        fillers = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        self._filler = [next((number for number in fillers if number is not None), 0)]

    @property
    def cuts_left(self) -> bool:
        """Whether the end of a long text is kept, and not its beginning."""
        return self._tokenizer.truncation_side == "left"

    @property
    def cuts_once(self) -> bool:
        """Whether every text has one window, at the same end of each."""
        return self.overlap is None and self.end_chars is None

    @property
    def cut(self) -> Hashable:
        """Key that is equal for tokenizers that cut a text of too many equal tokens alike."""
        return (self.max_tokens, self.overlap, self.counts_rest)

    @property
    def special_before(self) -> int:
        """Number of special tokens before those of the text; of a tokenizers library's one."""
        return self._frame[2][0]

    @functools.cached_property
    def fingerprint(self) -> Hashable:
        """Key that is equal for tokenizers that give every text equal tokens before any cut.

        One written in Python has no complete description, and equals itself only.
        """
        if self.backend is None:
            return id(self)
        description = json.loads(self.backend.to_str())
        description.pop("truncation")
        description.pop("padding")
        digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
        cuts = (self.cuts_left, self.end_chars, self.pairing)
        return (digest, self._has_type_ids, *self._filler, *cuts)

    def __call__(self, texts: Sequence[str]) -> TokenBatch:
        """Tokenize `texts`, special tokens included: the first window of each."""
        if self.backend is None or not self.cuts_once:
            return first_windows(self.encode(texts)).tokens
        sides = self._words_of(self._sides(texts))
        lengths = np.stack([side.lengths for side in sides])
        kept = self._kept(lengths)
        stops = lengths if self.cuts_left else kept
        bounds = zip(sides, stops - kept, stops, strict=True)
        flats = [words.take(start, stop) for words, start, stop in bounds]
        special = len(self._frame[0]) - len(sides)
        whole = np.maximum(lengths.sum(0) + special, len(self._filler))
        return self._framed(flats, kept, whole)

    def _framed(self, flats: list[np.ndarray], kept: np.ndarray, whole: np.ndarray) -> TokenBatch:
        """Put special tokens around the ids of each side, of `kept`, int64 (sides, texts)."""
        around, types, places = self._frame
        counts = np.ones((len(around), kept.shape[1]), dtype=np.int64)
        counts[places] = kept
        is_empty = counts.sum(0) == 0
        counts[-1][is_empty] = len(self._filler)
        parts = np.tile(np.arange(len(around), dtype=np.int8), kept.shape[1])
        parts = np.repeat(parts, counts.T.ravel())  # of the frame, that each token is in
        offsets = offsets_of(counts.sum(0))
        special = np.array(around, dtype=np.int32)
        special[places] = (self._filler or [0])[0]
        ids = special[parts]
        for place, flat in zip(places, flats, strict=True):
            is_side = parts == place
            if self._filler:
                is_side[offsets[:-1][is_empty]] = False
            ids[is_side] = flat
        type_ids = np.array(types, dtype=np.int32)[parts] if self._has_type_ids else None
        return TokenBatch(ids, offsets, type_ids, whole)

    def char_counts(self, texts: Sequence[Any]) -> np.ndarray:
        """Count the characters of each text that are tokenized at first, int64 (texts,).

        More are tokenized if they prove too few.
        """
        if self.pairing is not None and self.pairing[0] is None:
            return np.array([len(first) + len(second) for first, second in texts], dtype=np.int64)
        most = sys.maxsize if self.end_chars is None or self.counts_rest else 2 * self.end_chars
        ends = (min(prefix_end(text, self._first_chars), most) for text in texts)
        return np.fromiter(ends, dtype=np.int64, count=len(texts))

    def count(self, texts: Sequence[str]) -> np.ndarray:
        """Count the tokens of each whole text without special ones, int64 (texts,)."""
        if self.backend is not None:
            return self.words(texts).lengths
        return np.fromiter(map(len, self._all_ids(texts)), np.int64, len(texts))

    def _sides(self, texts: Sequence[Any]) -> list[Sequence[str]]:
        """Return the texts, or those of each side of pairs."""
        if self.pairing is None:
            return [texts]
        query, _ = self.pairing
        if query is not None:
            return [[query] * len(texts), texts]
        return [[pair[side] for pair in texts] for side in (0, 1)]

    def _kept(self, lengths: np.ndarray) -> np.ndarray:
        """Return how many of these tokens stay, int64 (sides, texts), cut as transformers does."""
        if self.pairing is None:
            return np.minimum(lengths, self._room)
        room, (_, truncation) = self._room, self.pairing
        is_cut = lengths.sum(0) > room
        if truncation == "longest_first":
            least = np.minimum(lengths.min(0), room // 2)
            is_less = lengths[0] <= lengths[1]
            if self.backend is None:  # there the first keeps what cannot be halved
                is_less &= lengths[0] == least
            halves = np.where(is_less, [least, room - least], [room - least, least])
            return np.where(is_cut, halves, lengths)
        longest = lengths[0][is_cut].max(initial=0)
        if longest >= room:
            raise ValueError(
                f'pair_truncation="{truncation}" leaves the first text whole, which has {longest} '
                f"tokens, and both have room for {room}: pass a shorter query, a larger "
                'max_seq_length, or pair_truncation="longest_first"'
            )
        return np.where(is_cut, [lengths[0], room - lengths[0]], lengths)

    def _cut_pair(self, *sides: list[int]) -> TextTokens:
        """Cut a pair of a tokenizer that is written in Python, by the ids of both texts."""
        lengths = np.array([[len(ids)] for ids in sides])
        kept = self._kept(lengths)
        starts = (lengths - kept) * self.cuts_left
        cut = [ids[s[0] :][: n[0]] for ids, s, n in zip(sides, starts, kept, strict=True)]
        return self._windows([cut], int(lengths.sum()) + self.special_tokens)

    def encode(self, texts: Sequence[str]) -> list[TextTokens]:
        """Tokenize each of `texts`.

        An empty text of a tokenizer without special tokens becomes its first-or-last-of-text token,
        because a model cannot read nothing.
        """
        if self.end_chars is not None:
            return [self._read_ends(text, self.end_chars) for text in texts]
        if self.backend is None and self.pairing is not None:
            return list(map(self._cut_pair, *map(self._all_ids, self._sides(texts))))
        if self.backend is None or not self.cuts_once:
            return list(map(self.cut_ids, self._all_ids(texts)))
        batch = self(texts)
        assert batch.whole_lengths is not None
        types, whole, tokens = batch.type_ids, batch.whole_lengths.tolist(), []
        for row, (start, stop) in enumerate(itertools.pairwise(batch.offsets.tolist())):
            row_types = None if types is None else [types[start:stop]]
            tokens.append(TextTokens([batch.ids[start:stop]], row_types, whole[row]))
        return tokens

    def _read_ends(self, text: str, chars: int) -> TextTokens:
        """Return the windows at both ends of a text, or at the beginning of a shorter one."""
        parts = [text[:chars], text[-chars:]] if len(text) > 2 * chars else [text[:chars]]
        ends = self._all_ids(parts)
        count = sum(map(len, ends))
        if len(text) > chars:
            count = len(self._all_ids([text])[0]) if self.counts_rest else count + 1
        read = [ids[: self._room] if n == 0 else ids[-self._room :] for n, ids in enumerate(ends)]
        return self._windows(read, count + len(read) * self.special_tokens)

    def _all_ids(self, texts: Sequence[str]) -> list[Any]:
        """Return ids of each text without special tokens, or of a prefix that is long enough."""
        if self.backend is not None:
            (words,) = self._words_of([texts])
            flat = words.take(np.zeros_like(words.lengths), words.lengths)
            bounds = itertools.pairwise(offsets_of(words.lengths).tolist())
            return [flat[start:stop] for start, stop in bounds]
        encode = functools.partial(self._tokenizer, add_special_tokens=False, verbose=False)
        ids = {text: encode(text)["input_ids"] for text in dict.fromkeys(texts)}
        return [ids[text] for text in texts]

    def _words_of(self, sides: Sequence[Sequence[str]]) -> list[Words]:
        """Tokenize each side's texts, or prefixes that are proven to be cut like the whole texts.

        The prefixes are doubled until that is so.
        """
        chars = self._first_chars
        stops = [[prefix_end(text, chars) for text in side] for side in sides]
        words = [self.words(prefixes_of(*side)) for side in zip(sides, stops, strict=True)]
        sizes = np.array([list(map(len, side)) for side in sides])
        while (is_short := self._is_too_short(words, np.array(stops) == sizes)).any():
            chars *= 2
            for side, is_row in enumerate(is_short):
                rows = np.flatnonzero(is_row).tolist()
                texts = [sides[side][row] for row in rows]
                longer = [prefix_end(text, chars) for text in texts]
                words[side].replace(rows, self.words(prefixes_of(texts, longer)))
                for row, stop in zip(rows, longer, strict=True):
                    stops[side][row] = stop
        return words

    def _is_too_short(self, words: list[Words], is_whole: np.ndarray) -> np.ndarray:
        """Return whether more of each text must be read to cut it, bool (sides, texts)."""
        lengths = np.stack([side.lengths for side in words])
        is_short = lengths <= self._room
        if len(words) == 2 and self._room % 2:
            # The longer of two long texts keeps the odd token. Which one is longer is settled once
            # the shorter one is read whole.
            is_long = (lengths > self._room // 2).all(0)
            is_short |= is_long & (lengths <= np.where(is_whole, lengths, sys.maxsize).min(0))
        return is_short & ~is_whole

    def cut_ids(self, ids: list[int]) -> TextTokens:
        """Return the windows, or the only one, of a text with these ids."""
        overlap, room = self.overlap or 0, self._room
        starts = range(0, max(len(ids) - overlap, 1), room - overlap)
        bounds = [(start, start + room) for start in starts[: 1 if self.overlap is None else None]]
        if self.cuts_left:
            bounds = [(max(len(ids) - stop, 0), len(ids) - start) for start, stop in bounds]
        parts = [ids[start:stop] for start, stop in bounds]
        return self._windows(parts, len(ids) + self.special_tokens)

    def _windows(self, parts: list[Any], whole_length: int) -> TextTokens:
        """Return windows of these ids, or of these pairs of ids, each with special tokens."""
        framed = [self._with_special(ids) for ids in parts]
        windows = [
            np.asarray(ids if len(ids) else self._filler, dtype=np.int32) for ids, _ in framed
        ]
        types = None
        if self._has_type_ids:
            types = [np.asarray(row or [0], dtype=np.int32) for _, row in framed]
        return TextTokens(windows, types, max(whole_length, 1))

    def _with_special(self, ids: Any) -> tuple[Any, list[int]]:
        """Return ids with the special tokens around them, and the segment ids of all."""
        if self.backend is None:
            texts = [ids] if self.pairing is None else ids
            types = self._tokenizer.create_token_type_ids_from_sequences(*texts)
            return self._tokenizer.build_inputs_with_special_tokens(*texts), types
        around, types, (place,) = self._frame
        special, behind = np.array(around, dtype=np.int32), place + 1
        return (
            np.concatenate([special[:place], ids, special[behind:]], dtype=np.int32),
            types[:place] + types[place:behind] * len(ids) + types[behind:],
        )


def prefixes_of(texts: Sequence[str], stops: Sequence[int]) -> list[str]:
    """Return each text up to its stop."""
    return [text[:stop] for text, stop in zip(texts, stops, strict=True)]


def frame_of(backend: Any, is_pair: bool = False) -> tuple[list[int], list[int], list[int]]:
    """Return ids and segment ids of a text of one token, or a pair, and the tokens' places."""
    from tokenizers import Tokenizer, models

    probe = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    if backend.post_processor is not None:
        probe.post_processor = backend.post_processor
    encoding = probe.encode("a", "a" if is_pair else None)
    places = [place for place, mask in enumerate(encoding.special_tokens_mask) if not mask]
    sides = [encoding.sequence_ids[place] for place in places]
    if sides != [*range(1 + is_pair)]:
        raise ValueError(f"the tokenizer puts texts in the order {sides}, which is not supported")
    steps = steps_of(json.loads(backend.to_str())["post_processor"], "processors")
    is_framed = any(step["type"] != "ByteLevel" for step in steps)  # else nobody has set types
    return encoding.ids, encoding.type_ids if is_framed else [0] * len(encoding.ids), places


class StaticTokenizer(TextTokenizer):
    """Tokenizer of a static model: without special tokens, and texts may have no tokens.

    Of a text, no more than `token_chars` are read for each token, if it is set.
    """

    def __init__(
        self, tokenizer: Any, max_tokens: int, *, token_chars: int | None = None, **cut: Any
    ) -> None:
        super().__init__(tokenizer, max_tokens, **cut)
        self._chars = sys.maxsize if token_chars is None else max_tokens * token_chars
        self._filler = []

    def __call__(self, texts: Sequence[str]) -> TokenBatch:
        """Tokenize `texts`: the first window of each."""
        if not self.cuts_once:
            return super().__call__(texts)
        tokens = super().__call__([text[: self._chars] for text in texts])
        is_cut = np.fromiter(map(len, texts), np.int64, len(texts)) > self._chars
        assert tokens.whole_lengths is not None
        whole = tokens.whole_lengths + is_cut
        if self.counts_rest:
            whole = np.maximum(whole, self.words(texts).lengths)
        return replace(tokens, whole_lengths=whole)


# What texts become.


@dataclass(frozen=True)
class TokenBatch:
    """Token ids of many texts, end to end."""

    ids: np.ndarray  # int32 (tokens,)
    offsets: np.ndarray  # int64 (texts + 1,); text i has `ids[offsets[i]:offsets[i + 1]]`
    # Segment ids, only of tokenizers that give a single text other ids than zero; int32 (tokens,).
    type_ids: np.ndarray | None = None
    # Tokens that each text had before it was cut, or some number above its length if it was cut and
    # they were not counted, int64 (texts,). None: nothing was cut.
    whole_lengths: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each text, int64 (texts,)."""
        return np.diff(self.offsets)

    def take(self, rows: Sequence[int] | np.ndarray) -> TokenBatch:
        """Return some of the texts."""
        bounds = [slice(self.offsets[row], self.offsets[row + 1]) for row in rows]
        types = () if self.type_ids is None else [self.type_ids[part] for part in bounds]
        whole = None if self.whole_lengths is None else self.whole_lengths[list(rows)]
        ids = [self.ids[part] for part in bounds]
        return flat_batch(ids, types, whole)

    def digests(self) -> Iterator[bytes]:
        """Yield for each text 16 bytes that only equal tokens have."""
        ids, *others = (part.data for part in (self.ids, self.type_ids) if part is not None)
        for start, stop in itertools.pairwise(self.offsets.tolist()):
            digest = hashlib.blake2b(ids[start:stop], digest_size=16)
            for part in others:
                digest.update(part[start:stop])
            yield digest.digest()

    @property
    def seen_share(self) -> np.ndarray:
        """Share of each whole text's tokens that are here, float32 (texts,).

        Below 1 if the text was cut; how far, only if the tokens behind the cut were counted.
        """
        if self.whole_lengths is None:
            return np.ones(len(self), dtype=np.float32)
        shares = self.lengths / np.maximum(self.whole_lengths, 1)
        return np.where(self.whole_lengths, shares, 1).astype(np.float32)


def flat_batch(
    rows: Sequence[np.ndarray],
    type_ids: Sequence[np.ndarray] = (),
    whole_lengths: np.ndarray | None = None,
) -> TokenBatch:
    """Join rows of ids end to end."""
    lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
    types = _flat(type_ids) if type_ids else None
    return TokenBatch(_flat(rows), offsets_of(lengths), types, whole_lengths)


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Return where rows of these lengths begin and end, int64 (rows + 1,)."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])


def _flat(rows: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(rows) if rows else np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class TextTokens:
    """Tokens of one text, special ones included: its only window, or all of them.

    `type_ids` are the segment ids of each window. `whole_length` is of the whole text, or of both
    windows if it was read at its ends; where only parts were tokenized, more than they have.
    """

    windows: list[np.ndarray]
    type_ids: list[np.ndarray] | None
    whole_length: int


@dataclass(frozen=True)
class Windows:
    """Windows of many texts that are run, in the texts' order; arrays are by text."""

    tokens: TokenBatch  # every window as a text of its own
    counts: np.ndarray  # how many of them each text has, int64; at least one
    whole_counts: np.ndarray  # how many it would have; more where only the first one is run
    seen_share: np.ndarray  # of each text's tokens, float32, as `TokenBatch.seen_share` tells it


def all_windows(texts: Sequence[TextTokens]) -> Windows:
    """Return every window of every text."""
    counts = _window_counts(texts)
    types = [ids for text in texts if text.type_ids is not None for ids in text.type_ids]
    tokens = flat_batch([ids for text in texts for ids in text.windows], types)
    shares = [min(1, sum(map(len, text.windows)) / text.whole_length) for text in texts]
    return Windows(tokens, counts, counts, np.array(shares, dtype=np.float32))


def first_windows(texts: Sequence[TextTokens]) -> Windows:
    """Return the first window of each text."""
    whole = np.fromiter((text.whole_length for text in texts), dtype=np.int64, count=len(texts))
    types = [text.type_ids[0] for text in texts if text.type_ids is not None]
    tokens = flat_batch([text.windows[0] for text in texts], types, whole)
    ones = np.ones(len(texts), dtype=np.int64)
    return Windows(tokens, ones, _window_counts(texts), tokens.seen_share)


def only_windows(tokens: TokenBatch) -> Windows:
    """Return the windows of texts that have one each, cut or not."""
    ones = np.ones(len(tokens), dtype=np.int64)
    return Windows(tokens, ones, ones, tokens.seen_share)


def _window_counts(texts: Sequence[TextTokens]) -> np.ndarray:
    return np.fromiter((len(text.windows) for text in texts), dtype=np.int64, count=len(texts))


def aggregate(values: np.ndarray, counts: np.ndarray, lengths: np.ndarray, how: str) -> np.ndarray:
    """Return one row a text, float32 (texts, outputs), from one row a window.

    `how` is "mean" or "max" of each output, or "tokens": the mean weighted by `lengths`, the text's
    tokens in each window, which is the plain mean of a text without any. A text with a single
    window keeps its values to the bit.
    """
    if not len(counts):
        return np.zeros((0, values.shape[1]), dtype=values.dtype)
    starts = np.cumsum(counts) - counts
    if how == "max":
        return np.maximum.reduceat(values, starts, axis=0)
    weights = np.ones(len(values))
    if how == "tokens":
        has_any = np.repeat(np.add.reduceat(lengths, starts) > 0, counts)
        weights[has_any] = lengths[has_any]
    sums = np.add.reduceat(values * weights[:, None], starts, axis=0)
    return (sums / np.add.reduceat(weights, starts)[:, None]).astype(np.float32)

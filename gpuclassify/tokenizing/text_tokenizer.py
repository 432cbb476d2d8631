"""Tokenizing of texts on the host: they are cut to a length or into windows, and never padded.

A window is a span of a text's tokens that is as long as the model reads at once.
"""

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

# Characters per token for the first prefix of a long text that is tokenized. English has 4 to 5 per
# token, but too short a prefix costs more than one too long, because the text is tokenized again.
MOST_CHARS_PER_TOKEN = 6

# Query and truncation of text pairs. The query is the first text of every pair, None if texts are
# pairs already, or a tuple of second texts that are paired with each text. The truncation is
# "longest_first", "only_first" or "only_second", as in transformers.
Pairing = tuple[str | tuple[str, ...] | None, str]


class TextTokenizer:
    """Hugging Face tokenizer that cuts texts at `max_tokens`, special tokens included; never pads.

    The `tokenizer` is configured here and must not be shared: its truncation is state, and changing
    it while another thread tokenizes is an error in the tokenizers library.

    With an `overlap`, long texts are cut into windows that share that many tokens, instead of being
    truncated. If `counts_rest` is false, the tokens behind a cut are not counted, and only a prefix
    of a long text may be tokenized.

    With `end_chars`, a text longer than twice that has two windows: tokens of its first `end_chars`
    characters, and tokens of its last ones, as FinePDFs reads texts (but its ``create_text_chunks``
    also drops the word at a cut).

    With `has_special_once`, a text's windows are spans of the text with its special tokens, as in
    the usual evaluation of language models. Otherwise, every window has special tokens.

    `pairing` makes pairs of texts: see `Pairing`. With a tuple of second texts, each text has one
    window per pair.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_tokens: int,
        overlap: int | None = None,
        *,
        counts_rest: bool = True,
        end_chars: int | None = None,
        pairing: Pairing | None = None,
        has_special_once: bool = False,
    ) -> None:
        self.max_tokens = max_tokens
        self.overlap = overlap
        self.counts_rest = counts_rest
        self.end_chars = end_chars
        self.pairing = pairing
        self.has_special_once = has_special_once
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
            self._template = frame_of(self.backend, is_pair)
            types = self._template[1]
            reads_prefix = overlap is None and end_chars is None
            reads_prefix = reads_prefix and not counts_rest and not self.cuts_left
            self.words = word_cache(self.backend)
            if reads_prefix and self.words.ends_words:
                self._first_chars = MOST_CHARS_PER_TOKEN * self._room
        else:
            probes = ["a probe"] * (1 + is_pair)
            types = tokenizer(*probes, return_token_type_ids=True)["token_type_ids"]
        # Some classes of transformers 5 no longer declare the segment ids that they gave in 4.
        inputs = tokenizer.init_kwargs.get("model_input_names", ["token_type_ids"])
        self._has_type_ids = "token_type_ids" in inputs and any(types)
        fillers = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        self._filler = [next((number for number in fillers if number is not None), 0)]
        if self.hypotheses:
            self._check_hypotheses()

    @property
    def hypotheses(self) -> tuple[str, ...]:
        """Second texts to pair with every text, such as zero-shot hypotheses; () without any."""
        query = None if self.pairing is None else self.pairing[0]
        return query if isinstance(query, tuple) else ()

    def _check_hypotheses(self) -> None:
        for hypothesis, ids in zip(self.hypotheses, self._all_ids(self.hypotheses), strict=True):
            if len(ids) >= self._room:
                raise ValueError(
                    f"{hypothesis!r} has {len(ids)} tokens, and the text and it have room for "
                    f"{self._room}: pass a shorter description of the label, or a larger "
                    "max_seq_length"
                )

    @property
    def cuts_left(self) -> bool:
        """Whether truncation keeps the end of a long text, and not its beginning."""
        return self._tokenizer.truncation_side == "left"

    @property
    def cuts_once(self) -> bool:
        """Whether long texts are truncated, so that every text has a single window."""
        return self.overlap is None and self.end_chars is None and not self.hypotheses

    @property
    def cut(self) -> Hashable:
        """Key of the settings of cuts that are not in `fingerprint`, to compare tokenizers."""
        return (self.max_tokens, self.overlap, self.counts_rest)

    @property
    def special_before(self) -> int:
        """Number of special tokens before a text's own tokens; there must be a `backend`."""
        return self._template[2][0]

    @functools.cached_property
    def fingerprint(self) -> Hashable:
        """Key of the tokenizer: equal keys mean that texts that are not cut have equal tokens.

        A tokenizer written in Python has a key of its own, because it has no complete description.
        """
        if self.backend is None:
            return id(self)
        description = json.loads(self.backend.to_str())
        description.pop("truncation")
        description.pop("padding")
        digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
        cuts = (self.cuts_left, self.end_chars, self.pairing, self.has_special_once)
        return (digest, self._has_type_ids, *self._filler, *cuts)

    def __call__(self, texts: Sequence[str]) -> TokenBatch:
        """Tokenize texts to a batch, truncated to the first window of each, with special tokens."""
        if self.backend is None or not self.cuts_once:
            return first_windows(self.encode(texts)).tokens
        return self._cut_sides(self._tokenize_sides(self._split_sides(texts)))

    def _cut_sides(self, sides: list[Words]) -> TokenBatch:
        """Truncate the tokens of texts, or of both sides of pairs, and add special tokens."""
        lengths = np.stack([side.lengths for side in sides])
        kept = self._truncated_lengths(lengths)
        stops = lengths if self.cuts_left else kept
        bounds = zip(sides, stops - kept, stops, strict=True)
        flats = [words.take(start, stop) for words, start, stop in bounds]
        special = len(self._template[0]) - len(sides)
        whole = np.maximum(lengths.sum(0) + special, len(self._filler))
        return self._add_special(flats, kept, whole)

    def _add_special(
        self, flats: list[np.ndarray], kept: np.ndarray, whole: np.ndarray
    ) -> TokenBatch:
        """Make a batch by adding special tokens to the token ids of truncated texts or pairs.

        `flats` has the concatenated ids of each side, `kept` (sides, texts) their number per text,
        and `whole` (texts,) the number before truncation, with special tokens.
        """
        template, types, slots = self._template
        counts = np.ones((len(template), kept.shape[1]), dtype=np.int64)
        counts[slots] = kept
        is_empty = counts.sum(0) == 0
        counts[-1][is_empty] = len(self._filler)
        parts = np.tile(np.arange(len(template), dtype=np.int8), kept.shape[1])
        parts = np.repeat(parts, counts.T.ravel())  # each token's index in the template
        offsets = offsets_of(counts.sum(0))
        special = np.array(template, dtype=np.int32)
        special[slots] = (self._filler or [0])[0]
        ids = special[parts]
        for slot, flat in zip(slots, flats, strict=True):
            is_side = parts == slot
            if self._filler:
                is_side[offsets[:-1][is_empty]] = False
            ids[is_side] = flat
        type_ids = np.array(types, dtype=np.int32)[parts] if self._has_type_ids else None
        return TokenBatch(ids, offsets, type_ids, whole)

    def char_counts(self, texts: Sequence[Any]) -> np.ndarray:
        """Estimate the characters of each text that will be tokenized, int64 (texts,)."""
        if self.pairing is not None and self.pairing[0] is None:
            return np.array([len(first) + len(second) for first, second in texts], dtype=np.int64)
        most = sys.maxsize if self.end_chars is None or self.counts_rest else 2 * self.end_chars
        ends = (min(prefix_end(text, self._first_chars), most) for text in texts)
        return np.fromiter(ends, dtype=np.int64, count=len(texts))

    def count(self, texts: Sequence[str]) -> np.ndarray:
        """Count the tokens of each whole text without special tokens, int64 (texts,)."""
        if self.backend is not None:
            return self.words(texts).lengths
        return np.fromiter(map(len, self._all_ids(texts)), np.int64, len(texts))

    def _split_sides(self, texts: Sequence[Any]) -> list[Sequence[str]]:
        """Return the sides to tokenize: [texts], or for pairs, [first texts, second texts]."""
        if self.pairing is None:
            return [texts]
        query, _ = self.pairing
        if isinstance(query, str):
            return [[query] * len(texts), texts]
        return [[pair[side] for pair in texts] for side in (0, 1)]

    def _truncated_lengths(self, lengths: np.ndarray) -> np.ndarray:
        """Return numbers of tokens after truncation as in transformers, int64 (sides, texts)."""
        if self.pairing is None:
            return np.minimum(lengths, self._room)
        room, (_, truncation) = self._room, self.pairing
        is_cut = lengths.sum(0) > room
        if truncation == "longest_first":
            least = np.minimum(lengths.min(0), room // 2)
            is_less = lengths[0] <= lengths[1]
            if self.backend is None:  # a Python tokenizer gives the odd token to the first text
                is_less &= lengths[0] == least
            halves = np.where(is_less, [least, room - least], [room - least, least])
            return np.where(is_cut, halves, lengths)
        if truncation == "only_first":  # `_check_hypotheses` has made sure that there is room
            return np.where(is_cut, [room - lengths[1], lengths[1]], lengths)
        longest = lengths[0][is_cut].max(initial=0)
        if longest >= room:
            raise ValueError(
                f'pair_truncation="{truncation}" leaves the first text whole, which has {longest} '
                f"tokens, and both have room for {room}: pass a shorter query, a larger "
                'max_seq_length, or pair_truncation="longest_first"'
            )
        return np.where(is_cut, [lengths[0], room - lengths[0]], lengths)

    def _cut_pair(self, *sides: list[int]) -> TextTokens:
        """Truncate and join the token ids of a pair, for tokenizers written in Python."""
        lengths = np.array([[len(ids)] for ids in sides])
        kept = self._truncated_lengths(lengths)
        starts = (lengths - kept) * self.cuts_left
        cut = [ids[s[0] :][: n[0]] for ids, s, n in zip(sides, starts, kept, strict=True)]
        return self._windows([cut], int(lengths.sum()) + self.special_tokens)

    def encode(self, texts: Sequence[str]) -> list[TextTokens]:
        """Tokenize texts, and return all windows of each text.

        Without special tokens, an empty text becomes a single begin-of-text, end-of-text or padding
        token, because a model needs at least one.
        """
        if self.end_chars is not None:
            return [self._read_ends(text, self.end_chars) for text in texts]
        if self.hypotheses:
            return self._encode_pairs(texts)
        if self.backend is None and self.pairing is not None:
            return list(map(self._cut_pair, *map(self._all_ids, self._split_sides(texts))))
        if self.backend is None or not self.cuts_once:
            return list(map(self.cut_ids, self._all_ids(texts)))
        return _split_batch(self(texts))

    def _encode_pairs(self, texts: Sequence[str]) -> list[TextTokens]:
        """Tokenize texts once, and pair each with every hypothesis, in a window per pair."""
        hypotheses = self.hypotheses
        if self.backend is None:
            firsts, seconds = self._all_ids(texts), self._all_ids(hypotheses)
            pairs = [[self._cut_pair(first, second) for first in firsts] for second in seconds]
        else:
            (words,) = self._tokenize_sides([texts])
            others = (self.words([hypothesis] * len(texts)) for hypothesis in hypotheses)
            pairs = [_split_batch(self._cut_sides([words, other])) for other in others]
        return [_join_windows(tokens) for tokens in zip(*pairs, strict=True)]

    def _read_ends(self, text: str, chars: int) -> TextTokens:
        """Tokenize a text's first and last `chars` characters, for ``long_text="ends"``."""
        parts = [text[:chars], text[-chars:]] if len(text) > 2 * chars else [text[:chars]]
        ends = self._all_ids(parts)
        count = sum(map(len, ends))
        if len(text) > chars:
            count = len(self._all_ids([text])[0]) if self.counts_rest else count + 1
        read = [ids[: self._room] if n == 0 else ids[-self._room :] for n, ids in enumerate(ends)]
        return self._windows(read, count + len(read) * self.special_tokens)

    def _all_ids(self, texts: Sequence[str]) -> list[Any]:
        """Return ids of each text, or of a prefix with equal windows, without special tokens."""
        if self.backend is not None:
            (words,) = self._tokenize_sides([texts])
            flat = words.take(np.zeros_like(words.lengths), words.lengths)
            bounds = itertools.pairwise(offsets_of(words.lengths).tolist())
            return [flat[start:stop] for start, stop in bounds]
        encode = functools.partial(self._tokenizer, add_special_tokens=False, verbose=False)
        ids = {text: encode(text)["input_ids"] for text in dict.fromkeys(texts)}
        return [ids[text] for text in texts]

    def _tokenize_sides(self, sides: Sequence[Sequence[str]]) -> list[Words]:
        """Tokenize the texts on each side of pairs, or on the only side, without special tokens.

        Prefixes of long texts are tokenized instead, if possible, and doubled until they suffice.
        """
        chars = self._first_chars
        stops = [[prefix_end(text, chars) for text in side] for side in sides]
        words = [self.words(_cut_at(*side)) for side in zip(sides, stops, strict=True)]
        sizes = np.array([list(map(len, side)) for side in sides])
        while (is_short := self._is_too_short(words, np.array(stops) == sizes)).any():
            chars *= 2
            for side, is_row in enumerate(is_short):
                rows = np.flatnonzero(is_row).tolist()
                texts = [sides[side][row] for row in rows]
                longer = [prefix_end(text, chars) for text in texts]
                words[side].replace(rows, self.words(_cut_at(texts, longer)))
                for row, stop in zip(rows, longer, strict=True):
                    stops[side][row] = stop
        return words

    def _is_too_short(self, words: list[Words], is_whole: np.ndarray) -> np.ndarray:
        """Return a mask of texts whose prefix is too short to know their tokens after truncation.

        The mask and `is_whole`, true for prefixes that are the whole text, are bool (sides, texts).
        """
        lengths = np.stack([side.lengths for side in words])
        is_short = lengths <= self._room
        if len(words) == 2 and self._room % 2:
            # The longer of two long texts keeps the odd token. To know the longer text, the shorter
            # one must be read whole.
            is_long = (lengths > self._room // 2).all(0)
            is_short |= is_long & (lengths <= np.where(is_whole, lengths, sys.maxsize).min(0))
        return is_short & ~is_whole

    def cut_ids(self, ids: list[int]) -> TextTokens:
        """Cut a text's token ids into windows; without an `overlap`, truncate to one window.

        Special tokens are added to every window or, with `has_special_once`, to the text before it
        is cut, which then has several windows even without an `overlap`.
        """
        overlap, room = self.overlap or 0, self._room
        if self.has_special_once:
            (whole,) = self._windows([ids], len(ids) + self.special_tokens).windows
            starts = range(0, max(len(whole) - overlap, 1), self.max_tokens - overlap)
            return TextTokens([whole[at : at + self.max_tokens] for at in starts], None, len(whole))
        starts = range(0, max(len(ids) - overlap, 1), room - overlap)
        bounds = [(start, start + room) for start in starts[: 1 if self.overlap is None else None]]
        if self.cuts_left:
            bounds = [(max(len(ids) - stop, 0), len(ids) - start) for start, stop in bounds]
        parts = [ids[start:stop] for start, stop in bounds]
        return self._windows(parts, len(ids) + self.special_tokens)

    def _windows(self, parts: list[Any], whole_length: int) -> TextTokens:
        """Return a text's tokens, made by adding special tokens to each window in `parts`.

        Parts are token ids or, for pairs, the ids of both texts. `whole_length` has special tokens.
        """
        inputs = [self._make_input(ids) for ids in parts]
        windows = [
            np.asarray(ids if len(ids) else self._filler, dtype=np.int32) for ids, _ in inputs
        ]
        types = None
        if self._has_type_ids:
            types = [np.asarray(row or [0], dtype=np.int32) for _, row in inputs]
        return TextTokens(windows, types, max(whole_length, 1))

    def _make_input(self, ids: Any) -> tuple[Any, list[int]]:
        """Return `ids` (for pairs, two lists) with special tokens, and segment ids of all."""
        if self.backend is None:
            texts = [ids] if self.pairing is None else ids
            types = self._tokenizer.create_token_type_ids_from_sequences(*texts)
            return self._tokenizer.build_inputs_with_special_tokens(*texts), types
        template, types, (slot,) = self._template
        special, rest = np.array(template, dtype=np.int32), slot + 1
        return (
            np.concatenate([special[:slot], ids, special[rest:]], dtype=np.int32),
            types[:slot] + types[slot:rest] * len(ids) + types[rest:],
        )


def _cut_at(texts: Sequence[str], stops: Sequence[int]) -> list[str]:
    return [text[:stop] for text, stop in zip(texts, stops, strict=True)]


def frame_of(backend: Any, is_pair: bool = False) -> tuple[list[int], list[int], list[int]]:
    """Return a tokenizer's template of special tokens around a text, or around a pair of texts.

    It is the token ids and segment ids of an input whose texts have one token each, and the indices
    of these tokens in it. Raises ValueError unless each text is there once, in order.
    """
    from tokenizers import Tokenizer, models

    probe = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    if backend.post_processor is not None:
        probe.post_processor = backend.post_processor
    encoding = probe.encode("a", "a" if is_pair else None)
    slots = [index for index, mask in enumerate(encoding.special_tokens_mask) if not mask]
    sides = [encoding.sequence_ids[slot] for slot in slots]
    if sides != [*range(1 + is_pair)]:
        raise ValueError(f"the tokenizer puts texts in the order {sides}, which is not supported")
    steps = steps_of(json.loads(backend.to_str())["post_processor"], "processors")
    has_types = any(step["type"] != "ByteLevel" for step in steps)
    return encoding.ids, encoding.type_ids if has_types else [0] * len(encoding.ids), slots


class StaticTokenizer(TextTokenizer):
    """Tokenizer of a static embedding model (a mean of token vectors), without special tokens.

    Empty texts have no tokens. If `token_chars` is set, and texts are truncated (`cuts_once`),
    calls and `encode` return only tokens of a text's first ``max_tokens * token_chars`` characters.
    """

    def __init__(
        self, tokenizer: Any, max_tokens: int, *, token_chars: int | None = None, **cut: Any
    ) -> None:
        super().__init__(tokenizer, max_tokens, **cut)
        self._chars = sys.maxsize if token_chars is None else max_tokens * token_chars
        self._filler = []

    def __call__(self, texts: Sequence[str]) -> TokenBatch:
        """Tokenize texts to a batch, truncated to the first window of each."""
        if not self.cuts_once:
            return super().__call__(texts)
        tokens = super().__call__([text[: self._chars] for text in texts])
        is_cut = np.fromiter(map(len, texts), np.int64, len(texts)) > self._chars
        assert tokens.whole_lengths is not None
        whole = tokens.whole_lengths + is_cut
        if self.counts_rest:
            whole = np.maximum(whole, self.words(texts).lengths)
        return replace(tokens, whole_lengths=whole)


# Token ids and windows.


@dataclass(frozen=True)
class TokenBatch:
    """Concatenated token ids of many texts, special tokens included."""

    ids: np.ndarray  # token ids, int32 (tokens,)
    offsets: np.ndarray  # int64 (texts + 1,); text i has `ids[offsets[i]:offsets[i + 1]]`
    # Segment ids, int32 (tokens,); None if they are always 0.
    type_ids: np.ndarray | None = None
    # Number of tokens of each text before it was cut, int64 (texts,). If a cut text's tokens were
    # not counted, any number above its length. None: nothing was cut.
    whole_lengths: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each text, int64 (texts,)."""
        return np.diff(self.offsets)

    def take(self, rows: Sequence[int] | np.ndarray) -> TokenBatch:
        """Return a batch of the texts with these indices, in the order of `rows`."""
        bounds = [slice(self.offsets[row], self.offsets[row + 1]) for row in rows]
        types = () if self.type_ids is None else [self.type_ids[part] for part in bounds]
        whole = None if self.whole_lengths is None else self.whole_lengths[list(rows)]
        ids = [self.ids[part] for part in bounds]
        return flat_batch(ids, types, whole)

    def digests(self) -> Iterator[bytes]:
        """Yield a digest of each text's token and segment ids, 16 bytes, to find equal texts."""
        ids, *others = (part.data for part in (self.ids, self.type_ids) if part is not None)
        for start, stop in itertools.pairwise(self.offsets.tolist()):
            digest = hashlib.blake2b(ids[start:stop], digest_size=16)
            for part in others:
                digest.update(part[start:stop])
            yield digest.digest()

    @property
    def seen_share(self) -> np.ndarray:
        """Share of each text's tokens that were kept when it was cut, float32 (texts,).

        It is below 1 if the text was cut, but exact only if the removed tokens were counted.
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
    """Concatenate the token ids of texts, and their segment ids if there are any, to a batch."""
    lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
    types = _flat(type_ids) if type_ids else None
    return TokenBatch(_flat(rows), offsets_of(lengths), types, whole_lengths)


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Return the offsets of concatenated texts with these lengths, int64 (texts + 1,)."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])


def _flat(rows: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(rows) if rows else np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class TextTokens:
    """Token ids of one text, cut into windows, special tokens included.

    `whole_length` is the number of tokens before the text was cut; if the rest was not tokenized,
    it is just some number above the windows' length.
    """

    windows: list[np.ndarray]
    type_ids: list[np.ndarray] | None  # segment ids of each window
    whole_length: int


@dataclass(frozen=True)
class Windows:
    """Windows (token spans as long as the model reads) of many texts, for a model to run.

    `tokens` has all windows in the texts' order; the other arrays have an element per text.
    """

    tokens: TokenBatch  # every window as a text of its own
    counts: np.ndarray  # number of the text's windows to run, int64; at least 1
    whole_counts: np.ndarray  # number of all its windows; larger if only the first one is run
    seen_share: np.ndarray  # share of the text's tokens in windows to run, float32


def all_windows(texts: Sequence[TextTokens]) -> Windows:
    """Convert tokenized texts to the windows that a model runs: all windows of each text."""
    counts = _window_counts(texts)
    types = [ids for text in texts if text.type_ids is not None for ids in text.type_ids]
    tokens = flat_batch([ids for text in texts for ids in text.windows], types)
    shares = [min(1, sum(map(len, text.windows)) / text.whole_length) for text in texts]
    return Windows(tokens, counts, counts, np.array(shares, dtype=np.float32))


def _split_batch(batch: TokenBatch) -> list[TextTokens]:
    assert batch.whole_lengths is not None
    types, whole, tokens = batch.type_ids, batch.whole_lengths.tolist(), []
    for row, (start, stop) in enumerate(itertools.pairwise(batch.offsets.tolist())):
        row_types = None if types is None else [types[start:stop]]
        tokens.append(TextTokens([batch.ids[start:stop]], row_types, whole[row]))
    return tokens


def _join_windows(parts: Sequence[TextTokens]) -> TextTokens:
    types = [row for part in parts if part.type_ids is not None for row in part.type_ids]
    windows = [window for part in parts for window in part.windows]
    return TextTokens(windows, types or None, sum(part.whole_length for part in parts))


def first_windows(texts: Sequence[TextTokens]) -> Windows:
    """Convert tokenized texts to the windows that a model runs: the first one of each text."""
    whole = np.fromiter((text.whole_length for text in texts), dtype=np.int64, count=len(texts))
    types = [text.type_ids[0] for text in texts if text.type_ids is not None]
    tokens = flat_batch([text.windows[0] for text in texts], types, whole)
    ones = np.ones(len(texts), dtype=np.int64)
    return Windows(tokens, ones, _window_counts(texts), tokens.seen_share)


def only_windows(tokens: TokenBatch) -> Windows:
    """Convert a batch of truncated texts to the windows that a model runs, one per text."""
    ones = np.ones(len(tokens), dtype=np.int64)
    return Windows(tokens, ones, ones, tokens.seen_share)


def _window_counts(texts: Sequence[TextTokens]) -> np.ndarray:
    return np.fromiter((len(text.windows) for text in texts), dtype=np.int64, count=len(texts))


def aggregate(values: np.ndarray, counts: np.ndarray, lengths: np.ndarray, how: str) -> np.ndarray:
    """Aggregate a model's outputs for windows to outputs for texts, float32 (texts, outputs).

    `values` are (windows, outputs), with windows sorted by text, and `counts` the number of windows
    of each text, at least 1. `how` is "mean" or "max" of each output, or "tokens": the mean
    weighted by `lengths`, the number of the text's tokens in each window.
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

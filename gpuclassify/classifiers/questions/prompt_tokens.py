"""Build and tokenize prompts. Long documents are cut; instructions never are."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuclassify.models.tokenizer_backend import panics_as_errors
from gpuclassify.settings.options import template_pieces
from gpuclassify.tokenizing.gaps import prefix_end, word_cache
from gpuclassify.tokenizing.text_tokenizer import (
    MOST_CHARS_PER_TOKEN,
    TokenBatch,
    flat_batch,
    frame_of,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

# Beginnings of documents, used to find the prefix that does not depend on documents.
_PROBES = ("a", "The", "7", "é", "\n", " ", "-")
# Prompts per block: encodings take over 100 bytes per token, and prompts have thousands of tokens.
_BLOCK_PROMPTS = 2_048
_SEAM_TOKENS = 4  # extra tokens that a window may need inside a prompt
CRITERION = "criterion"  # placeholder of a criterion's text
# Placeholder of a column's text while a chat template is rendered.
_MARK = re.compile("\ue000(.*?)\ue001", re.DOTALL)
_NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_SECRET = secrets.token_hex(8)  # part of token names that no text contains
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # byte tokens, which some tokenizers call special


@dataclass(frozen=True)
class Prompt:
    """Prompt template with placeholders for columns, split at them into literal texts."""

    literals: tuple[str, ...]  # texts around columns, one more than columns
    columns: tuple[str, ...]
    # JSON of messages with marks for columns, settings, opening, and dates. The chat template is
    # applied to each row, because it may strip texts, or leave out parts.
    chat: str = ""
    has_special_tokens: bool = True  # if so, the tokenizer adds none

    @property
    def digest(self) -> str:
        """SHA-256 of the texts around the columns, in 64 hex digits, used to detect changes."""
        return hashlib.sha256("".join(self.literals).encode()).hexdigest()

    def filled(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> str:
        """Return the whole prompt, with `texts` in place of the columns, in the columns' order.

        Raises ValueError if the chat template fails.
        """
        if not self.chat:
            pairs = itertools.zip_longest(self.literals, texts, fillvalue="")
            return "".join(itertools.chain.from_iterable(pairs))
        chat, named = json.loads(self.chat), dict(zip(self.columns, texts, strict=True))
        chat[0] = _changed(chat[0], lambda text: _MARK.sub(lambda mark: named[mark[1]], text))
        return _write_chat(chat, tokenizer)


def _write_chat(chat: list[Any], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of a chat: its messages in the tokenizer's chat template, and an opening.

    `chat` is a list of messages, variables of the template, the opening, and a dict of strftime
    format to date. Dates that the template asks for are added to the dict, so that later rows get
    the same ones.
    """
    messages, settings, opening, dates = chat
    settings = dict(settings)

    def date(call: re.Match[str]) -> str:
        return repr(dates.setdefault(call[2], time.strftime(call[2])))

    try:
        template = tokenizer.get_chat_template(settings.pop("chat_template", None))
        settings["chat_template"] = _NOW.sub(date, template)
        written = tokenizer.apply_chat_template(messages, tokenize=False, **settings)
    except Exception as err:  # the template's code may raise anything
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path} cannot be filled in: {err}"
        ) from err
    return str(written) + opening


def _changed(value: object, change: Callable[[str], str]) -> Any:
    if isinstance(value, list):
        return [_changed(item, change) for item in value]
    if isinstance(value, Mapping):
        return {name: _changed(item, change) for name, item in value.items()}
    return change(value) if isinstance(value, str) else value


def prompt_columns(*templates: str | None) -> tuple[str, ...]:
    """Return the distinct names in braces in these templates, in order, without ``criterion``."""
    pieces = [template_pieces(one, "prompt") for one in templates if one]
    names = [name for _, name in itertools.chain.from_iterable(pieces) if name is not None]
    return tuple(dict.fromkeys(name for name in names if name != CRITERION))


def render_prompt(
    options: Any, tokenizer: PreTrainedTokenizerBase, owner: str, criterion: str | None
) -> Prompt:
    """Build the prompt of `options`, by the tokenizer's chat template if ``options.chat`` is true.

    `criterion` is the text in place of ``{criterion}``; None is an empty text. `owner` is the
    model's name for messages.
    """

    def filled(template: str) -> str:
        return "".join(
            text
            + ("" if name is None else criterion or "" if name == CRITERION else
               f"\ue000{name}\ue001")
            for text, name in template_pieces(template, "prompt")
        )  # fmt: skip

    def with_criterion(text: str) -> str:
        return text.replace(f"{{{CRITERION}}}", criterion or "")

    def chat(is_list: bool = False) -> list[Any]:
        messages = [("system", options.system and with_criterion(options.system))]
        messages.append(("user", filled(options.prompt)))
        if options.response is not None:
            messages.append(("assistant", filled(options.response)))
        listed = [
            {"role": role, "content": [{"type": "text", "text": text}] if is_list else text}
            for role, text in messages
            if text is not None
        ]
        settings = {"add_generation_prompt": True, **json.loads(options.chat_template_kwargs)}
        return [listed, _changed(settings, with_criterion), options.opening, {}]

    if options.chat and not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"{owner} has no chat template: take a model that is tuned on instructions, or pass "
            "chat=False and the whole text that it is to go on from as prompt="
        )
    named = set(prompt_columns(options.prompt, options.response))
    if options.chat:
        written = _write_chat(used := chat(), tokenizer)
        # Some templates expect a message as a list of parts, and ignore texts.
        if named - set(_MARK.findall(written)):
            written = _write_chat(used := chat(is_list=True), tokenizer)
    else:
        written, used = filled(options.prompt) + options.opening, []
    parts = _MARK.split(written)
    literals, columns = tuple(parts[::2]), tuple(parts[1::2])
    if left_out := named - set(columns):
        raise ValueError(
            f"the chat template of {owner} leaves {{{sorted(left_out)[0]}}} out: it takes other "
            "messages; pass chat=False and the whole text as prompt="
        )
    if len(set(columns)) < len(columns):
        twice = next(name for name in columns if columns.count(name) > 1)
        raise ValueError(
            f"the prompt that {owner} is given has {{{twice}}} twice: name each column once in "
            "prompt= and response="
        )
    return Prompt(literals, columns, json.dumps(used) if used else "", options.chat)


def without_special_tokens(backend: Tokenizer) -> tuple[Any, dict[str, str]]:
    """Copy a tokenizer with its special tokens renamed, so that their names in texts are just text.

    Returns the copy, and new names by old name. Byte tokens, such as ``<0x0A>``, are not renamed.
    """
    from tokenizers import Tokenizer

    description = json.loads(backend.to_str())
    names = {
        token["content"]: f"<{_SECRET}-{token['id']}>".ljust(len(token["content"]), "-")
        for token in description["added_tokens"]
        if token["special"] and not _BYTE.fullmatch(token["content"])
    }
    for token in description["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = description["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {
            names.get(token, token): number for token, number in model["vocab"].items()
        }
    else:
        model["vocab"] = [(names.get(token, token), score) for token, score in model["vocab"]]
    if unknown := model.get("unk_token"):
        model["unk_token"] = names.get(unknown, unknown)
    if "merges" in model:
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [pair for pair in pairs if not names.keys() & {*pair, "".join(pair)}]
    return Tokenizer.from_str(json.dumps(description)), names


class PromptTokenizer:
    """Tokenizer of prompts, which cuts the document's end if a prompt exceeds `max_tokens` tokens.

    The column with the index `main` in ``prompt.columns`` is the document. A prompt is tokenized at
    once, because tokens can span columns and literals. Names of special tokens in columns are
    tokenized as text. With `counts_rest`, the number of tokens before a cut is known exactly;
    otherwise, only a beginning of a long document may be read, which provably has the same first
    tokens. `tokenizer` is configured here, and must not be shared. Raises ValueError if the prompt
    leaves no room for a document.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Prompt,
        max_tokens: int,
        main: int = 0,
        *,
        counts_rest: bool = True,
    ) -> None:
        self.prompt, self.max_tokens, self._main = prompt, max_tokens, main
        self._adds_special_tokens = not prompt.has_special_tokens
        self._tokenizer, self._backend = tokenizer, tokenizer.backend_tokenizer
        self._backend.no_padding()
        self._backend.no_truncation()
        self._words = word_cache(self._backend)
        reads_prefix = not counts_rest and self._words.ends_words
        self._first_chars = MOST_CHARS_PER_TOKEN * max_tokens if reads_prefix else sys.maxsize
        added = self._backend.get_added_tokens_decoder().items()
        special = [n for n, token in added if token.special and not _BYTE.fullmatch(token.content)]
        size = max([self._backend.get_vocab_size(), *special]) + 1
        self._is_special = np.isin(np.arange(size), special)
        self._columns = len(prompt.columns)
        short = prompt.filled(tokenizer, ["a"] * self._columns)
        if self._adds_special_tokens:
            self._leave_out(self._backend.encode(short, add_special_tokens=False).ids)
        around, _, (index,) = (
            frame_of(self._backend) if self._adds_special_tokens else ([0], 0, [0])
        )
        self._around = [np.array(ids, np.int32) for ids in (around[:index], around[index + 1 :])]
        plain = self._backend.encode(short, add_special_tokens=self._adds_special_tokens)
        self._special_ids = self._special_of(plain.ids)
        self.fixed_tokens = len(self.encode([""] * self._columns).ids)
        if self.fixed_tokens >= max_tokens:
            raise ValueError(
                f"the prompt itself has {self.fixed_tokens} tokens, so "
                f"max_seq_length={max_tokens} leaves no room for a document: pass a larger one"
            )

    def _leave_out(self, ids: list[int]) -> None:
        """Stop the tokenizer from adding special tokens that begin or end the prompt already."""
        from tokenizers.processors import TemplateProcessing

        around, _, (index,) = frame_of(self._backend)
        before, after = around[:index], around[index + 1 :]
        before = [] if ids[: len(before)] == before else before
        after = [] if ids[-len(after) :] == after else after
        if len(before) + len(after) + 1 < len(around):
            names = {token_id: self._backend.id_to_token(token_id) for token_id in before + after}
            pieces = [*map(names.get, before), "$A", *map(names.get, after)]
            special = list(zip(names.values(), names, strict=True))
            self._backend.post_processor = TemplateProcessing(pieces, special_tokens=special)

    def encode(self, texts: Sequence[str]) -> Any:
        """Encode the uncut prompt with these texts to an object with `ids` and `offsets`."""
        return self._encode(texts)[1]

    def __call__(self, rows: Sequence[Sequence[str]]) -> TokenBatch:
        """Tokenize the prompts of rows, each a sequence of column texts, and cut long documents.

        `whole_lengths` of the result are the prompts' numbers of tokens before cutting. If a
        document was not read to its end, the number is inexact: only larger than `max_tokens`.
        """
        made, lengths = [], []
        for start in range(0, len(rows), _BLOCK_PROMPTS):
            block = [list(row) for row in rows[start : start + _BLOCK_PROMPTS]]
            for row, ids in zip(block, self._read(block), strict=True):
                lengths.append(len(ids))
                made.append(ids if len(ids) <= self.max_tokens else self._cut(row))
        return flat_batch(made, whole_lengths=np.array(lengths, dtype=np.int64))

    def _read(self, rows: list[list[str]]) -> list[np.ndarray]:
        """Return the token ids of each row's prompt, which may be longer than `max_tokens`.

        Documents in `rows` are replaced by the beginnings that were read.
        """
        main, chars, pending = self._main, self._first_chars, list(range(len(rows)))
        documents, tokens = [row[main] for row in rows], [np.empty(0)] * len(rows)
        while pending:
            for index in pending:
                rows[index][main] = documents[index][: prefix_end(documents[index], chars)]
            ids = self._ids([rows[index] for index in pending])
            for index, row in zip(pending, ids, strict=True):
                tokens[index] = row
            enough, chars = self.max_tokens + _SEAM_TOKENS, 2 * chars
            pending = [
                n for n in pending if len(tokens[n]) <= enough and rows[n][main] != documents[n]
            ]
        return tokens

    def _ids(self, rows: Sequence[Sequence[str]]) -> Iterator[np.ndarray]:
        """Yield the token ids of each row's prompt; names of special tokens in columns are text."""
        words = self._words([self.prompt.filled(self._tokenizer, row) for row in rows])
        flat = words.take(np.zeros_like(words.lengths), words.lengths)
        before, after = self._around
        for row, ids in zip(rows, np.split(flat, np.cumsum(words.lengths)[:-1]), strict=True):
            ids = np.concatenate([before, ids, after])
            if self._special_of(ids) != self._special_ids:
                ids = np.asarray(self._encode_as_text(row)[1].ids, dtype=np.int32)
            yield ids

    @panics_as_errors()
    def _encode(self, row: Sequence[str]) -> tuple[str, Any]:
        prompt = self.prompt.filled(self._tokenizer, row)
        encoding = self._backend.encode(prompt, add_special_tokens=self._adds_special_tokens)
        is_text = self._special_of(encoding.ids) == self._special_ids
        return (prompt, encoding) if is_text else self._encode_as_text(row)

    def _special_of(self, ids: Any) -> list[int]:
        ids = np.asarray(ids, dtype=np.int64)
        return ids[self._is_special[np.minimum(ids, len(self._is_special) - 1)]].tolist()

    @functools.cached_property
    def _text_only(self) -> tuple[Any, dict[str, str], re.Pattern[str]]:
        """Tokenizer with renamed special tokens, new names by old name, and regex of old names."""
        backend, names = without_special_tokens(self._backend)
        longest_first = sorted(names, key=len, reverse=True)
        return backend, names, re.compile("|".join(map(re.escape, longest_first)) or "$.")

    def _encode_as_text(self, texts: Sequence[str]) -> tuple[str, Any]:
        """Return prompt and encoding, with names of special tokens in `texts` tokenized as text.

        In the returned prompt, which the offsets refer to, special tokens of the literals have
        their new names from `_text_only`.
        """
        backend, names, pattern = self._text_only
        if not pattern.search("".join(self.prompt.literals)):
            # The result is the same as with transformers' `split_special_tokens=True`.
            prompt = self.prompt.filled(self._tokenizer, texts)
            return prompt, backend.encode(prompt, add_special_tokens=self._adds_special_tokens)
        # Names in texts are hidden while the template runs, so that all special tokens are the
        # prompt's. Then each special token is encoded separately, as in transformers' chats.
        known, prompt, tokens = list(names), "", []
        hidden = [
            pattern.sub(lambda name: f"({_SECRET}-{known.index(name[0])})", text) for text in texts
        ]
        whole = self.prompt.filled(self._tokenizer, hidden)
        for number, piece in enumerate(re.split(rf"\({_SECRET}-(\d+)\)", whole)):
            is_name = number % 2
            text = (
                known[int(piece)] if is_name else pattern.sub(lambda match: names[match[0]], piece)
            )
            tokens += _tokens_after(backend, prompt, text)
            prompt += text
        if self._adds_special_tokens:
            around, _, (index,) = frame_of(backend)
            tokens[:0] = [(token_id, (0, 0)) for token_id in around[:index]]
            tokens += [(token_id, (len(prompt), len(prompt))) for token_id in around[index + 1 :]]
        ids, offsets = zip(*tokens, strict=True)
        return prompt, SimpleNamespace(ids=list(ids), offsets=offsets)

    @functools.cached_property
    def prefix(self) -> np.ndarray:
        """Token ids that most prompts begin with, found by probe documents, int32 (tokens,)."""
        others = [""] * (self._columns - 1)
        probes = [self.encode([probe, *others]).ids for probe in _PROBES]
        first, *more = [np.asarray(ids, dtype=np.int32) for ids in probes]
        return first[: min(shared_length(first, one) for one in more)]

    def seen_share(self, prompts: TokenBatch) -> np.ndarray:
        """Return the fraction of the tokens of each row's columns that were kept, float32 (rows,).

        It is exact only with `counts_rest`. `prompts` are a result of this tokenizer.
        """
        assert prompts.whole_lengths is not None
        document = np.maximum(prompts.whole_lengths - self.fixed_tokens, 1)
        lost = prompts.whole_lengths - prompts.lengths
        return np.clip(1 - lost / document, 0, 1).astype(np.float32)

    @property
    def window_tokens(self) -> int:
        """Number of a document's tokens that fit into a prompt with one column, at least 1."""
        return max(1, self.max_tokens - self.fixed_tokens - _SEAM_TOKENS)

    @panics_as_errors()
    def windows(self, document: str, overlap: int) -> list[str]:
        """Split a document into texts of at most `window_tokens` tokens, in order.

        Neighbouring texts share `overlap` tokens, which must be fewer than `window_tokens`.
        """
        encoding = self._backend.encode(document, add_special_tokens=False)
        if self._special_of(encoding.ids):
            encoding = self._text_only[0].encode(document, add_special_tokens=False)
        room = self.window_tokens
        if len(encoding.ids) <= room:
            return [document]
        starts = range(0, max(1, len(encoding.ids) - overlap), room - overlap)
        ends = [min(start + room, len(encoding.ids)) - 1 for start in starts]
        return [
            document[encoding.offsets[start][0] : encoding.offsets[end][1]]
            for start, end in zip(starts, ends, strict=True)
        ]

    def _cut(self, texts: list[str]) -> np.ndarray:
        """Cut `texts` in place, first the document, until the prompt fits; return its token ids."""
        while True:
            prompt, encoding = self._encode(texts)
            excess = len(encoding.ids) - self.max_tokens
            if excess <= 0:
                return np.asarray(encoding.ids, dtype=np.int32)
            column = self._main
            if not texts[column]:
                column = max(range(len(texts)), key=lambda number: len(texts[number]))
            text = texts[column].rstrip()
            if text == texts[column]:
                # The template may have stripped the text, and the literals around it.
                after = [*self.prompt.literals[column + 1 :], *texts[column + 1 :]]
                end = len(prompt) - sum(len(part.strip()) for part in after)
                begin = prompt.rfind(text.lstrip(), 0, end) - len(text) + len(text.lstrip())
                starts = [start - begin for start, _ in encoding.offsets if begin <= start]
                starts = [start for start in starts if start < len(text)]
                chars = starts[-excess] if excess < len(starts) else 0
                if text.lstrip() not in prompt:  # the template has changed it
                    chars = len(text) - excess
                # Tokens merge differently at the cut, so that one token may still be too much.
                text = text[: max(0, min(chars, len(text) - 1))]
            texts[column] = text


def _tokens_after(backend: Tokenizer, before: str, text: str) -> list[tuple[int, tuple[int, int]]]:
    """Encode `text` separately; return token ids with offsets in ``before + text``."""
    # Some tokenizers add a space at the beginning of texts, but not after a line break.
    line = backend.encode("\n", add_special_tokens=False).ids if before else []
    encoding, first = backend.encode("\n" * bool(line) + text, add_special_tokens=False), len(line)
    if encoding.ids[:first] != line:
        encoding, first = backend.encode(text, add_special_tokens=False), 0
    shift = len(before) - bool(first)
    pairs = zip(encoding.ids[first:], encoding.offsets[first:], strict=True)
    return [(number, (start + shift, end + shift)) for number, (start, end) in pairs]


def shared_length(first: np.ndarray, second: np.ndarray) -> int:
    """Return the number of leading token ids that two arrays have in common."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length

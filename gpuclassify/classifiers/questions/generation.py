"""Run prompts through a decoder, and read or decode its answers, in input order.

A prefix that prompts have in common is run once.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from gpuclassify.classifiers.questions.answers import Freely, Known, Reading, Tokens
from gpuclassify.classifiers.questions.decoder import Decoder
from gpuclassify.classifiers.questions.prompt_tokens import shared_length
from gpuclassify.classifiers.questions.shared_prefix import ATTENTION, Prefix, RowState
from gpuclassify.inference.batching import cut_batches, longest_first
from gpuclassify.inference.device import holding, to_device
from gpuclassify.inference.memory import (
    CPU_MAX_TOKENS,
    BatchLimits,
    RunLimits,
    find_budget,
    halve_on_oom,
)
from gpuclassify.settings.options import ModelOptions
from gpuclassify.tokenizing.text_tokenizer import TokenBatch
from gpuclassify.workers.device_report import watched
from gpuclassify.workers.run_context import RunStats, advance

# Shared prefixes are cut to a multiple of this, so that there are few different lengths.
_SHARED_STEP = 64
# Number of prompt batches to continue as one: a CPU is fastest with few rows of whole prompts, but
# with many rows of one or two tokens.
_CPU_BATCHES = 8
_LOGIT_ROWS = 1_024  # rows of logits at a time, because vocabularies are large
MOST_DRAFTED = 8  # maximum drafted tokens; longer answers are rarely repeated
_MOST_PREFIXES = 8  # cached prefixes
_MOST_SEEN = 64  # distinct answers from which each batch's drafts are made


class Reader(Protocol):
    """Protocol of objects that read an answer from a decoder's logits."""

    @property
    def columns(self) -> Tokens:
        """Token ids whose logits are needed; more may be appended while answers are read."""

    @property
    def has_free_fields(self) -> bool:
        """Whether a part of the answer is free text, decoded greedily."""

    @property
    def most_tokens(self) -> int:
        """Approximate number of tokens of the longest answer, used to size batches."""

    def read(self, known: Known) -> Reading:
        """Read an answer: yield token ids after which logits are needed, and return the answer.

        A generator. Each time, it yields the token ids of the answer so far. Before it is resumed,
        the caller stores the next token's logits of `columns` in `known`, under these ids; for a
        `Freely` object also the most likely token of the whole vocabulary and its probability. The
        returned answer is not None, and has the attribute `tokens`, its token ids, used to draft
        later answers.
        """


@dataclass(frozen=True)
class AnswerTask:
    """Arguments of the function `answer` that are equal for all prompts of a call."""

    decoder: Decoder
    adapter: str | None  # name of one of the decoder's adapters; None for no adapter
    # Common prefix of most prompts, int32 (tokens,), possibly empty. Prompts without it are slower.
    prefix: np.ndarray
    reader: Reader


@dataclass(frozen=True)
class FreeAnswer:
    """Greedily decoded answer: its text without special tokens, and all its token ids."""

    text: str
    tokens: Tokens


@dataclass
class FreeReader:
    """Reader that decodes greedily: each token is the most likely one; ties go to the lowest id.

    ``is_decided(text, is_complete)``, a pure function, returns whether the partial answer `text`,
    without special tokens, is enough. `is_complete` says whether the answer ends in any case, at an
    end token or after `max_new_tokens` tokens.
    """

    decoder: Decoder
    is_decided: Callable[[str, bool], bool]
    max_new_tokens: int  # maximum per answer, at least 1
    columns: Tokens = ()
    has_free_fields: bool = True
    # Whether decoding can end after an answer's tokens; a cache, because answers repeat.
    _endings: dict[Tokens, bool] = field(default_factory=dict)

    @property
    def most_tokens(self) -> int:
        """Number of tokens added per answer when batches are sized: `max_new_tokens`, at most 8."""
        return min(MOST_DRAFTED, self.max_new_tokens)

    def read(self, known: Known) -> Reading:
        """Decode an answer greedily, and return a `FreeAnswer`: see `Reader.read`."""
        tokens: Tokens = ()
        while not tokens or not self._is_ended(tokens):
            if tokens not in known:
                yield Freely(tokens)
            tokens = (*tokens, known[tokens][1])
        return FreeAnswer(self._text(tokens), tokens)

    def _is_ended(self, tokens: Tokens) -> bool:
        if tokens not in self._endings:
            is_complete = tokens[-1] in self.decoder.eos_ids or len(tokens) >= self.max_new_tokens
            is_decided = self.is_decided(self._text(tokens), is_complete)
            self._endings[tokens] = is_complete or is_decided
        return self._endings[tokens]

    def _text(self, tokens: Tokens) -> str:
        return self.decoder.tokenizer.decode(tokens, skip_special_tokens=True)


def answer(
    task: AnswerTask,
    key: Hashable,
    prompts: TokenBatch,
    settings: ModelOptions,
    stats: RunStats,
) -> list[Any]:
    """Run prompts through the task's decoder, and return the reader's answer to each, in order.

    An answer is None if logits were not finite. Prompts are whole, including the prefix. The
    model's batch limits are cached under `key`. Only `sort_by_length` and `batch_size` of the
    settings apply. Counts of the run are added to `stats`.
    """
    answers: list[Any] = [None] * len(prompts)
    if not answers:
        return answers
    rows = itertools.pairwise(prompts.offsets)
    # The last token of a prompt is never shared.
    shared = np.array([shared_length(prompts.ids[a : b - 1], task.prefix) for a, b in rows])
    shared = np.where(shared < len(task.prefix), shared - shared % _SHARED_STEP, shared)
    device, dtype = task.decoder.device, task.decoder.dtype
    with watched(device, stats), holding(device, dtype, stats):
        task.decoder.use(task.adapter)
        whole, seen = task.decoder.attached(("answers", task.adapter), _Memory).of(task)
        for length in np.unique(shared).tolist():
            members = np.flatnonzero(shared == length)
            prefix = whole.crop(length) if whole is not None and length else None
            group = _Group(task, prefix, seen, stats)
            bounds = [(prompts.offsets[row] + length, prompts.offsets[row + 1]) for row in members]
            rests = [prompts.ids[start:stop] for start, stop in bounds]
            for row, answered in zip(members, group.answers(rests, key, settings), strict=True):
                answers[row] = answered
    stats.tokens += int(prompts.offsets[-1])
    stats.prefix_tokens += int(shared.sum())
    return answers


class SeenAnswers:
    """Counts of earlier answers, used to draft answers for speculative decoding."""

    def __init__(self) -> None:
        self._counts: Counter[Tokens] = Counter()

    def add(self, answer: Tokens) -> None:
        """Count an answer's token ids; if there are too many answers, rare ones are forgotten."""
        self._counts[answer] += 1
        if len(self._counts) > _MOST_SEEN:
            self._counts = Counter(dict(self._counts.most_common(_MOST_SEEN // 2)))

    def continuations(self) -> dict[Tokens, Tokens]:
        """Return a draft of the next tokens for each proper beginning of a counted answer.

        A draft is from the most frequent answer with this beginning, and has at most
        `MOST_DRAFTED` tokens. An answer's last token is not drafted, because the decoder predicts
        it when it verifies the token before.
        """
        rarest_first = reversed(self._counts.most_common())
        return {
            answer[:start]: answer[start:-1][:MOST_DRAFTED]
            for answer, _ in rarest_first
            for start in range(len(answer))
        }


class _Memory:
    """Cache of key/value tensors and earlier answers by prompt prefix, for one adapter or none."""

    def __init__(self) -> None:
        self._kept: dict[bytes, tuple[Prefix | None, SeenAnswers]] = {}

    def of(self, task: AnswerTask) -> tuple[Prefix | None, SeenAnswers]:
        """Return the task's cached prefix, None if it is empty, and earlier answers after it."""
        key = task.prefix.tobytes()
        if key not in self._kept:
            while len(self._kept) >= _MOST_PREFIXES:  # frees memory that the new one may need
                del self._kept[next(iter(self._kept))]
            self._kept[key] = _run_prefix(task), SeenAnswers()
        self._kept[key] = self._kept.pop(key)
        return self._kept[key]


def _run_prefix(task: AnswerTask) -> Prefix | None:
    if not len(task.prefix):
        return None
    ids = to_device(task.prefix[None].astype(np.int64), task.decoder.device)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    state = RowState()
    task.decoder.forward(ids, position_ids=positions, attention=ATTENTION, state=state)
    return Prefix(state.layers)


class _Row:
    """Token ids of one prompt after the common prefix, and the state of reading its answer."""

    def __init__(self, prompt: np.ndarray, reader: Reader) -> None:
        self.prompt = prompt
        self.known: dict[Tokens, tuple[np.ndarray, int, float]] = {}
        self.has_run: Tokens | None = None  # answer tokens with cached keys and values
        self.wanted: Tokens = ()
        self.is_free = reader.has_free_fields  # whether the next token is needed after `wanted`
        self.draft: Tokens = ()
        self.result: Any = None
        self._reading = reader.read(self.known)

    def advance(self) -> bool:
        """Read on until logits are missing after `wanted`; return False if `result` is ready."""
        try:
            wanted = next(self._reading)
        except StopIteration as end:
            self.result = end.value
            return False
        self.wanted, self.is_free = tuple(wanted), isinstance(wanted, Freely)
        return True

    @property
    def next_column(self) -> int:
        """Index of the next forward pass's first token, counted from the prefix's end."""
        if self.has_run is None:
            return 0
        kept = 0
        for kept_token, token in zip(self.has_run, self.wanted[:-1], strict=False):
            if kept_token != token:
                break
            kept += 1
        return len(self.prompt) + (kept if self.wanted else -1)

    def next_ids(self, start: int) -> np.ndarray:
        answer = np.array((*self.wanted, *self.draft), dtype=np.int64)
        return np.concatenate((self.prompt, answer))[start:]


@dataclass(frozen=True)
class _Group:
    """Runner of prompts with the same `prefix`; the caller holds the device's lock."""

    task: AnswerTask
    prefix: Prefix | None
    seen: SeenAnswers
    stats: RunStats

    def answers(
        self, prompts: list[np.ndarray], key: Hashable, settings: ModelOptions
    ) -> list[Any]:
        """Answer prompts, given without their prefix, in order: see the function `answer`."""
        room = self.task.reader.most_tokens
        lengths = np.array([len(prompt) + room for prompt in prompts])
        device, widest = self.task.decoder.device, int(lengths.max())
        limits = RunLimits(key, lambda: find_budget(device, self.probe, widest))
        order = longest_first(lengths) if settings.sort_by_length else np.arange(len(lengths))

        def current_limits() -> BatchLimits:
            return replace(limits.current(), max_rows=settings.batch_size)

        def joined_limits() -> BatchLimits:
            current = current_limits()
            # The limit is lower only after a failure for lack of memory.
            if device.type != "cpu" or current.max_tokens < CPU_MAX_TOKENS:
                return current
            tokens = _CPU_BATCHES * current.max_tokens
            return replace(current, max_tokens=tokens, enough_tokens=tokens)

        def step(start: int, stop: int) -> list[Any]:
            return self._answer_batch([prompts[row] for row in order[start:stop]], current_limits)

        def remember(width: int, rows: int) -> None:
            self.stats.out_of_memory += 1
            limits.lower(rows, width)

        answers: list[Any] = []
        for start, stop in cut_batches(lengths[order], joined_limits):
            width = int(lengths[order[start:stop]].max())
            parts = halve_on_oom(step, start, stop, functools.partial(remember, width))
            answers.extend(itertools.chain.from_iterable(parts))
            advance(stop - start)
        return [answers[index] for index in np.argsort(order)]

    def probe(self, rows: int, width: int) -> None:
        """Run a batch of `rows` prompts of `width` arbitrary token ids after the prefix."""
        prompts = [_Row(np.zeros(width, np.int64), self.task.reader) for _ in range(rows)]
        replace(self, stats=RunStats())._forward(prompts, RowState(self.prefix))

    def _answer_batch(
        self, prompts: list[np.ndarray], current_limits: Callable[[], BatchLimits]
    ) -> list[Any]:
        """Run prompts in batches within the limits, and then decode all their answers together."""
        continuations = self.seen.continuations()
        rows = [_Row(prompt, self.task.reader) for prompt in prompts]
        new_rows = [row for row in rows if row.advance()]
        widths = np.array([len(row.next_ids(0)) + MOST_DRAFTED for row in new_rows])
        open_rows: list[_Row] = []
        states: list[RowState] = []
        for start, stop in cut_batches(widths, current_limits):
            state = RowState(self.prefix)
            if kept := self._continue(new_rows[start:stop], state, continuations):
                open_rows += kept
                states.append(state)
        if states:
            state = RowState.joined(states)
        while open_rows:
            open_rows = self._continue(open_rows, state, continuations)
        for row in rows:
            if row.result is not None:
                self.seen.add(row.result.tokens)
        return [row.result for row in rows]

    def _continue(
        self, rows: list[_Row], state: RowState, continuations: dict[Tokens, Tokens]
    ) -> list[_Row]:
        """Run the decoder once for all rows, and return the rows whose answers are not complete.

        Rows with non-finite logits are dropped. `continuations` are drafts by an answer's tokens so
        far.
        """
        for row in rows:
            row.draft = continuations.get(row.wanted, ())
        is_finite = self._forward(rows, state)
        kept = [n for n, row in enumerate(rows) if is_finite[n] and row.advance()]
        if kept:
            state.keep(to_device(np.array(kept), self.task.decoder.device))
        return [rows[number] for number in kept]

    def _forward(self, rows: list[_Row], state: RowState) -> list[bool]:
        """Run the decoder over each row's next and drafted tokens; store the logits in the rows.

        Returns for each row whether the logits before its draft are finite.
        """
        decoder, reader, is_first = self.task.decoder, self.task.reader, not state.layers
        ids, columns, is_asked = _inputs_of(rows)
        positions = columns + (len(self.prefix) if self.prefix else 0)
        asked = to_device(np.flatnonzero(is_asked), decoder.device)
        if not is_first:
            state.place(to_device(columns, decoder.device), int(columns.max()) + 1)
        hidden = decoder.forward(
            to_device(ids, decoder.device),
            position_ids=to_device(positions, decoder.device),
            attention=ATTENTION,
            state=state,
        )
        self.stats.batches += is_first
        self.stats.decode_steps += not is_first
        self.stats.padded_tokens += ids.size
        hidden = hidden.flatten(0, 1).index_select(0, asked)
        of_columns = decoder.logits(hidden, reader.columns)
        is_finite = hidden.isfinite().all(1) & of_columns.isfinite().all(1)
        likeliest = torch.full((len(hidden), 2), -1.0, dtype=torch.float64, device=hidden.device)
        # The last layer is by far the largest, so that full logits are computed for few rows.
        is_free = np.repeat([row.is_free for row in rows], [1 + len(row.draft) for row in rows])
        if is_free.any():
            free = to_device(np.flatnonzero(is_free), decoder.device)
            parts = hidden.index_select(0, free).split(_LOGIT_ROWS)
            likeliest[free] = torch.cat([_likeliest(decoder.logits(part)) for part in parts])
            is_finite[free] &= likeliest[free, 0] >= 0
        results = torch.cat([likeliest, is_finite[:, None], of_columns.double()], 1).cpu().numpy()
        values = iter(results)
        return [_learn(row, itertools.islice(values, 1 + len(row.draft))) for row in rows]


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return each row's most likely token id (-1 if a logit is not finite), and its probability."""
    best, token = logits.max(1)
    share = (best - logits.logsumexp(1)).exp()
    token = torch.where(logits.isfinite().all(1), logits.argmax(1), -1)
    return torch.stack([token.double(), share.double()], 1)


def _learn(row: _Row, results: Iterable[np.ndarray]) -> bool:
    """Store a row's new results, one per position; return False if the first one is not finite.

    A result is an array of the most likely next token id (-1 if not requested), its probability, 1
    if all logits are finite, and the logits of `Reader.columns`.
    """
    row.has_run = (*row.wanted, *row.draft)
    for number, values in enumerate(results):
        token, share, is_finite = values[:3]
        if not is_finite:
            return number > 0  # may be the result of a wrong draft
        at = row.has_run[: len(row.wanted) + number]
        row.known[at] = (values[3:].astype(np.float32), int(token), float(share))
    return True


def _inputs_of(rows: list[_Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the next forward's token ids, their indices after the prefix, and a mask.

    The mask is true for tokens after which logits are needed. All arrays are (rows, width), padded
    on the right.
    """
    starts = [row.next_column for row in rows]
    next_ids = [row.next_ids(start) for row, start in zip(rows, starts, strict=True)]
    lengths = np.array([[len(ids)] for ids in next_ids])
    drafted = np.array([[len(row.draft)] for row in rows])
    order = np.arange(lengths.max())
    is_token = order < lengths
    ids = np.zeros(is_token.shape, dtype=np.int64)
    ids[is_token] = np.concatenate(next_ids)
    columns = np.array(starts)[:, None] + order
    return ids, columns, is_token & (order >= lengths - 1 - drafted)

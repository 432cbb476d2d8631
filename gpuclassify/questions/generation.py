"""Prompts that begin alike to a decoder's greedy answers, in input order."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from gpuclassify.inference.batching import cut_batches, longest_first
from gpuclassify.inference.device import holding, to_device, watched
from gpuclassify.inference.engine import BatchSettings
from gpuclassify.inference.memory import FOUND_LIMITS, BatchLimits, find_budget, halve_on_oom
from gpuclassify.questions.decoder import Decoder
from gpuclassify.questions.prompt_tokens import shared_length
from gpuclassify.questions.shared_prefix import ATTENTION, Prefix, RowState
from gpuclassify.tokenizing.text_tokenizer import TokenBatch
from gpuclassify.workers.run_context import RunStats, advance

# Rows that leave the prefix early share a multiple of this with it, so that few lengths differ.
_SHARED_STEP = 64
_LOGIT_ROWS = 1_024  # vocabularies are wide: this bounds the memory of the last layer
MOST_DRAFTED = 8  # tokens; longer answers seldom come twice
_MOST_SEEN = 64  # answers; the table of continuations is made from them for every batch

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class AnswerTask:
    """How prompts are answered.

    Attributes
    ----------
    decoder : Decoder
    adapter : str
        The name of one of its adapters.
    prefix : ndarray of int32, shape (tokens,)
        What most prompts begin with; may be empty. A prompt that leaves it early is answered
        correctly, but more slowly.
    is_decided : callable
        ``is_decided(text, is_complete)`` says whether the answer so far is enough; asked after
        every new token. Depends on nothing but its arguments.
    max_new_tokens : int
        Most tokens of an answer, at least 1.
    """

    decoder: Decoder
    adapter: str
    prefix: np.ndarray
    is_decided: Callable[[str, bool], bool]
    max_new_tokens: int


def answer(
    task: AnswerTask,
    key: Hashable,
    prompts: TokenBatch,
    settings: BatchSettings,
    stats: RunStats,
) -> list[str | None]:
    """The answer to every prompt up to where it was decided, in input order.

    Greedy decoding: each token is the likeliest, the one with the lowest id among equals. Special
    tokens are no part of the text. None is the answer at which logits were not finite.

    Parameters
    ----------
    task : AnswerTask
    key : hashable
        Under which the batch limits that were found for the model are kept.
    prompts : TokenBatch
        Whole prompts, prefix included.
    settings : BatchSettings
        Only `sort_by_length` and `batch_size` count: there is one loader and one engine here.
    stats : RunStats
        Counts of this run are added to it.
    """
    answers: list[str | None] = [None] * len(prompts)
    if not answers:
        return answers
    rows = itertools.pairwise(prompts.offsets)
    # The last token of a prompt is its own.
    shared = np.array([shared_length(prompts.ids[a : b - 1], task.prefix) for a, b in rows])
    shared = np.where(shared < len(task.prefix), shared - shared % _SHARED_STEP, shared)
    device, dtype = task.decoder.device, task.decoder.dtype
    with watched(device, stats), holding(device, dtype, stats):
        task.decoder.use(task.adapter)
        memory = task.decoder.attached(("answers", task.adapter), _Memory)
        for length in np.unique(shared).tolist():
            chosen = np.flatnonzero(shared == length)
            prefix = memory.prefix_of(task).crop(length) if length else None
            group = _Group(task, prefix, memory.seen, stats)
            bounds = [(prompts.offsets[row] + length, prompts.offsets[row + 1]) for row in chosen]
            own = [prompts.ids[start:stop] for start, stop in bounds]
            for row, text in zip(chosen, group.answers(own, key, settings), strict=True):
                answers[row] = text
    stats.tokens += int(prompts.offsets[-1])
    stats.prefix_tokens += int(shared.sum())
    return answers


class SeenAnswers:
    """Answers that were given before, with how often: from them the next ones are drafted."""

    def __init__(self) -> None:
        self._counts: Counter[Tokens] = Counter()

    def add(self, answer: Tokens) -> None:
        """Count an answer; when too many differ, the rarer half is forgotten."""
        self._counts[answer] += 1
        if len(self._counts) > _MOST_SEEN:
            self._counts = Counter(dict(self._counts.most_common(_MOST_SEEN // 2)))

    def continuations(self) -> dict[Tokens, Tokens]:
        """By the beginning of an answer: the rest of the most common one, but its last token.

        The last token of an answer is left out because verifying those before it gives it anyway.
        """
        rarest_first = reversed(self._counts.most_common())
        return {
            answer[:start]: answer[start:-1][:MOST_DRAFTED]
            for answer, _ in rarest_first
            for start in range(len(answer))
        }


class _Memory:
    """What a decoder keeps between runs of one adapter: its answers, and the latest prefix."""

    def __init__(self) -> None:
        self.seen = SeenAnswers()
        self._ids = np.zeros(0, dtype=np.int32)
        self._prefix: Prefix | None = None

    def prefix_of(self, task: AnswerTask) -> Prefix:
        """The state of the task's prefix, run now if it is another than before."""
        if self._prefix is None or not np.array_equal(self._ids, task.prefix):
            self._prefix = None  # frees memory that the new one may need
            ids = torch.tensor(task.prefix[None], dtype=torch.int64, device=task.decoder.device)
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            state = RowState()
            task.decoder.forward(ids, position_ids=positions, attention=ATTENTION, state=state)
            self._prefix, self._ids = Prefix(state.layers), task.prefix
        return self._prefix


@dataclass
class _Row:
    """A prompt without its prefix, and what is known of its answer."""

    prompt: np.ndarray
    answer: Tokens = ()
    draft: Tokens = ()
    is_open: bool = True
    is_finite: bool = True

    @property
    def next_column(self) -> int:
        """Column of the first token that has not run yet."""
        return len(self.prompt) + len(self.answer) - 1 if self.answer else 0

    @property
    def next_ids(self) -> np.ndarray:
        """What runs next: what has not run yet, and the draft."""
        waiting = self.answer[-1:] if self.answer else self.prompt
        return np.concatenate((waiting, np.array(self.draft, dtype=np.int64)))


@dataclass(frozen=True)
class _Group:
    """Answers prompts that go on after the same prefix. The device's lock is held."""

    task: AnswerTask
    prefix: Prefix | None
    seen: SeenAnswers
    stats: RunStats
    endings: dict[Tokens, bool] = field(default_factory=dict)

    def answers(
        self, prompts: list[np.ndarray], key: Hashable, settings: BatchSettings
    ) -> list[str | None]:
        """Answers to prompts of which only what follows the prefix is given."""
        room = min(MOST_DRAFTED, self.task.max_new_tokens)
        lengths = np.array([len(prompt) + room for prompt in prompts])
        device, widest = self.task.decoder.device, int(lengths.max())
        limits = FOUND_LIMITS.for_run(key, lambda: find_budget(device, self.probe, widest))
        order = longest_first(lengths) if settings.sort_by_length else np.arange(len(lengths))

        def current_limits() -> BatchLimits:
            return replace(limits.current(), max_rows=settings.batch_size)

        def step(start: int, stop: int) -> list[str | None]:
            return self._answer_batch([prompts[row] for row in order[start:stop]])

        def remember(width: int, rows: int) -> None:
            self.stats.out_of_memory += 1
            limits.lower(rows, width)

        texts: list[str | None] = []
        for start, stop in cut_batches(lengths[order], current_limits):
            width = int(lengths[order[start:stop]].max())
            parts = halve_on_oom(step, start, stop, functools.partial(remember, width))
            texts.extend(itertools.chain.from_iterable(parts))
            advance(stop - start)
        return [texts[place] for place in np.argsort(order)]

    def probe(self, rows: int, width: int) -> None:
        """Run a batch of any content, to measure its memory."""
        prompts = [_Row(np.zeros(width, dtype=np.int64)) for _ in range(rows)]
        replace(self, stats=RunStats())._forward(prompts, RowState(self.prefix))

    def _answer_batch(self, prompts: list[np.ndarray]) -> list[str | None]:
        """Answers of one batch: forwards until every row has ended."""
        continuations = self.seen.continuations()
        rows = open_rows = [_Row(prompt) for prompt in prompts]
        state = RowState(self.prefix)
        while open_rows:
            for row in open_rows:
                row.draft = continuations.get(row.answer, ())
            for row, predicted in zip(open_rows, self._forward(open_rows, state), strict=True):
                self._accept(row, predicted)
            kept = np.flatnonzero([row.is_open for row in open_rows])
            open_rows = [open_rows[number] for number in kept]
            if open_rows:
                state.keep(to_device(kept, self.task.decoder.device))
        for row in rows:
            if row.is_finite:
                self.seen.add(row.answer)
        return [self._text(row.answer) if row.is_finite else None for row in rows]

    def _forward(self, rows: list[_Row], state: RowState) -> list[list[int]]:
        """The likeliest tokens after each row's last token and after each of its draft's tokens.

        -1 where logits are not finite.
        """
        decoder, is_first = self.task.decoder, not state.layers
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
        found = []
        for part in hidden.flatten(0, 1).index_select(0, asked).split(_LOGIT_ROWS):
            logits = decoder.logits(part)
            found.append(torch.where(logits.isfinite().all(1), logits.argmax(1), -1))
        tokens = iter(torch.cat(found).tolist())
        return [list(itertools.islice(tokens, 1 + len(row.draft))) for row in rows]

    def _accept(self, row: _Row, predicted: list[int]) -> None:
        """Take predicted tokens as long as the draft that they follow was right."""
        for token, drafted in zip(predicted, (*row.draft, None), strict=True):
            if token < 0:
                row.is_finite = row.is_open = False
                return
            row.answer = (*row.answer, token)
            row.is_open = not self._is_ended(row.answer)
            if not row.is_open or token != drafted:
                return

    def _is_ended(self, tokens: Tokens) -> bool:
        """Whether an answer is whole or decided; most answers of a partition are the same."""
        if tokens not in self.endings:
            is_complete = (
                tokens[-1] in self.task.decoder.eos_ids or len(tokens) >= self.task.max_new_tokens
            )
            is_decided = self.task.is_decided(self._text(tokens), is_complete)
            self.endings[tokens] = is_complete or is_decided
        return self.endings[tokens]

    def _text(self, tokens: Tokens) -> str:
        return self.task.decoder.tokenizer.decode(list(tokens), skip_special_tokens=True)


def _inputs_of(rows: list[_Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids of the next forward, their columns, and after which of them a prediction is needed.

    Each (rows, width), padded on the right. Predictions are needed after a row's last token and
    after each token of its draft.
    """
    next_ids = [row.next_ids for row in rows]
    lengths = np.array([[len(ids)] for ids in next_ids])
    drafted = np.array([[len(row.draft)] for row in rows])
    order = np.arange(lengths.max())
    is_token = order < lengths
    ids = np.zeros(is_token.shape, dtype=np.int64)
    ids[is_token] = np.concatenate(next_ids)
    columns = np.array([[row.next_column] for row in rows]) + order
    return ids, columns, is_token & (order >= lengths - 1 - drafted)

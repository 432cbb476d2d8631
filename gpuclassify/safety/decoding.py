"""One batch of prompts to their greedy answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from gpuclassify.safety.decoder import Decoder
from gpuclassify.safety.shared_prefix import ATTENTION, Prefix, RowState
from gpuclassify.safety.speculation import SeenAnswers, Tokens
from gpuclassify.workers.run_stats import RunStats

_LOGIT_ROWS = 1_024  # vocabularies are wide: this bounds the memory of the last layer


@dataclass(frozen=True)
class AnswerTask:
    """How prompts are answered.

    Attributes
    ----------
    decoder : Decoder
    adapter : str
        The name of one of its adapters.
    prefix : ndarray of int32, shape (tokens,)
        With what most prompts begin; may be empty. A prompt that leaves it early is answered
        right, and more slowly.
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
        """Where the first token belongs that has not run yet."""
        return len(self.prompt) + len(self.answer) - 1 if self.answer else 0

    @property
    def next_ids(self) -> np.ndarray:
        """What runs next: what has not run yet, and the draft."""
        waiting = self.answer[-1:] if self.answer else self.prompt
        return np.concatenate((waiting, np.array(self.draft, dtype=np.int64)))


@dataclass(frozen=True)
class BatchDecoding:
    """Answers batches of prompts that go on after the same prefix.

    The caller holds the device's lock.

    Attributes
    ----------
    task : AnswerTask
    prefix : Prefix, optional
    seen : SeenAnswers
        Source of drafts; answers are added to it.
    stats : RunStats
        Counts are added to it.
    """

    task: AnswerTask
    prefix: Prefix | None
    seen: SeenAnswers
    stats: RunStats
    _endings: dict[Tokens, bool] = field(default_factory=dict)

    def probe(self, rows: int, width: int) -> None:
        """Run a batch of any content, to measure its memory."""
        prompts = [_Row(np.zeros(width, dtype=np.int64)) for _ in range(rows)]
        replace(self, stats=RunStats())._forward(prompts, RowState(self.prefix))

    def answer_batch(self, prompts: list[np.ndarray]) -> list[str | None]:
        """Answers of one batch: forwards until every row has ended."""
        continuations = self.seen.continuations()
        rows = open_rows = [_Row(prompt) for prompt in prompts]
        state = RowState(self.prefix)
        while open_rows:
            for row in open_rows:
                row.draft = continuations.get(row.answer, ())
            for row, predicted in zip(open_rows, self._forward(open_rows, state), strict=True):
                self._accept(row, predicted)
            kept = [number for number, row in enumerate(open_rows) if row.is_open]
            open_rows = [open_rows[number] for number in kept]
            if kept:
                state.keep(self._on_device(kept))
        for row in rows:
            if row.is_finite:
                self.seen.add(row.answer)
        return [self._text(row.answer) if row.is_finite else None for row in rows]

    def _forward(self, rows: list[_Row], state: RowState) -> list[list[int]]:
        """The likeliest tokens after each row's last token and after each of its draft's tokens.

        -1 where logits are not finite.
        """
        is_first = not state.layers
        ids, columns, is_asked = _inputs_of(rows)
        positions = columns + (len(self.prefix) if self.prefix else 0)
        asked = self._on_device(np.flatnonzero(is_asked))
        if not is_first:
            state.place(self._on_device(columns), int(columns.max()) + 1)
        hidden = self.task.decoder.forward(
            self._on_device(ids),
            position_ids=self._on_device(positions),
            attention=ATTENTION,
            state=state,
        )
        self.stats.batches += is_first
        self.stats.decode_steps += not is_first
        self.stats.padded_tokens += ids.size
        tokens = iter(self._likeliest(hidden.flatten(0, 1).index_select(0, asked)))
        return [list(itertools.islice(tokens, 1 + len(row.draft))) for row in rows]

    def _likeliest(self, hidden: torch.Tensor) -> list[int]:
        found = []
        for part in hidden.split(_LOGIT_ROWS):
            logits = self.task.decoder.logits(part)
            found.append(torch.where(logits.isfinite().all(1), logits.argmax(1), -1))
        return torch.cat(found).tolist()

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
        if tokens not in self._endings:
            is_complete = (
                tokens[-1] in self.task.decoder.eos_ids or len(tokens) >= self.task.max_new_tokens
            )
            is_decided = self.task.is_decided(self._text(tokens), is_complete)
            self._endings[tokens] = is_complete or is_decided
        return self._endings[tokens]

    def _text(self, tokens: Tokens) -> str:
        return self.task.decoder.tokenizer.decode(list(tokens), skip_special_tokens=True)

    def _on_device(self, values: np.ndarray | list[int]) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int64).to(
            self.task.decoder.device, non_blocking=True
        )


def _inputs_of(rows: list[_Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids of the next forward, their columns, and after which the next token is asked for.

    Each (rows, width), padded on the right; a row is asked after its last token and its draft's.
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

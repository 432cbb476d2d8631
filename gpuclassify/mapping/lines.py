"""Classify the lines of texts: run each distinct line once, and aggregate results by text."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import chain, compress, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from gpuclassify.frames import Texts
from gpuclassify.mapping.heads import FLOAT32, SCORES, Columns, Head, labelling_head, named_fields
from gpuclassify.mapping.runners import EncoderRunner, Outputs, Runner
from gpuclassify.mapping.token_lengths import TokenLengths
from gpuclassify.settings.options import TextOptions
from gpuclassify.tokenizing.text_tokenizer import aggregate
from gpuclassify.workers.run_context import RunStats

if TYPE_CHECKING:
    import torch


class TextLines:
    """Lines of texts, split by ``str.splitlines``, and the distinct lines that a model runs on.

    Blank lines are not run. An empty text, or one of only blank lines, is run as one line.
    """

    def __init__(self, texts: list[str]) -> None:
        self.lines = [text.splitlines(keepends=True) if text.strip() else [text] for text in texts]
        bare = [text.splitlines() if text.strip() else [text] for text in texts]
        # Offsets of each text's lines, int32 (texts + 1,), and the mask of lines to run, (lines,).
        self.offsets = np.cumsum([0, *map(len, bare)], dtype=np.int32)
        runs = (len(lines) == 1 or line.strip() for lines in bare for line in lines)
        self.is_run = np.fromiter(map(bool, runs), bool, self.offsets[-1])
        # Each text's number of lines to run, and index of its first line to run, int64 (texts,).
        self.counts = np.add.reduceat(self.is_run, self.offsets[:-1], dtype=np.int64)
        self.starts = np.cumsum(self.counts) - self.counts
        # Distinct lines to run, and the index in them of each line to run, int64 (lines run,).
        self.distinct, self.positions = Texts(compress(chain(*bare), self.is_run)).fold(None)

    def name(self, name_text: Callable[[int], str], position: int) -> str:
        """Describe a distinct line for messages, with the name of the first text that has it."""
        text = np.searchsorted(self.starts, (self.positions == position).argmax(), side="right") - 1
        return f"the line {self.distinct[position][:60]!r} of {name_text(int(text))}"


@dataclass(frozen=True)
class LineOutputs(Outputs):
    """Model outputs for the distinct lines of texts, and the order of the lines in the texts.

    `values` and `lengths` have one element per distinct line; the other arrays have one per text.
    `text_windows` is its number of lines that were run, repeats included.
    """

    lines: TextLines = field(kw_only=True)

    def by_line(self, head: Head) -> np.ndarray:
        """Return outputs, activated by `head`, for all texts' lines, float32 (lines, outputs).

        Rows are in the order of the lines in the texts, with repeats and without blank lines; a
        text of only blank lines has one row.
        """
        return super().by_text(head.activate, head.outputs)[self.lines.positions]

    def by_text(
        self, activate: Callable[[np.ndarray], np.ndarray], outputs: slice = slice(None)
    ) -> np.ndarray:
        """Return one row of activated outputs per text, float32 (texts, outputs), over its lines.

        The setting `window_aggregation` selects the aggregation; "first" takes the first line that
        is not blank.
        """
        lines, values = self.lines, super().by_text(activate, outputs)[self.lines.positions]
        if self.aggregation == "first":
            return values[lines.starts]
        lengths = np.zeros(len(values), dtype=np.int64)  # only "tokens" reads lengths
        if self.lengths is not None:
            lengths = self.lengths[lines.positions]
        return aggregate(values, lines.counts, lengths, self.aggregation)


class LinesRunner(Runner):
    """Runner that splits texts into lines, and passes the distinct lines to another runner."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner.options, runner.model, runner.own_module)
        self.runner = runner

    @property
    def libraries(self) -> tuple[str, ...]:
        """Names of the packages that compute outputs, from the wrapped runner."""
        return self.runner.libraries

    def run(self, texts: Texts, stats: RunStats, name_text: Callable[[int], str]) -> LineOutputs:
        """Compute outputs for the lines of distinct texts, with each distinct line run once.

        `stats.rescued` are texts, not lines. The share of a text that was read is measured in
        characters.
        """
        lines = TextLines(texts)
        outputs = self.runner.run(
            lines.distinct, stats, lambda position: lines.name(name_text, position)
        )
        text_of = np.repeat(np.arange(len(texts)), lines.counts)
        stats.rescued = {*text_of[np.isin(lines.positions, [*stats.rescued])].tolist()}
        chars = np.maximum(lines.distinct.char_counts, 1)[lines.positions]
        seen_chars = chars * outputs.seen_share[lines.positions].astype(float)
        shares = np.add.reduceat(seen_chars, lines.starts) / np.add.reduceat(chars, lines.starts)
        return LineOutputs(
            outputs.values,
            lines.counts,
            shares.astype(np.float32),
            lengths=outputs.lengths,
            aggregation=self.options.window_aggregation,
            lines=lines,
        )

    def token_lengths(self, texts: list[str]) -> TokenLengths:
        """Count tokens of texts as sums over their lines; each line is one window of the model."""
        if not texts:
            return self.runner.token_lengths(texts)
        lines = TextLines(texts)
        lengths = self.runner.token_lengths(lines.distinct)
        whole = np.add.reduceat(lengths.whole[lines.positions], lines.starts)
        return TokenLengths(whole, lengths.windows[lines.positions], lines.counts, lengths.limit)

    def lease(
        self, device: torch.device, dtype: torch.dtype
    ) -> contextlib.AbstractContextManager[Any]:
        """Return the wrapped runner's context manager, which yields the model."""
        return self.runner.lease(device, dtype)

    def device_and_dtype(self) -> tuple[Any, Any]:
        """Return the torch device and dtype of the model in this process."""
        return self.runner.device_and_dtype()

    def batch_bytes(self) -> int | None:
        """Estimate the memory of the model's largest batch in bytes; None if it is unknown."""
        return self.runner.batch_bytes()

    def check_weights(self) -> None:
        """Raise CheckpointError if tensors in the weight files do not fit the model."""
        self.runner.check_weights()

    def check_tokenizer(self) -> None:
        """Raise CheckpointError if the tokenizer's files do not match the model."""
        self.runner.check_tokenizer()

    @property
    def is_slow(self) -> bool:
        """Whether the wrapped runner may take minutes per megabyte of text."""
        return self.runner.is_slow

    @property
    def takes_gpu(self) -> bool:
        """Whether the model runs on a GPU if there is one."""
        return self.runner.takes_gpu

    @property
    def encoder(self) -> EncoderRunner | None:
        """Wrapped runner if its network can run together with other mappers' networks, or None."""
        return self.runner.encoder

    @property
    def resident_key(self) -> Hashable:
        """Identity of the model: the first element of its keys in the cache of loaded models."""
        return self.runner.resident_key


@dataclass(frozen=True)
class LineScores:
    """Score of each line that was run, in the order of the texts, and whether the line is kept.

    The length of the object is the number of texts.
    """

    lines: TextLines
    scores: np.ndarray | None  # float32 (lines run,); None without a column for them
    are_kept: np.ndarray  # bool (lines run,)

    def __len__(self) -> int:
        return len(self.lines.counts)

    @property
    def kept_share(self) -> np.ndarray:
        """Fraction of kept lines among each text's lines that were run, float32 (texts,)."""
        kept = np.add.reduceat(self.are_kept, self.lines.starts, dtype=np.int64)
        return (kept / self.lines.counts).astype(np.float32)

    def score_lists(self) -> pa.Array:
        """Return each text's scores of lines, list<float32>; null for a line that was not run."""
        lines = self.lines
        numbers = np.zeros(len(lines.is_run), dtype=np.float32)
        numbers[lines.is_run] = self.scores
        return pa.ListArray.from_arrays(lines.offsets, pa.array(numbers, mask=~lines.is_run))

    def kept_texts(self) -> pa.Array:
        """Return each text without the lines that were run and not kept, as Arrow strings."""
        stays = ~self.lines.is_run
        stays[self.lines.is_run] = self.are_kept
        bounds = zip(self.lines.lines, pairwise(self.lines.offsets.tolist()), strict=True)
        texts = ["".join(compress(every, stays[start:stop])) for every, (start, stop) in bounds]
        return pa.array(texts, pa.string())


class LinesHead(Head):
    """Head that writes columns about the lines of texts, and filters by the share of kept lines.

    Another head, `head`, converts a line's outputs to its score.
    """

    def __init__(self, head: Head) -> None:
        super().__init__(head.owner, head.options, head.model)
        self.head = head

    @property
    def list_size(self) -> int:
        """Length of lists in the columns: 0 (unknown), as texts have any number of lines."""
        return 0

    def fields(self) -> list[pa.Field]:
        """Return the fields of line scores, kept share and kept text, without unnamed columns."""
        return named_fields(
            (self.options.line_scores_field, SCORES),
            (self.options.kept_share_field, FLOAT32),
            (self.options.kept_text_field, pa.string()),
        )

    def values(self, outputs: Any) -> Any:
        """Return the `LineScores` of the model's `LineOutputs`.

        Without `line_min_score`, all lines are kept. Without `line_scores_field`, there are no
        scores.
        """
        head: Any = self.head
        minimum, values = self.options.line_min_score, outputs.by_line(head)
        are_kept, scores = np.ones(len(values), dtype=bool), None
        if minimum is not None:
            are_kept = head.reaches(head.scores(values), minimum)
        if self.options.line_scores_field is not None:
            scores = head.scores(values)
            if scores.ndim == 2:  # all labels; select the named one
                scores = scores[:, head.labels.index(minimum[0][0])]
        return LineScores(outputs.lines, scores, are_kept)

    def columns(self, values: Any) -> Columns:
        """Return the columns in `fields` by name, with one value per text."""
        options = self.options
        makers: dict[str | None, Callable[[], Any]] = {
            options.line_scores_field: values.score_lists,
            options.kept_share_field: lambda: values.kept_share,
            options.kept_text_field: values.kept_texts,
        }
        return {name: make() for name, make in makers.items() if name is not None}

    def passes(self, values: Any) -> dict[str, np.ndarray]:
        """Return ``{"score": mask}`` of texts that reach `min_kept_share`; {} if not set."""
        least = self.options.min_kept_share
        return {} if least is None else {"score": values.kept_share >= np.float32(least)}


def with_lines(heads: tuple[Head, ...], options: TextOptions) -> tuple[Head, ...]:
    """Return the heads, and a `LinesHead` after them if any setting about lines is set."""
    if all(getattr(options, name) is None for name in options.line_names):
        return heads
    return (*heads, LinesHead(labelling_head(heads)))

"""Plan a data mixture: how often to repeat each cell of a corpus for a budget of tokens."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import dask
import numpy as np

from gpuclassify.corpus.scores.saved import Saved
from gpuclassify.corpus.statistics.quantiles import (
    MOST_WEIGHT,
    Compute,
    ScoreColumns,
    cells_of,
    compute_here,
    group_key,
    group_value,
    refuse_many,
    require_columns,
)
from gpuclassify.frames import Frame, LazyFrame
from gpuclassify.frames.lazy import as_dask, reduce_tree
from gpuclassify.jobs.input.left_out import left_out_logged
from gpuclassify.jobs.input.readers import FileReader, read_columns
from gpuclassify.jobs.ledger.quarantine import OnError
from gpuclassify.pages import short_number, text_columns
from gpuclassify.settings.checks import check_number, label_tuple, with_plain_values
from gpuclassify.settings.declared import Declared, declared, setting

logger = logging.getLogger(__name__)

WEIGHT = "weight"  # key of the weight in an entry of ``weights=``
MOST_EPOCHS = 1_000
_COLUMNS = ("cell", "rows", "tokens", "asked", "epochs", "missing")
_BAR = 24  # characters of the longest bar
Counts = Mapping[str, tuple[int, int]]  # rows and tokens by cell


@dataclass(frozen=True)
class MixCell:
    """Rows and tokens of a cell (rows with equal values in some columns), and its epochs.

    Attributes
    ----------
    rows, tokens : int
        Rows and tokens in the corpus.
    asked : float
        Tokens that the mixture should have of this cell.
    epochs : float
        Mean number of copies of a row in the mixture.
    missing : float
        Tokens of `asked` that the mixture lacks, because epochs are limited.
    """

    rows: int
    tokens: int
    asked: float
    epochs: float
    missing: float


@dataclass(frozen=True)
class Mix(Saved):
    """Data mixture: for each cell of a corpus, such as a topic, the number of epochs (repeats).

    Attributes
    ----------
    by : list of str
        Columns whose combined values define a cell.
    tokens : float
        Total tokens of the mixture.
    cells : dict of tuple to MixCell
        Rows, tokens and epochs by cell: a tuple of the values of `by`, such as ``("News", 3)``,
        with None for null.
    max_epochs : float
        Maximum number of epochs of a cell.
    """

    what: ClassVar[str] = "mix"

    by: list[str]
    tokens: float
    cells: Mapping[Any, MixCell]
    max_epochs: float

    @classmethod
    @with_plain_values
    def plan(
        cls,
        dataset: Frame | LazyFrame | FileReader,
        *,
        by: str | Sequence[str],
        tokens: float,
        weights: Sequence[Mapping[str, Any]] | None = None,
        max_epochs: float = 4,
        token_field: str = "tokens",
        on_error: OnError = "raise",
    ) -> Mix:
        """Count the tokens of each cell in one pass, and compute its epochs (copies of a row).

        If the mixture lacks tokens because epochs are limited, a warning is logged.

        Parameters
        ----------
        dataset : dask.dataframe.DataFrame, pandas.DataFrame, cudf.DataFrame or FileReader
            From a reader, only the columns `by` and `token_field` are read. If these are
            annotations, the text of the input is not read.
        by : str or sequence of str
            Columns, such as topic and bucket, whose combined values define a cell.
        tokens : float
            Total tokens of the mixture.
        weights : list of dict, optional
            Entries such as ``{"topic": "News", "weight": 0.2}``. The cells with these values get
            ``weight`` divided by the sum of all weights as their share of the mixture, split in
            proportion to their tokens. At most one entry may match a cell; cells without an entry
            get 0 epochs. Default: all cells in proportion to their tokens.
        max_epochs : float
            Maximum number of epochs of a cell, at most 1,000.
        token_field : str
            Column of whole numbers, such as `TokenCounter` writes; null is 0.
        on_error : {"raise", "quarantine"}
            Raise for the first file, line or row of a reader that cannot be read, or leave it out
            and count it in Python's log. Rows that annotations list as left out never raise.

        Returns
        -------
        Mix

        Raises
        ------
        TypeError, ValueError
            An argument is invalid, a column is missing or of another type, there are no tokens or
            more than 1,000 cells, or an entry of `weights` matches no cell, or a cell that another
            entry matches.

        Examples
        --------
        >>> mix = Mix.plan(
        ...     ddf,
        ...     by="topic",
        ...     tokens=6e9,
        ...     weights=[{"topic": "News", "weight": 1}, {"topic": "Health", "weight": 3}],
        ... )  # doctest: +SKIP
        """
        settings = MixSettings(
            by=by,
            tokens=tokens,
            weights=weights,
            max_epochs=max_epochs,
            token_field=token_field,
        )
        with left_out_logged():
            mix = settings.find(read_columns(dataset, settings.read_fields, on_error))
        if mix.missing:
            logger.warning("%s", mix.notes()[-1])
        return mix

    def check_saved(self) -> None:
        """Raise ValueError if a cell lacks a value for a column of `by`, or a number is invalid."""
        MixSettings(by=self.by, tokens=self.tokens, max_epochs=self.max_epochs)
        for name, cell in self.cells.items():
            if not isinstance(name, tuple) or len(name) != len(self.by):
                raise ValueError(f"the cell {name!r} has no value for each of {self.by}")
            numbers = (cell.rows, cell.tokens, cell.asked, cell.missing)
            if not all(0 <= number < np.inf for number in numbers):
                raise ValueError(f"the cell {name!r} has {numbers}: they are 0 or more, and finite")
            if not 0 <= cell.epochs <= self.max_epochs:
                raise ValueError(
                    f"the cell {name!r} has {cell.epochs} epochs: they are from 0 to "
                    f"max_epochs={self.max_epochs:g}"
                )
        if not any(cell.tokens for cell in self.cells.values()):
            raise ValueError("no cell has tokens")

    @with_plain_values
    def compare(
        self,
        dataset: Frame | LazyFrame | FileReader,
        *,
        token_field: str = "tokens",
        on_error: OnError = "raise",
    ) -> MixComparison:
        """Compare a selection, such as the output of `gpuclassify select`, with this mixture.

        Parameters
        ----------
        dataset : dask.dataframe.DataFrame, pandas.DataFrame, cudf.DataFrame or FileReader
            Rows that were selected for the mixture, with its columns `by`.
        token_field : str
            Column with each row's number of tokens; null is 0.
        on_error : {"raise", "quarantine"}
            Raise for the first file, line or row of a reader that cannot be read, or leave it out
            and count it in Python's log.

        Returns
        -------
        MixComparison

        Raises
        ------
        TypeError, ValueError
            An argument is invalid, or a column is missing.
        """
        with left_out_logged():
            counting = self.counting(token_field)
            return self.compared(counting, read_columns(dataset, counting.read_fields, on_error))

    def counting(self, token_field: str) -> MixSettings:
        """Return settings to count the rows and tokens of a selection by this mixture's cells."""
        return MixSettings(by=self.by, tokens=self.tokens, token_field=token_field)

    def compared(
        self, counting: MixSettings, dataset: Frame | LazyFrame, compute: Compute = compute_here
    ) -> MixComparison:
        """Count a selection's rows and tokens by cell, and compare them with this mixture.

        `dataset` is the selection, and `counting` a result of `Mix.counting`.
        """
        counts = counting.count(dataset, compute)
        found = {group_value(cell): count for cell, count in counts.items()}
        nothing = MixCell(0, 0, 0.0, 0.0, 0.0)
        cells = {}
        for name in sorted({*self.cells, *found}, key=group_key):
            cell, (rows, tokens) = self.cells.get(name, nothing), found.get(name, (0, 0))
            given, asked = tokens * cell.epochs, cell.asked
            # A difference of less than a token comes from rounded epochs.
            missing = asked - given if asked - given >= 1 else 0.0
            cells[name] = SelectedCell(cell.rows, rows, tokens, cell.epochs, given, asked, missing)
        return MixComparison(cells)

    @property
    def missing(self) -> float:
        """Number of tokens that the mixture lacks, because epochs are limited."""
        return sum(cell.missing for cell in self.cells.values())

    def table(self) -> list[tuple[str, ...]]:
        """Return the lines of a table as tuples of texts: a header, and a line for each cell."""
        return [_COLUMNS, *(_line(*pair) for pair in self.cells.items())]

    def notes(self) -> list[str]:
        """Return sentences to show below the table: tokens used, and tokens missing, if any are."""
        total = sum(cell.tokens for cell in self.cells.values())
        used = self.tokens - self.missing
        notes = [f"{short_number(used)} tokens of {short_number(total)} that there are."]
        if self.missing:
            notes.append(
                f"{short_number(self.missing)} of {short_number(self.tokens)} tokens are missing, "
                f"with at most {self.max_epochs:g} repeats: give other weights, or more repeats."
            )
        return notes

    def pictures(self) -> list[tuple[str, float, float]]:
        """Return each cell's name and two bars: its tokens in the corpus, and its tokens `asked`.

        Bars are fractions, 0 to 1, of the largest of these numbers over all cells.
        """
        cells = self.cells.items()
        most = max(number for _, cell in cells for number in (cell.tokens, cell.asked))
        return [(_name(name), cell.tokens / most, cell.asked / most) for name, cell in cells]

    def html(self) -> str:
        """Render an HTML page with the table of cells and a bar chart; it loads no other files."""
        from gpuclassify.pages.sections import Bars, Block, Section, Table, Text, sections_page

        bars = [
            (name, (there, asked), f"{asked / there if there else 0:.2f}×")
            for name, there, asked in self.pictures()
        ]
        note = (
            "Pale: the tokens that there are. Strong: those that are asked, and how many times as "
            "many they are."
        )
        header, *rows = self.table()
        cells: list[Block] = [Table(header, rows, is_cross=True), *map(Text, self.notes())]
        tokens: list[Block] = [Bars(("cell", "asked"), bars), Text(note)]
        under = [f"{short_number(self.tokens)} tokens by {', '.join(self.by)}"]
        return sections_page("Mix", under, [Section("By cell", cells), Section("Tokens", tokens)])

    def __repr__(self) -> str:
        bars = ["there ░, asked █"]
        bars += ["█" * round(_BAR * new) + "░" * max(0, round(_BAR * old) - round(_BAR * new))
                 for _, old, new in self.pictures()]  # fmt: skip
        lines = [(*line, bar) for line, bar in zip(self.table(), bars, strict=True)]
        return "\n".join([*text_columns(lines), *self.notes()])


@dataclass(frozen=True)
class SelectedCell:
    """Rows and tokens selected from one cell of a mixture, compared with the tokens planned.

    Attributes
    ----------
    planned_rows : int
        Rows of the cell in the corpus that the mixture was planned for.
    rows, tokens : int
        Rows and tokens of the cell that were selected.
    epochs : float
        Epochs in the mixture; 0 for a cell that it does not have.
    given : float
        Tokens that the selection gives: its tokens times the epochs.
    asked : float
        Tokens that the mixture should have of this cell.
    missing : float
        Tokens that the selection lacks: `asked` minus `given`, or 0 if this is less than 1.
    """

    planned_rows: int
    rows: int
    tokens: int
    epochs: float
    given: float
    asked: float
    missing: float


@dataclass(frozen=True, repr=False)
class MixComparison:
    """Comparison of selected rows with their mixture, cell by cell; ``print`` shows a table.

    Attributes
    ----------
    cells : dict of tuple to SelectedCell
        Cells of the mixture and of the selection, by the values of the columns that define a cell;
        None for null.
    """

    cells: Mapping[tuple[Any, ...], SelectedCell]

    def __repr__(self) -> str:
        header = ("cell", "rows planned", "rows", "tokens", "epochs", "given", "asked", "missing")
        lines = [header, *(_selected_line(*pair) for pair in self.cells.items())]
        cells = self.cells.values()
        given, asked = sum(cell.given for cell in cells), sum(cell.asked for cell in cells)
        missing = sum(cell.missing for cell in cells)
        return "\n".join(
            [
                *text_columns(lines),
                f"{short_number(given)} tokens are given of {short_number(asked)} asked, and "
                f"{short_number(missing)} are missing.",
            ]
        )

    def as_dict(self) -> dict[str, Any]:
        """Return ``{"cells": {cell: attributes of its SelectedCell}}`` for JSON.

        A cell is the JSON text of the list of its values, such as ``'["News", 3]'``.
        """
        return {"cells": {group_key(name): asdict(cell) for name, cell in self.cells.items()}}


@declared
class MixSettings(Declared):
    """Settings of a data mixture: columns that define cells, tokens, weights and epochs."""

    by: str | Sequence[str] = setting(convert=functools.partial(label_tuple, "by", keep_order=True))
    tokens: float
    weights: Sequence[Mapping[str, Any]] | None = None
    max_epochs: float = 4
    token_field: str = "tokens"

    def check_together(self) -> None:
        """Raise an error if a setting is invalid; `find` compares `weights` with the cells."""
        if self.by is None:
            raise ValueError("by=None: name the columns whose values are a cell")
        if WEIGHT in self.names:
            raise ValueError(
                f"by={self.by!r}: {WEIGHT!r} is the weight in entries of weights=, so rename the "
                "column of that name"
            )
        for name in ("tokens", "max_epochs"):
            if not 0 < (number := getattr(self, name)) < np.inf:
                raise ValueError(f"{name}={number!r} must be above 0, and finite")
        if self.max_epochs > MOST_EPOCHS:
            raise ValueError(f"max_epochs={self.max_epochs!r} must be at most {MOST_EPOCHS:,}")
        for entry in self._entries:
            if WEIGHT not in entry or {*entry} - {*self.by, WEIGHT}:
                raise ValueError(
                    f"weights= has {entry!r}: give a weight, and values of {self.names} alone"
                )
            check_number(WEIGHT, entry[WEIGHT])
            if not 0 <= entry[WEIGHT] < np.inf:
                raise ValueError(f"weights= has {entry!r}: a weight is 0 or more, and finite")
        if not sum(entry[WEIGHT] for entry in self._entries):
            raise ValueError("weights= are all 0, or none: give one above 0")

    @property
    def _entries(self) -> list[dict[str, Any]]:
        return [dict(entry) for entry in ([{WEIGHT: 1}] if self.weights is None else self.weights)]

    @property
    def names(self) -> list[str]:
        """Names of the columns whose combined values define a cell."""
        return [*dict.fromkeys(self.by)]

    @property
    def read_fields(self) -> list[str]:
        """Names of the columns to read in order to count tokens."""
        return [*dict.fromkeys([*self.names, self.token_field])]

    def check(self, frame: Frame) -> None:
        """Raise an error unless `frame` has the columns `by`, and integers in `token_field`."""
        require_columns(frame, self.read_fields)
        ScoreColumns((), weight=self.token_field).check(frame)
        cells_of(frame.iloc[:0], self.names)

    def count(self, dataset: Frame | LazyFrame, compute: Compute = compute_here) -> Counts:
        """Count rows and tokens by cell, the combination of values of the columns `by`.

        Returns a dict from cell to (rows, tokens). A cell is the JSON text of the list of its
        values, such as ``'["News", 3]'``.
        """
        frame = as_dask(dataset)
        self.check(frame._meta)
        count = dask.delayed(_part_counts, pure=True)
        columns = ScoreColumns((), weight=self.token_field)
        parts = frame[self.read_fields].to_delayed()
        (sums,) = compute([reduce_tree(_added, [count(p, self.names, columns) for p in parts])])
        return {cell: sums[cell] for cell in sorted(sums)}

    def find(self, dataset: Frame | LazyFrame, compute: Compute = compute_here) -> Mix:
        """Count each cell's tokens, and compute its epochs."""
        counts = self.count(dataset, compute)
        if not sum(tokens for _, tokens in counts.values()):
            rows = sum(rows for rows, _ in counts.values())
            raise ValueError(
                f"{rows:,} rows have no token in {self.token_field!r}: count them first"
            )
        matched = _matched(self._entries, self.names, counts)
        planned = _planned(counts, matched, float(self.tokens), self.max_epochs)
        cells = {group_value(cell): each for cell, each in planned.items()}
        return Mix(self.names, float(self.tokens), cells, float(self.max_epochs))


def _part_counts(frame: Frame, by: list[str], columns: ScoreColumns) -> Counts:
    """Count rows and tokens by cell, a combination of values of `by`, in one partition."""
    codes, cells = cells_of(frame, by)
    refuse_many(cells)
    weights = columns.weights(frame)
    if weights.sum(dtype=np.float64) > MOST_WEIGHT:
        raise ValueError(f"{columns.weight!r} adds up to more than 2**62 tokens: correct it")
    tokens = np.zeros(len(cells), np.int64)
    np.add.at(tokens, codes, weights)
    rows = np.bincount(codes, minlength=len(cells))
    return dict(zip(cells, zip(rows.tolist(), tokens.tolist(), strict=True), strict=True))


def _added(parts: Iterable[Counts]) -> Counts:
    sums: dict[str, tuple[int, int]] = {}
    for counts in parts:
        for cell, (rows, tokens) in counts.items():
            known = sums.get(cell, (0, 0))
            sums[cell] = (known[0] + rows, known[1] + tokens)
    refuse_many(sums)
    return sums


def _matched(
    entries: list[dict[str, Any]], by: list[str], counts: Counts
) -> list[tuple[float, list[str]]]:
    """Return the weight of each entry, and the cells (JSON texts) that have the entry's values."""
    owners: dict[str, dict[str, Any]] = {}
    matched = []
    for entry in entries:
        wanted = {by.index(name): group_key(entry[name]) for name in by if name in entry}
        cells = [
            cell
            for cell in counts
            if all(group_key(group_value(cell)[index]) == key for index, key in wanted.items())
        ]
        if not cells:
            known = ", ".join([*map(_name, map(group_value, counts))][:10])
            raise ValueError(f"weights= has {entry!r}, and no row matches; cells are {known}")
        for cell in cells:
            if cell in owners:
                raise ValueError(
                    f"weights= has {owners[cell]!r} and {entry!r}, which both match cell {cell}"
                )
            owners[cell] = entry
        matched.append((float(entry[WEIGHT]), cells))
    return matched


def _planned(
    counts: Counts,
    matched: list[tuple[float, list[str]]],
    tokens: float,
    max_epochs: float,
) -> dict[str, MixCell]:
    total = sum(weight for weight, _ in matched)
    cells = {cell: MixCell(*count, 0.0, 0.0, 0.0) for cell, count in counts.items()}
    for weight, names in matched:
        asked, known = tokens * weight / total, sum(counts[name][1] for name in names)
        epochs = min(asked / known, max_epochs) if known else 0.0
        for name in names:
            share = counts[name][1] / known if known else 1 / len(names)
            missing = max(0.0, asked - max_epochs * known) * share
            cells[name] = MixCell(*counts[name], asked * share, epochs, missing)
    return cells


def _name(cell: tuple[Any, ...]) -> str:
    return ", ".join("null" if value is None else str(value) for value in cell)


def _line(name: tuple[Any, ...], cell: MixCell) -> tuple[str, ...]:
    numbers = (cell.rows, cell.tokens, cell.asked)
    missing = short_number(cell.missing) if cell.missing else "–"
    return (_name(name), *map(short_number, numbers), f"{cell.epochs:.3g}", missing)


def _selected_line(name: tuple[Any, ...], cell: SelectedCell) -> tuple[str, ...]:
    rows, selected = (f"{number:,}" for number in (cell.planned_rows, cell.rows))
    tokens, given, asked = map(short_number, (cell.tokens, cell.given, cell.asked))
    missing = short_number(cell.missing) if cell.missing else "–"
    return (_name(name), rows, selected, tokens, f"{cell.epochs:.3g}", given, asked, missing)

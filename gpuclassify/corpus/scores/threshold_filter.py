"""ApplyThresholds: keep the rows whose score reaches the threshold of their group."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from gpuclassify.corpus.scores.calibration import calibrated
from gpuclassify.corpus.scores.thresholds import Thresholds
from gpuclassify.corpus.statistics.quantiles import ScoreColumns
from gpuclassify.frames import Frame, backend_of, to_pandas
from gpuclassify.jobs.input import schema as schemas
from gpuclassify.jobs.stores.names import redacted
from gpuclassify.mapping.columns import check_are_new
from gpuclassify.mapping.select import RowFilter
from gpuclassify.pages import visible
from gpuclassify.settings.declared import Declared, declared, setting
from gpuclassify.workers.run_context import current_run

_FIELD = 'a column name such as "is_good"'


@declared
class ApplyThresholds(Declared, RowFilter):
    """Mapper that keeps the rows whose score is at least the threshold of their group.

    Rows without a score (null or NaN), or without a threshold for their group, do not pass. If
    small groups were pooled, groups without labels get the pooled threshold. As the first stage of
    a job, as in ``gpuclassify select --thresholds``, it skips the text of row groups in which no
    row stays.

    Parameters
    ----------
    thresholds : Thresholds, str or Path
        Result of `Thresholds.fit`, or the file that it was saved to.
    keep_field : str, optional
        Column for the decision, true or false; no row is dropped.
    probability_field : str, optional
        Column for the calibrated probability of a positive label; null without a score, or without
        a calibration for the group.
    overwrite : bool
        Replace columns that the dataset already has.

    Examples
    --------
    >>> ddf = ApplyThresholds("thresholds.json", keep_field="is_good")(ddf)  # doctest: +SKIP
    """

    thresholds: Any = setting(kw_only=False, is_hashed=False)
    keep_field: str | None = setting(default=None, what=_FIELD, least=1)
    probability_field: str | None = setting(default=None, what=_FIELD, least=1)
    overwrite: bool = setting(default=False, changes_results=False)

    _file: ClassVar[str | None] = None  # file that the thresholds were loaded from

    def check_together(self) -> None:
        """Load the thresholds if they are a path, and check the names of the new columns."""
        if not isinstance(self.thresholds, Thresholds):
            self._set("_file", redacted(str(self.thresholds)))
            self._set("thresholds", Thresholds.load(self.thresholds))
        if self.keep_field is not None and self.keep_field == self.probability_field:
            raise ValueError(f"keep_field and probability_field are both {self.keep_field!r}")
        groups = self.thresholds.of_groups().values()
        if self.probability_field and not any(group.calibration for group in groups):
            raise ValueError(
                f"probability_field={self.probability_field!r}: the thresholds have no "
                'calibration; fit them with calibration="isotonic" or "sigmoid"'
            )

    def code(self, show: Callable[[Any], str] = repr) -> str:
        """Return the constructor call, with thresholds as their file's path or a placeholder."""
        known, file = self.thresholds, self._file
        name = f"<thresholds of {visible(known.score, '')}>" if file is None else repr(file)
        return super().code(lambda value: name if value is known else show(value))

    @property
    def columns(self) -> ScoreColumns:
        """Names of the score column and of the column of groups, as one object."""
        return ScoreColumns((self.thresholds.score,), by=self.thresholds.by)

    @property
    def read_fields(self) -> tuple[str, ...]:
        """Names of the columns to read: the score column, and the column of groups if set."""
        return self.columns.needed

    @property
    def drops_rows(self) -> bool:
        """Whether rows may be dropped; False if a column holds the decision instead."""
        return self.keep_field is None

    def schema(self) -> pa.Schema:
        """Return the fields of new columns, if named: decision (bool), probability (float32)."""
        fields = []
        if self.keep_field is not None:
            fields.append(pa.field(self.keep_field, pa.bool_(), nullable=False))
        if self.probability_field is not None:
            fields.append(pa.field(self.probability_field, pa.float32()))
        return pa.schema(fields)

    def identity(self) -> dict[str, Any]:
        """Return settings that change results and, for people, facts on the thresholds, by name."""
        known = self.thresholds
        about = {"score": known.score, "by": known.by, known.target: known.value}
        return {**about, **super().identity(), "thresholds": known.digest()}

    def check(self, frame: Frame) -> None:
        """Raise an error unless `frame` has the columns to read, and new ones can be added."""
        self.columns.check(frame)
        names, columns = self.schema().names, [*map(str, frame.columns)]
        check_are_new(names, columns, self.read_fields, self.overwrite)

    def meta(self, frame: Frame) -> Any:
        """Return `frame` without rows, but with the new columns, for Dask's meta."""
        return self.map_frame(frame.iloc[:0])

    def map_frame(self, frame: Frame, meta_dtypes: object = None) -> Any:
        """Return a frame with decisions and probabilities, if named, and the rows kept."""
        plain = to_pandas(frame[[*self.read_fields]])
        keep, schema = self._keep(plain), self.schema()
        if schema.names:
            arrays = {self.keep_field: keep, self.probability_field: self._probabilities(plain)}
            new = {
                name: pa.array(arrays[name], schema.field(name).type, from_pandas=True)
                for name in schema.names
            }
            frame = backend_of(frame).with_columns(frame, new, schema, None)
        return backend_of(frame).take_rows(frame, keep) if self.drops_rows else frame

    def choose(self, columns: pa.Table) -> np.ndarray:
        """Return the mask of rows whose score reaches their group's threshold, bool (rows,)."""
        return self._keep(schemas.to_pandas(columns))  # with the dtypes of a job's frames

    def _keep(self, frame: Any) -> np.ndarray:
        """Return the mask of rows whose score reaches their group's threshold, bool (rows,).

        Within a job, rows are counted for its report, unless `keep_field` keeps all of them.
        """
        started, stages = time.perf_counter(), current_run().stages
        values = self.columns.values(frame, self.thresholds.score)
        codes, groups = self.columns.groups(frame)
        by_key = self.thresholds.of_groups()
        known = [by_key.get(group, self.thresholds.pooled) for group in groups]
        numbers = [np.nan if group is None else group.threshold for group in known]
        # Compare in the column's precision, because labelled rows may have been saved in it.
        least = np.array(numbers, np.float64).astype(values.dtype)[codes]
        keep = values >= least
        if stages is not None and self.drops_rows:
            every, unknown = np.ones(len(keep), bool), np.isnan(values) | np.isnan(least)
            term = f"{self.thresholds.score} >= its threshold"
            seconds = time.perf_counter() - started
            stages.add_condition(term, every, keep, int(unknown.sum()), seconds)
        return keep

    def _probabilities(self, frame: Any) -> np.ndarray | None:
        """Return the calibrated probability of a positive label for each row, float64 (rows,).

        NaN without a score or a calibration; None if `probability_field` is not set.
        """
        if self.probability_field is None:
            return None
        values = self.columns.values(frame, self.thresholds.score)
        codes, groups = self.columns.groups(frame)
        probabilities, by_key = np.full(len(values), np.nan), self.thresholds.of_groups()
        for code, name in enumerate(groups):
            group, rows = by_key.get(name, self.thresholds.pooled), codes == code
            if group is not None and group.calibration:
                probabilities[rows] = calibrated(group.calibration, values[rows])
        return probabilities

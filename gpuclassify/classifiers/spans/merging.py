"""merge_spans: merge the spans of several mappers into one column, and redact texts once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gpuclassify.classifiers.spans.columns import check_redaction
from gpuclassify.classifiers.spans.spans import SPANS, Redact, Spans
from gpuclassify.frames import Frame, backend_of
from gpuclassify.mapping.columns import check_are_new, check_is_there
from gpuclassify.mapping.partition_map import RowWiseMap
from gpuclassify.settings.checks import label_tuple
from gpuclassify.settings.declared import Declared, declared, setting


def merge_spans(
    fields: Sequence[str],
    *,
    text_field: str = "text",
    spans_field: str = "merged_spans",
    redact: Redact | None = None,
    redacted_field: str | None = None,
    overwrite: bool = False,
) -> MergedSpans:
    """Return a mapper that merges the columns of spans of several mappers.

    Overlapping spans become one, from the first to the last character of all, with the label and
    score of the longest. So each is redacted once and completely.

    Parameters
    ----------
    fields : list of str
        Columns of spans by `SpanClassifier` or `PatternSpans`. Null is no spans; the result is null
        if all columns are null.
    text_field : str
        Column of the text, for `redact`.
    spans_field : str
        Output column of the merged spans.
    redact : str or callable, optional
        Replacement of spans: a template such as "[{label}]", or a function of text and label.
    redacted_field : str, optional
        Output column of the text with spans replaced. Default: "redacted" with `redact`.
    overwrite : bool
        Replace output columns that the dataset already has.

    Raises
    ------
    TypeError, ValueError
        A name or `redact` is invalid, or no column is named.

    Examples
    --------
    >>> rules, names = PatternSpans(), SpanClassifier(model="dslim/bert-base-NER")
    >>> merged = merge_spans(["pattern_spans", "spans"], redact="[{label}]")
    >>> ddf = classify(ddf, [rules, names, merged])  # doctest: +SKIP
    """
    return MergedSpans(
        fields,
        text_field=text_field,
        spans_field=spans_field,
        redact=redact,
        redacted_field=redacted_field,
        overwrite=overwrite,
    )


def _column_names(names: Any) -> tuple[str, ...]:
    if names is None:
        raise ValueError('fields=None names no column of spans: pass such as ["spans"]')
    return label_tuple("fields", names, keep_order=True) or ()


@declared
class MergedSpans(Declared, RowWiseMap):
    """Mapper that `merge_spans` returns, with the arguments of that function as settings."""

    fields: Sequence[str] = setting(kw_only=False, convert=_column_names)
    text_field: str = "text"
    spans_field: str = "merged_spans"
    redact: Redact | None = None
    redacted_field: str | None = None
    overwrite: bool = False

    def check_together(self) -> None:
        """Check `redact`, and set the default of `redacted_field`: "redacted", or None."""
        column = check_redaction(self.redact, self.redacted_field)
        object.__setattr__(self, "redacted_field", column)

    @property
    def text_fields(self) -> tuple[str, ...]:
        """Name of the text column if texts are redacted, else empty."""
        return () if self.redact is None else (self.text_field,)

    @property
    def read_fields(self) -> tuple[str, ...]:
        """Names of the columns of spans to merge and, if texts are redacted, of the text column."""
        return (*self.text_fields, *self.fields)

    def schema(self) -> pa.Schema:
        """Return the schema of the new columns: merged spans and, with `redact`, redacted text."""
        columns: list[tuple[str, pa.DataType]] = [(self.spans_field, SPANS)]
        if self.redacted_field is not None:
            columns.append((self.redacted_field, pa.string()))
        return pa.schema(columns)

    def check(self, frame: Frame) -> None:
        """Raise ValueError or TypeError if columns of the frame do not fit the settings."""
        columns = list(frame.columns)
        for name in self.fields:
            check_is_there(name, columns, "fields", "column of spans")
            kind = backend_of(frame).list_array(frame.iloc[:0], name).type
            if not (pa.types.is_null(kind) or kind == SPANS):
                raise TypeError(
                    f"column {name!r} holds {kind}, not spans: name a spans_field of "
                    "SpanClassifier or PatternSpans"
                )
        for name in self.text_fields:
            check_is_there(name, columns, "text_field")
            backend_of(frame).check_text_column(frame, name)
        check_are_new(self.schema().names, columns, self.read_fields, self.overwrite)

    def meta(self, frame: Frame) -> Frame:
        """Return an empty frame with all columns of `frame` and the new ones, for Dask's meta."""
        return self.map_frame(frame.iloc[:0], self.meta_dtypes(frame))

    def meta_dtypes(self, frame: Frame) -> Any:
        """Return the dtype of the column of redacted text; None if texts are not redacted."""
        if self.redact is None:
            return None
        return backend_of(frame).string_dtype(frame, self.text_field)

    def map_frame(self, frame: Frame, meta_dtypes: object = None) -> Any:
        """Return a frame with new columns of merged spans and, if `redact` is set, redacted text.

        `meta_dtypes` is the result of the method `meta_dtypes`, which is called if it is None.
        """
        backend = backend_of(frame)
        arrays = [backend.list_array(frame, name) for name in self.fields]
        columns = [array if array.type == SPANS else array.cast(SPANS) for array in arrays]
        is_null = columns[0].is_null()
        for column in columns[1:]:
            is_null = pc.and_(is_null, column.is_null())
        spans = Spans.from_arrow(columns).merged()
        new: dict[str, Any] = {self.spans_field: pc.if_else(is_null, None, spans.array())}
        if self.redacted_field is not None and self.redact is not None:
            texts = spans.redacted(backend.texts(frame, self.text_field, None), self.redact)
            new[self.redacted_field] = pa.array(texts, pa.string())
        dtypes = self.meta_dtypes(frame) if meta_dtypes is None else meta_dtypes
        return backend.with_columns(frame, new, self.schema(), dtypes)

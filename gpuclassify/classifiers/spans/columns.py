"""Settings, columns, filters and report of mappers that find spans in texts."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from gpuclassify.classifiers.spans.spans import SPANS, Redact, Spans
from gpuclassify.frames import Texts
from gpuclassify.mapping.heads import FLOAT32, Columns, Head, named_fields
from gpuclassify.mapping.runners import Outputs
from gpuclassify.mapping.stage_counts import COUNT, TextOutcomes
from gpuclassify.pages.sections import MOST_ROWS, PagePart, ReportPart, Section, Table, Text
from gpuclassify.settings.checks import label_tuple, nearest, numbers_by_label
from gpuclassify.settings.declared import declared, setting
from gpuclassify.settings.options import TextOptions, check_decision, template_pieces
from gpuclassify.workers.run_context import add_counts


@declared
class SpanOptions(TextOptions):
    """Settings of every mapper that finds spans, in addition to `TextOptions`.

    Attributes
    ----------
    spans_field : str
        Output column (list of struct): `start` and `end` (exclusive) in characters of the text,
        `label` and `score` (float32).
    labels : str or list of str
        Labels of the spans to keep. Default: all. Columns and filters ignore all other spans.
    min_score : float or dict of str to float
        Minimum score of the spans to keep, for all labels or by label.
    redact : str or callable
        Replaces each span: a template such as "[{label}]", or a function of text and label.
    redacted_field : str
        Output column of the text with spans replaced. Default: "redacted" with `redact`.
    count_field : str
        Output column (Int64) of the number of spans.
    share_field : str
        Output column (float32) of the share of characters in spans.
    min_spans : int
        Keep only rows with at least this number of spans.
    max_span_share : float
        Keep only rows with at most this share of characters in spans, 0 to 1.
    keep_field : str
        Write the filters' decision to this column, and drop nothing.
    """

    no_pairs: ClassVar[str] = "pass one column, and another mapper for the other one"
    filter_names: ClassVar[tuple[str, ...]] = ("min_spans", "max_span_share")

    spans_field: str = "spans"
    labels: str | Sequence[str] | None = setting(
        default=None, convert=functools.partial(label_tuple, "labels")
    )
    min_score: float | Mapping[str, float] | None = setting(
        default=None, convert=functools.partial(numbers_by_label, "min_score")
    )
    redact: Redact | None = None
    redacted_field: str | None = None
    count_field: str | None = None
    share_field: str | None = None
    min_spans: int | None = setting(default=None, least=0)
    max_span_share: float | None = setting(default=None, is_share=True)
    keep_field: str | None = None

    def check_together(self) -> None:
        """Raise TypeError or ValueError if settings contradict each other; set `redacted_field`."""
        super().check_together()
        check_decision(self)
        redacted = check_redaction(self.redact, self.redacted_field)
        object.__setattr__(self, "redacted_field", redacted)
        if self.text_template is not None:
            raise ValueError(
                f"text_template={self.text_template!r} makes a text that no column has, and spans "
                "are places in a column's: leave it out, and name the column by text_field="
            )
        if self.redact is not None and self.max_chars is not None:
            raise ValueError(
                f"max_chars={self.max_chars} would leave what is behind it unread and unredacted: "
                "leave it out"
            )

    @property
    def plans_without_model(self) -> bool:
        """Whether `labels` are passed, so that a run can be planned without the model's files."""
        return self.labels is not None


def check_redaction(redact: Any, redacted_field: str | None) -> str | None:
    """Check the settings of redaction, and return the name of the column for redacted texts.

    It is None if `redact` is None, and "redacted" by default.
    """
    if redact is None:
        if redacted_field is not None:
            raise ValueError(
                f"redacted_field={redacted_field!r} needs what replaces a span: pass "
                'redact="[{label}]", or a function of text and label'
            )
        return None
    if isinstance(redact, str):
        names = {name for _, name in template_pieces(redact, "redact") if name is not None}
        if unknown := names - {"label"}:
            raise ValueError(
                f"redact={redact!r} names {{{unknown.pop()}}}, and templates know {{label}} alone: "
                "pass a function of text and label for more"
            )
    elif not callable(redact):
        raise TypeError(
            f"redact={redact!r} is a {type(redact).__name__}: pass a template such as "
            '"[{label}]", or a function of text and label'
        )
    return redacted_field or "redacted"


@dataclass(frozen=True)
class SpanOutputs(Outputs):
    """Outputs of a runner that finds spans: the labelled spans, and all texts searched for them."""

    texts: Texts = field(kw_only=True)
    spans: Spans = field(kw_only=True)


class SpanReport(ReportPart):
    """Part of a job's report with the numbers of spans, and of rows with spans, by label."""

    reasons = {"spans": "with too few spans, or too much of the text in them"}

    def entries(
        self, directory: Any, job: Mapping[str, Any], stages: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return counts of spans before filters, by column, under the key "spans".

        The counts of a column are ``chars`` and ``labelled``, the numbers of characters and of rows
        that were searched; ``spans``, the number of spans by label; and ``labels``, the number of
        rows with a span of each label.
        """
        counts: dict[str, dict[str, Any]] = {}
        for stage in stages.values():
            for name, chars in stage.get("chars", {}).items():
                labels, spans = stage["labels"].get(name, {}), stage["occurrences"].get(name, {})
                known = {"chars": chars, "labelled": stage["labelled"].get(name, 0)}
                add_counts(counts, {name: {**known, "spans": spans, "labels": labels}})
        return {"spans": counts} if counts else {}

    def page(self, report: Mapping[str, Any]) -> PagePart:
        """Return sections of the HTML report: a table of labels for each column with any span."""
        found = report.get("spans", {})
        sections = [_section(name, counts) for name, counts in found.items() if counts["labels"]]
        return PagePart(sections=sections, columns=found)


def _section(name: str, found: Mapping[str, Any]) -> Section:
    searched, chars = found["labelled"], found["chars"]
    ordered = sorted(found["labels"].items(), key=lambda pair: (-found["spans"][pair[0]], pair[0]))
    rows = [
        (
            label,
            f"{(spans := found['spans'][label]):,}",
            f"{count:,}",
            f"{count / (searched or 1):.1%}",
            f"{1000 * spans / (chars or 1):.3g}",
        )
        for label, count in ordered[:MOST_ROWS]
    ]
    note = f"Before filters. Shares are of {searched:,} rows labelled."
    if len(ordered) > MOST_ROWS:
        note += f" {len(ordered) - MOST_ROWS} more labels are in report.json."
    header = ("label", "spans", "rows labelled", "share", "spans per thousand characters")
    table = Table(header, rows, numbers=range(1, len(header)))
    return Section(f"Spans: {name}", (table, Text(note)))


class SpanHead(Head):
    """Head that converts spans to columns, and filters rows by number and share of spans."""

    report_parts = (SpanReport(),)

    def __init__(self, *parts: Any, **settings: Any) -> None:
        super().__init__(*parts, **settings)
        self.keep_field = self.options.keep_field

    def fields(self) -> list[pa.Field]:
        """Return Arrow fields of the columns that the settings name."""
        options = self.options
        count = options.count_field
        return [
            *named_fields((options.spans_field, SPANS), (options.redacted_field, pa.string())),
            *([] if count is None else [pa.field(count, pa.int64(), metadata=COUNT)]),
            *named_fields((options.share_field, FLOAT32)),
        ]

    def check_settings(self) -> None:
        """Raise ValueError if settings name a label that no span can have."""
        minimum = self.options.min_score
        self.check_labels(*(self.options.labels or ()))
        self.check_labels(*dict(minimum if isinstance(minimum, tuple) else ()))

    def check_labels(self, *names: Any) -> None:
        """Raise ValueError unless each of `names` is a label that spans can have."""
        for name in names:
            if name not in self.labels:
                raise ValueError(
                    f"no label {name!r} in {self.owner}.{nearest(str(name), self.labels)} Labels "
                    f"of spans are {', '.join(self.labels)}."
                )

    def values(self, outputs: Any) -> Any:
        """Return `SpanValues` with the spans that the settings `labels` and `min_score` select."""
        kept = outputs.spans.kept(self.options.labels, self.options.min_score)
        return SpanValues(outputs.texts, kept)

    def columns(self, values: Any) -> Columns:
        """Return the columns that the settings name, by column name, from `SpanValues`."""
        options, spans = self.options, values.spans
        columns: dict[str, Any] = {options.spans_field: spans.array()}
        if options.redacted_field is not None:
            redacted = spans.redacted(values.texts, options.redact)
            columns[options.redacted_field] = pa.array(redacted, pa.string())
        if options.count_field is not None:
            columns[options.count_field] = spans.counts
        if options.share_field is not None:
            columns[options.share_field] = values.share
        return columns

    def passes(self, values: Any) -> dict[str, np.ndarray]:
        """Return ``{"spans": mask}``, bool (texts,), of texts that pass; {} without filters."""
        least, most = self.options.min_spans, self.options.max_span_share
        if least is None and most is None:
            return {}
        passed = values.spans.counts >= (least or 0)
        if most is not None:
            passed &= values.share <= np.float32(most)
        return {"spans": passed}

    def counts(self, texts: Texts) -> dict[str, Any]:
        """Return ``{"chars": {column: count}}``, the total number of characters of the texts."""
        return {"chars": {self.options.spans_field: int(texts.char_counts.sum())}}

    def outcomes(self, values: Any, *known: Any) -> TextOutcomes:
        """Collect results for a job's report; `known` are `texts`, `passed` and `labels`."""
        return SpanOutcomes(*known, spans=values.spans)


@dataclass(frozen=True)
class SpanOutcomes(TextOutcomes):
    """Results of a mapper for distinct texts, for a job's report, with spans as examples."""

    spans: Spans = field(kw_only=True)

    def labelled(self, most: int) -> dict[str, list[list[Any]]]:
        """Return example spans by label, marked in their texts: see `Spans.examples`."""
        return self.spans.examples(self.texts, most)


@dataclass(frozen=True)
class SpanValues:
    """Texts with the spans that pass the settings `labels` and `min_score`."""

    texts: Texts
    spans: Spans

    def __len__(self) -> int:
        return len(self.spans)

    @property
    def share(self) -> np.ndarray:
        """Share of each text's characters in spans, float32 (texts,); 0 for an empty text."""
        chars = np.maximum(self.texts.char_counts, 1)
        return (self.spans.covered() / chars).astype(np.float32)

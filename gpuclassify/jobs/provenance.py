"""Provenance of a job's columns and rows: models, annotation sets, and conditions.

A job writes its provenance into ``job.json``; reports, dataset cards and commands read it there.
Parquet files have a shorter form in their metadata.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

from gpuclassify.jobs.stages import Function
from gpuclassify.mapping.chain import Chain
from gpuclassify.pages import markdown
from gpuclassify.pages.sections import MOST_ROWS, Section, Table

KEY = b"gpuclassify"  # key of the key-value metadata in Parquet files
MOST_CHARS = 1_000  # limit of each text
MOST_MAKERS = 1_000
MOST_ENTRIES = 10_000  # limit of a maker's columns, of inputs, annotation sets and conditions
MOST_METADATA_BYTES = 8_000  # limit per Parquet file
MOST_BINS = 20  # limit of a card's bins of scores
HEADING = "## Columns and rows by gpuclassify"
FRONT = "---\ntags:\n- gpuclassify\n---\n\n"  # metadata of a new card
_TEXTS = ("class", "model", "commit", "licence", "citation", "annotations")
_HUB = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([\w.%-]+))?/")
_LINK = re.compile(r"https://(arxiv\.org|huggingface\.co)/[\w./-]+")
_FOLDERS = re.compile(r"(?<=['\"])/(?:[^'\"/]+/)+")  # folders of absolute paths in code
_ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")


@dataclass(frozen=True)
class Maker:
    """Classifier or function that made some columns; attributes that are unknown are ""."""

    columns: tuple[str, ...]  # names of the columns
    kind: str  # name of the class or function
    model: str = ""  # Hub name or directory
    commit: str = ""  # or "sha256:..." of a directory
    licence: str = ""
    citation: str = ""
    settings: str = "{}"  # JSON object, without secrets
    annotations: str = ""  # name of the annotation set that the columns were read from

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes as a dict of JSON values, without empty ones except ``columns``.

        Keys are the attributes' names, but `kind` has the key ``class``. ``settings`` is a dict.
        """
        texts = zip(_TEXTS, self._texts(), strict=True)
        found = {"columns": [*self.columns], **{name: text for name, text in texts if text}}
        return found if self.settings == "{}" else {**found, "settings": json.loads(self.settings)}

    def _texts(self) -> tuple[str, ...]:
        return self.kind, self.model, self.commit, self.licence, self.citation, self.annotations

    def facts(self) -> list[tuple[str, str]]:
        """Return pairs of a name and a text to show, without `columns` and empty attributes."""
        settings = "" if self.settings == "{}" else self.settings
        pairs = [*zip(_TEXTS, self._texts(), strict=True), ("settings", settings)]
        return [(name, text) for name, text in pairs if text]


@dataclass(frozen=True)
class Provenance:
    """Origin of a job's columns and rows: what made, supplied and selected them."""

    makers: tuple[Maker, ...] = ()
    inputs: tuple[tuple[str, str], ...] = ()  # names and commits of the Hub datasets read
    annotations: tuple[tuple[str, str], ...] = ()  # names and digests of the annotation sets read
    conditions: tuple[str, ...] = ()  # conditions that rows meet, and steps that change rows

    def __bool__(self) -> bool:
        return bool(self.makers or self.inputs or self.annotations or self.conditions)

    @classmethod
    def of_chain(
        cls, chain: Chain, meta: Any, earlier: Provenance, rules: Iterable[str]
    ) -> Provenance:
        """Return the provenance of the output of a job that runs the stages in `chain`.

        A stage that adds columns gives a `Maker`. A filter gives a condition, and so does a
        function that adds no column. `meta` is the input's frame without rows, and `earlier` the
        input's provenance. `rules` are sentences on how a recipe drops or changes rows; they become
        conditions.
        """
        makers, conditions = [*earlier.makers], [*earlier.conditions, *rules]
        for mapper in chain.mappers:
            if mapper.moves_frames and not mapper.schema().names:
                continue
            before, meta = {*meta.columns}, mapper.meta(meta)
            names = [n for n in meta.columns if n not in before or n in mapper.schema().names]
            columns = tuple(n for n in map(str, names) if len(n) <= MOST_CHARS)[:MOST_ENTRIES]
            for made in mapper.text_mappers() or (mapper,):
                about = made.origin()
                settings = _shortened(about.pop("settings", {}))
                known = {name: _clip(str(_public(text))) for name, text in about.items() if text}
                makers += [Maker(columns, settings=settings, **known)] * bool(columns)
            if isinstance(mapper, Function):
                conditions += [f"function {mapper.__name__}"] * (not columns)
            elif mapper.drops_rows:
                code = _FOLDERS.sub("", mapper.code())
                conditions.append(str(mapper.describe().get("where") or code))
        conditions = [_clip(" ".join(text.split())) for text in conditions]
        return replace(earlier, makers=tuple(makers[:MOST_MAKERS]), conditions=tuple(conditions))

    @classmethod
    def parse(cls, value: Any) -> Provenance:
        """Parse a result of `as_dict` in a ``job.json`` that anybody may have written.

        None is an empty provenance. Raises ValueError for types and sizes that jobs do not write.
        """
        if value is None:  # job.json has no provenance
            return cls()
        entries = _values(value, "columns", dict, MOST_MAKERS)
        makers = []
        for entry in entries:
            columns = tuple(_text(name) for name in _values(entry, "columns", str, MOST_ENTRIES))
            kind, *texts = (_text(entry.get(name, "")) for name in _TEXTS)
            settings = entry.get("settings", {})
            if not isinstance(settings, dict):
                raise ValueError(f"its provenance has {type(settings).__name__} as settings")
            names = ("model", "commit", "licence", "citation", "annotations")
            known = dict(zip(names, texts, strict=True))
            makers.append(Maker(columns, kind, settings=_shortened(settings), **known))
        inputs, sets = (
            tuple(
                (_text(entry.get("name")), _text(entry.get(pin)))
                for entry in _values(value, name, dict, MOST_ENTRIES)
            )
            for name, pin in (("inputs", "commit"), ("annotations", "digest"))
        )
        conditions = map(_text, _values(value, "conditions", str, MOST_ENTRIES))
        return cls(tuple(makers), inputs, sets, tuple(conditions))

    def read_as(self, names: Mapping[str, str], name: str) -> Provenance:
        """Return the provenance of columns that are read from the annotation set called `name`.

        This object is the set's own provenance. `names` maps column names in the set to names in
        frames. Inputs and conditions of the set are left out.
        """
        makers = [
            replace(maker, columns=columns, annotations=name)
            for maker in self.makers
            if (columns := tuple(names[n] for n in maker.columns if n in names))
        ]
        return replace(self, makers=tuple(makers), inputs=(), conditions=())

    def joined(self, other: Provenance) -> Provenance:
        """Return a provenance with the entries of this one and of `other`, without repetitions."""
        return Provenance(
            tuple(dict.fromkeys([*self.makers, *other.makers])),
            tuple(dict.fromkeys([*self.inputs, *other.inputs])),
            tuple(dict.fromkeys([*self.annotations, *other.annotations])),
            tuple(dict.fromkeys([*self.conditions, *other.conditions])),
        )

    def only(self, columns: Collection[str]) -> Provenance:
        """Return a copy with makers of these `columns` only; inputs, sets and conditions stay."""
        makers = [
            replace(maker, columns=kept)
            for maker in self.makers
            if (kept := tuple(name for name in maker.columns if name in columns))
        ]
        return replace(self, makers=tuple(makers))

    def as_dict(self) -> dict[str, Any]:
        """Return the provenance as a dict of JSON values, which `parse` reads.

        Its keys are ``columns`` (a list of `Maker.as_dict`), ``inputs`` (dicts with ``name`` and
        ``commit``), ``annotations`` (with ``name`` and ``digest``) and ``conditions`` (texts).
        """
        inputs, sets = self.inputs[:MOST_ENTRIES], self.annotations[:MOST_ENTRIES]
        return {
            "columns": [maker.as_dict() for maker in self.makers[:MOST_MAKERS]],
            "inputs": [{"name": name, "commit": commit} for name, commit in inputs],
            "annotations": [{"name": name, "digest": digest} for name, digest in sets],
            "conditions": [*self.conditions[:MOST_ENTRIES]],
        }

    def metadata(self) -> dict[bytes, bytes]:
        """Return the provenance as key-value metadata of a Parquet file, or {} if there is none.

        The value is JSON like `as_dict`, without settings and citations. If it would exceed 8,000
        bytes, ``columns`` is left out; if it still would, only ``conditions`` is kept; if that is
        still too long, the result is {}.
        """
        full = self.as_dict()
        full["columns"] = [
            {name: value for name, value in maker.items() if name not in ("settings", "citation")}
            for maker in full["columns"]
        ]
        for names in ([*full], [*full][1:], ["conditions"]):
            content = json.dumps({name: full[name] for name in names}, separators=(",", ":"))
            if len(content) <= MOST_METADATA_BYTES:
                return {KEY: content.encode()} if self else {}
        return {}

    def section(self) -> Section:
        """Return the provenance as a section of an HTML page; the page's template escapes texts."""
        rows: list[tuple[str, str, str]] = []
        for maker in self.makers:
            names = [", ".join(maker.columns)] + [""] * len(maker.facts())
            rows += [(own, *fact) for own, fact in zip(names, maker.facts(), strict=False)]
        rows += [("", f"input {name}", commit) for name, commit in self.inputs]
        rows += [("", f"annotations {name}", digest) for name, digest in self.annotations]
        rows += [("", "condition", text) for text in self.conditions]
        table = Table(("columns", "", ""), rows, is_wide=True)
        return Section("Origin of columns and rows", [table], is_wide=True)

    def lines(self) -> Iterator[str]:
        """Yield the provenance as lines of text. The caller must escape control characters."""
        for maker in self.makers:
            yield f"{', '.join(maker.columns)}"
            yield from (f"    {name:<12} {text}" for name, text in maker.facts())
        yield from (f"input {name}: {commit}" for name, commit in self.inputs)
        yield from (f"annotations {name}: {digest}" for name, digest in self.annotations)
        for text in self.conditions:
            yield f"condition: {text}"


def card(report: Mapping[str, Any]) -> str:
    """Return a dataset card in Markdown on the provenance in a job's report, or "" if it has none.

    `report` is from `gpuclassify.jobs.report.report.report_of`.
    """
    known = Provenance.parse(report.get("provenance"))
    if not known:
        return ""
    lines = [HEADING, ""]
    lines += [f"{report['rows_written']:,} of {report['rows_read']:,} rows that were read.", ""]
    shown: set[str] = set()
    for maker in known.makers:
        lines += [f"### {', '.join(map(markdown, maker.columns))}", ""]
        for name, text in maker.facts():
            lines.append(f"* {name}: {_linked(text) if name == 'citation' else markdown(text)}")
        lines.append("")
        for column in maker.columns:
            if column not in shown:
                lines += _distribution(column, report)
                shown.add(column)
    for title, columns, pairs in (
        ("Datasets that were read", "dataset | commit", known.inputs),
        ("Annotation sets that were read", "set | digest", known.annotations),
    ):
        if pairs:
            lines += [f"### {title}", "", f"| {columns} |", "|---|---|"]
            lines += [*(f"| {markdown(name)} | {markdown(pin)} |" for name, pin in pairs), ""]
    if known.conditions:
        lines += ["### Conditions that rows meet", ""]
        lines += [*(f"* {markdown(text)}" for text in known.conditions), ""]
    return FRONT + "\n".join(lines)


def with_section(text: str, section: str, key: str) -> str:
    """Return the dataset card `text` with `section`, a result of `card`, added or replaced.

    HTML comments with `key`, such as a hash of a folder on the Hub, enclose the section. A section
    in comments with the same key is replaced; otherwise, it is added at the end.
    """
    start, end = f"<!-- gpuclassify {key} -->\n", f"<!-- end of gpuclassify {key} -->\n"
    section = f"{start}{section.removeprefix(FRONT).strip()}\n{end}"
    before, found, rest = text.partition(start)
    if found and end in rest:
        return before + section + rest.partition(end)[2]
    return f"{text}\n{section}" if text.endswith("\n") else f"{text}\n\n{section}"


def hub_datasets(paths: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return the name and commit of each Hub dataset with a file in `paths`, sorted.

    The commit is the revision in the ``hf://`` URL, or "main" if the URL has none.
    """
    found = (match.groups("main") for path in paths if (match := _HUB.match(path)))
    return tuple((name, unquote(commit)) for name, commit in sorted({*found}))


def _distribution(column: str, report: Mapping[str, Any]) -> list[str]:
    """Return lines of a Markdown table of rows by a column's labels or scores, [] if unknown."""
    counts = report.get("labels", {}).get(column)
    if counts:
        rows = [(markdown(f"{label}"), count) for label, count in counts.items()]
    else:
        bins = report.get("scores", {}).get(column, ())
        step = -(-len(bins) // MOST_BINS) or 1
        groups = [bins[start : start + step] for start in range(0, len(bins), step)]
        rows = [(f"{g[0][0]:g} to {g[-1][1]:g}", sum(n for *_, n in g)) for g in groups]
    if not rows:
        return []
    total = sum(count for _, count in rows)
    total = (report["labelled"].get(column, total) if counts else total) or 1
    rest = sum(count for _, count in rows[MOST_ROWS:])
    rows = rows[:MOST_ROWS] + [(f"{len(rows) - MOST_ROWS:,} others", rest)] * bool(rest)
    lines = [f"| {markdown(column)} | rows | share |", "|---|---:|---:|"]
    lines += [f"| {text} | {count:,} | {count / total:.1%} |" for text, count in rows]
    return [*lines, ""]


def _linked(citation: str) -> str:
    if _LINK.fullmatch(citation):
        return f"<{citation}>"
    if found := _ARXIV.fullmatch(citation):
        return f"[{citation}](https://arxiv.org/abs/{found[1]})"
    return markdown(citation)


def _clip(text: str) -> str:
    return text if len(text) <= MOST_CHARS else f"{text[: MOST_CHARS - 1]}…"


def _shortened(settings: Mapping[str, Any]) -> str:
    """Return settings as a JSON object of limited size, without folders of absolute paths."""
    kept: dict[str, Any] = {}
    room = 4 * MOST_CHARS
    for name, value in settings.items():
        value = _public(value)
        content = json.dumps(value, ensure_ascii=False, default=str)
        value = value if len(content) <= MOST_CHARS else _clip(content)
        room -= len(name) + min(len(content), MOST_CHARS)
        if room < 0:
            break
        kept[str(name)] = value
    return json.dumps(kept, ensure_ascii=False, default=str)


def _public(value: Any) -> Any:
    """Return a JSON value with each absolute path replaced by the name of its file or folder."""
    if isinstance(value, str):
        return posixpath.basename(value.rstrip("/")) if value.startswith("/") else value
    if isinstance(value, Mapping):
        return {name: _public(item) for name, item in value.items()}
    return [*map(_public, value)] if isinstance(value, list | tuple) else value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"its provenance has {type(value).__name__} in place of a text")
    if len(value) > MOST_CHARS:
        raise ValueError(f"its provenance has a text of more than {MOST_CHARS:,} characters")
    return value


def _values(owner: Any, name: str, kind: type, most: int) -> Sequence[Any]:
    """Return the list ``owner[name]``, [] if missing, after checks of its length and items."""
    values = owner.get(name, []) if isinstance(owner, dict) else owner
    if not isinstance(owner, dict) or not isinstance(values, list):
        raise ValueError(f"its provenance has {type(values).__name__} as {name}")
    if len(values) > most:
        raise ValueError(f"its provenance has {len(values):,} {name}, more than {most:,}")
    if any(not isinstance(value, kind) for value in values):
        raise ValueError(f"its provenance has {name} that are no {kind.__name__}")
    return values

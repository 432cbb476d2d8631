"""JSON lines as Arrow tables: byte ranges, types from samples, and lines that cannot be read."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from gpuclassify.jobs.arrow_types import holds_no_fields
from gpuclassify.jobs.quarantine import isolate_bad_rows

logger = logging.getLogger(__name__)

# What pyarrow's reader takes at once is less than 2 GiB; less than that is faster to bisect.
MOST_BYTES_AT_ONCE = 64 << 20
# A parser without a limit of its own overflows its stack: pyarrow's between 10,000 and 100,000.
DEEPEST_NESTING = 1_000
# Levels of a column, a list two, as readers of Parquet count and bear them; pickles some 50 more.
DEEPEST_COLUMN = 99
MOST_LINES_COUNTED = 2_000  # of a sample whose lines do not fit together
ONE_A_LINE = (
    "the line is no JSON object: a file of JSON lines holds one object a line, which "
    "`jq -c '.[]' FILE` makes of an array, and `jq -c . FILE` of objects over several lines"
)
# pyarrow's words for a value of another type than the column's.
_OTHER_TYPE = ("Failed to convert JSON", ") changed from ")
MOST_NAMED = 4
_BLANKS = b" \t\r\n\f\v\xef\xbb\xbf"  # and the mark that some programs begin files with
_OPENING, _CLOSING = list(b"[{"), list(b"]}")


class BadLineError(ValueError):
    """Lines that are no rows of the columns that are wanted."""


# What broken lines raise; names of fields that are not UTF-8 raise a UnicodeDecodeError.
BROKEN_LINES = (ValueError, RecursionError, pa.ArrowException)


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be read, and where in the (decompressed) file its first byte is."""

    offset: int
    line: bytes
    reason: str


def read_range(file: Any, start: int, length: int | None) -> tuple[int, bytes]:
    """The lines that begin in ``[start, start + length)``, the last whole; and where they begin.

    Reads forwards only, which is one request where a store is read ahead. (`fsspec`'s
    ``read_block`` looks for the end first, and then goes back.) Without length, all that follows.
    """
    if start:
        file.seek(start - 1)
        file.readline()  # the rest of a line that begins before
    begin = file.tell()
    if length is None:
        return begin, file.read()
    if begin >= start + length:
        return begin, b""
    lines = file.read(start + length - begin)
    if not lines.endswith(b"\n"):
        lines += file.readline()
    return begin, lines


def parse(lines: Sequence[bytes], schema: pa.Schema | None, is_projected: bool = False) -> pa.Table:
    """A table of lines that are all good; one of `BROKEN_LINES` if some are not.

    Without a schema, its columns are those that are found. Fields that it lacks are refused, or
    left out if it is a projection.
    """
    from pyarrow import json as arrow_json

    rows = sum(map(_check_line, lines))
    if not rows:
        return (schema or pa.schema([])).empty_table()
    content = b"".join(lines)
    table = arrow_json.read_json(
        io.BytesIO(content),
        # One block holds everything: a line may not cross blocks, and it may be long.
        read_options=arrow_json.ReadOptions(block_size=len(content) + 1),
        parse_options=arrow_json.ParseOptions(
            explicit_schema=schema,
            unexpected_field_behavior="ignore" if is_projected else "infer",
        ),
    )
    if len(table) != rows:
        raise BadLineError("a line holds more than one JSON object")
    if not is_projected:
        _check_depth(table.schema)
    if schema is not None:
        if is_projected:
            _check_objects_stay_empty(lines, schema)
        else:
            _check_nothing_is_lost(table.schema, schema)
        table = table.select(schema.names)
    table.validate(full=True)  # finds text that is not UTF-8, which pyarrow's reader lets pass
    return table


def parse_good(
    content: bytes, offset: int, schema: pa.Schema, is_projected: bool
) -> tuple[pa.Table, list[BadLine]]:
    """A table of the good ones of the lines that begin at `offset` of a file, and the others."""
    tables: list[pa.Table] = [schema.empty_table()]
    bad: list[BadLine] = []
    begin = 0
    while begin < len(content):
        end = content.find(b"\n", begin + MOST_BYTES_AT_ONCE - 1) + 1 or len(content)
        lines = io.BytesIO(content[begin:end]).readlines()
        for found in _isolated(lines, offset + begin, schema, is_projected):
            (bad if isinstance(found, BadLine) else tables).append(found)
        begin = end
    return pa.concat_tables(tables), bad


def _isolated(
    lines: Sequence[bytes], offset: int, schema: pa.Schema, is_projected: bool
) -> Iterator[pa.Table | BadLine]:
    def run(start: int, stop: int) -> pa.Table:
        return parse(lines[start:stop], schema, is_projected)

    offsets = list(itertools.accumulate(map(len, lines), initial=offset))
    for row, found in isolate_bad_rows(run, 0, len(lines), BROKEN_LINES):
        if isinstance(found, Exception):
            reason = _reason(lines[row], schema, found)
            yield BadLine(offsets[row], lines[row].rstrip(b"\r\n"), reason)
        else:
            yield found


def line_schemas(content: bytes) -> Counter[pa.Schema]:
    """How many lines have which columns, counted one by one only if they do not fit together."""
    lines = io.BytesIO(content).readlines()
    counts: Counter[pa.Schema] = Counter()
    try:
        table = parse(lines, None)
        counts[table.schema] += len(table)
    except BROKEN_LINES:
        for line in lines[:MOST_LINES_COUNTED]:
            with contextlib.suppress(*BROKEN_LINES):
                counts[parse([line], None).schema] += 1
    return counts


def exact_integers(schema: pa.Schema, samples: Sequence[bytes]) -> pa.Schema:
    """The schema with integer types for columns of nothing but integers.

    pyarrow takes a column for floating point as soon as one integer exceeds int64, and then all of
    them lose digits: identifiers that are 64-bit hashes. Those that do so all the same are logged.
    """
    if "double" not in str(schema.types):
        return schema
    records = []
    for line in itertools.chain.from_iterable(content.split(b"\n") for content in samples):
        with contextlib.suppress(*BROKEN_LINES):
            records.append(json.loads(line))
    return pa.schema(list(_exact(pa.struct(schema), records, "column")))


def _exact(kind: pa.DataType, values: list[Any], name: str) -> pa.DataType:
    """The type with integers in place of floating point, where all of the values are integers."""
    if pa.types.is_list(kind):
        inner = [item for value in values if isinstance(value, list) for item in value]
        return pa.list_(_exact(kind.value_type, inner, name))
    if pa.types.is_struct(kind):
        held: dict[str, list[Any]] = {}
        for value in values:
            for key, item in value.items() if isinstance(value, dict) else ():
                held.setdefault(key, []).append(item)
        return pa.struct(
            field.with_type(_exact(field.type, held.get(field.name, []), f"{name} {field.name!r}"))
            for field in kind.fields
        )
    if not pa.types.is_floating(kind):
        return kind
    integers = [value for value in values if type(value) is int]
    small = [value for value in integers if -(2**63) <= value < 2**64]
    if small and not any(isinstance(value, float) and math.isfinite(value) for value in values):
        return pa.uint64() if min(small) >= 0 and max(small) >= 2**63 else pa.int64()
    for value in integers:
        if value.bit_length() < 1024 and int(float(value)) != value:
            logger.warning(
                "%s is read as floating point, because it holds fractions or numbers beyond "
                "64 bits: integers such as %d lose digits after the 15th. Quote them in the input "
                "to keep all digits, as text",
                name,
                value,
            )
            break
    return kind


def _reason(line: bytes, schema: pa.Schema, err: Exception) -> str:
    """Why a single line cannot be read, and the cure as far as there is one."""
    try:
        line.decode()
    except UnicodeDecodeError as wrong:
        return (
            f"byte {wrong.start} of the line is not UTF-8: convert the file from the encoding that "
            "it has, such as with `iconv -f LATIN1 -t UTF-8 FILE`"
        )
    if line.strip(_BLANKS) == b"{":
        return ONE_A_LINE
    text = str(err).removesuffix(" in row 0")
    if not schema.names or not any(words in text for words in _OTHER_TYPE):
        return text

    def read(start: int, stop: int) -> None:
        parse([line], pa.schema([schema.field(place) for place in range(start, stop)]), True)

    tried = isolate_bad_rows(read, 0, len(schema), BROKEN_LINES)
    bad = (schema.field(place) for place, err in tried if err is not None)
    columns = [f"{f.name} ({f.type} in the samples)" for f in itertools.islice(bad, MOST_NAMED)]
    return (
        f"a value does not fit its column {', '.join(columns)}: {text}; name the columns to keep "
        "(fields=) without that one, or, for numbers, give a JsonlReader its type, "
        'such as types={"price": "double"}'
    )


def _check_line(line: bytes) -> bool:
    """Whether a line holds something; raises for what would crash pyarrow's parser."""
    text = line.strip(_BLANKS)
    if text and text[:1] != b"{":
        raise BadLineError(ONE_A_LINE)
    if text.count(b"[") + text.count(b"{") > DEEPEST_NESTING:
        # Without escapes, every other piece between quotes is outside of strings.
        pieces = text.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        brackets = np.frombuffer(b"".join(pieces[::2]), dtype=np.uint8)
        steps = np.isin(brackets, _OPENING).astype(np.int64) - np.isin(brackets, _CLOSING)
        if steps.cumsum().max(initial=0) > DEEPEST_NESTING:
            raise BadLineError(f"the line is nested more than {DEEPEST_NESTING} deep")
    return bool(text)


def _check_depth(schema: pa.Schema) -> None:
    """Raise BadLineError if a column is nested deeper than what follows can hold."""
    inner = [(field.type, 1, field.name) for field in schema]
    while inner:
        kind, level, name = inner.pop()
        if level > DEEPEST_COLUMN:
            raise BadLineError(
                f"{name} is nested too deep for a column, which may be "
                f"{DEEPEST_COLUMN // 2} lists or {DEEPEST_COLUMN - 1} objects in each other: name "
                "the columns to keep (fields=) without it"
            )
        below = level + 1 + pa.types.is_list(kind)
        inner += [(kind.field(place).type, below, name) for place in range(kind.num_fields)]


def _check_objects_stay_empty(lines: Sequence[bytes], schema: pa.Schema) -> None:
    """Raise BadLineError for fields of objects that are to be read and have none in the samples."""
    names = [field.name for field in schema if holds_no_fields(field.type)]
    if names:
        records = [json.loads(text) for line in lines if (text := line.strip(_BLANKS))]
        own = [{name: record[name] for name in names if name in record} for record in records]
        parse(
            [json.dumps(record).encode() + b"\n" for record in own],
            pa.schema([schema.field(name) for name in names]),
        )


def _check_nothing_is_lost(found: pa.Schema, schema: pa.Schema) -> None:
    """Raise BadLineError if there are fields, other than nulls, that the schema lacks."""
    known = {field.name: field.type for field in schema}
    late = [
        field.name
        for field in found
        if not pa.types.is_null(field.type) and known.get(field.name) != field.type
    ]
    if late:
        raise BadLineError(
            f"{', '.join(late)} has fields that are not in the samples of the files, from which "
            "columns are read: name the columns to keep (fields=), which leaves out others"
        )

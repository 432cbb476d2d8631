"""JSON lines as Arrow tables: byte ranges, types from samples, and unreadable lines."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuclassify.frames import plain_type
from gpuclassify.jobs.ledger.arrow_types import cast, changed_schema, holds_no_fields
from gpuclassify.jobs.ledger.quarantine import isolate_bad_rows
from gpuclassify.jobs.stores.store import UnreadableInputError

Opener = Callable[[], contextlib.AbstractContextManager[BinaryIO]]
logger = logging.getLogger(__name__)

# pyarrow's reader accepts less than 2 GiB at once. Smaller blocks are faster to bisect, and need
# less memory if lines are blank or short.
MOST_BYTES_AT_ONCE = 16 << 20
# A parser without a limit overflows its stack; pyarrow's does between 10,000 and 100,000 levels.
DEEPEST_NESTING = 1_000
MOST_VALUES = 4_000_000  # values in a line; pyarrow and Python need some 100 bytes for each
# Parquet readers support columns of this depth, where a list counts twice. Pickle supports some 50
# levels more.
DEEPEST_COLUMN = 99
MOST_LINE_BYTES = 256 << 20
PIECE_BYTES, CHUNK_BYTES = 8 << 10, 1 << 20  # read sizes while searching the end of a line
# If there are more than MOST_COLUMNS columns, those in under 1 of FEW_LINES lines are left out.
MOST_COLUMNS, FEW_LINES = 500, 100
MOST_RUNS = 2_000  # runs of lines counted in a sample whose lines conflict
ONE_A_LINE = (
    "the line is no JSON object: a file of JSON lines holds one object a line, which "
    "`jq -c '.[]' FILE` makes of an array, and `jq -c . FILE` of objects over several lines"
)
# pyarrow's messages for a value whose type is not the column's.
_COLUMN = re.compile(r"Column\(/?([^/()]+)")
_OTHER_TYPE = ("Failed to convert JSON", ") changed from ")
MOST_NAMED = 4
HALF_OF_A_PAIR = (
    "a text has half of a surrogate pair, such as \\ud83d, which is no character: take U+FFFD for "
    'it (surrogates="replace"), or name the columns to keep (fields=) without it'
)
_BLANKS = b" \t\r\n\f\v\xef\xbb\xbf"  # white space, and the UTF-8 byte order mark
_SEPARATOR = re.compile(r"[ \t\r\n]*[:,]?[ \t\r\n]*")
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, strict=False)
_CONTROL = re.compile("[\0-\x1f]")
# An escape: a surrogate pair, half of a pair, or any other character.
_ESCAPE = re.compile(
    r"\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|\\u[dD][89a-fA-F][\da-fA-F]{2}|\\."
)
_HALF_PAIR = re.compile(
    rb"\\u[dD](?:[89abAB][\da-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][\da-fA-F]{2}\\u[dD])[c-fC-F])"
)
_LONG_NUMBER = re.compile(rb"[0-9]{309}")  # float64 ends below 10^309
_STRING = re.compile(rb'"((?:[^"\\\n]|\\.)*)"?([ \t\r]*:)?')  # the second group marks a name
_OPENING, _CLOSING = list(b"[{"), list(b"]}")


class BadLineError(ValueError):
    """Error for JSON lines that cannot be read as rows of the schema."""


# Errors that broken lines raise; a name that is not UTF-8 raises UnicodeDecodeError, a ValueError.
BROKEN_LINES = (ValueError, RecursionError, pa.ArrowException)


@dataclass(frozen=True)
class BadLine:
    """Unreadable line, with the offset of its first byte in the (decompressed) file."""

    offset: int
    line: bytes  # only the beginning of a line that is too long
    reason: str
    skipped: int = 0  # length in bytes of a line that is too long; 0 for others


def read_range(file: BinaryIO, start: int, length: int, most: int) -> tuple[int, bytes]:
    """Read the lines that begin in the byte range ``[start, start + length)`` of an open file.

    Returns the offset and the content of these lines; the content is b"" if there are none. A last
    line of more than `most` bytes may be cut. Only reads forwards, which is one request to a store
    with read-ahead, unlike `fsspec`'s ``read_block``.
    """
    begin, end = start, start + length
    if start:  # Skip the line that begins before the range.
        file.seek(begin := start - 1)
        while piece := file.read(min(PIECE_BYTES, end - 1 - begin)):
            begin += piece.find(b"\n") + 1 or len(piece)
            if b"\n" in piece:
                break
        else:
            return end, b""
        file.seek(begin)
    pieces = [file.read(end - begin)]
    open_bytes = len(pieces[0]) - pieces[0].rfind(b"\n") - 1
    while 0 < open_bytes <= most and (piece := file.read(PIECE_BYTES)):
        stop = piece.find(b"\n") + 1
        pieces.append(piece[: stop or None])
        open_bytes = 0 if stop else open_bytes + len(piece)
    return begin, b"".join(pieces)


def first_line(content: bytes, start: int) -> int:
    """Return the index of the first line that begins at or after `start`, or `len(content)`."""
    if start <= 0:
        return 0
    return content.find(b"\n", start - 1) + 1 or len(content)


class WholeLines(io.RawIOBase):
    """Stream of another stream's whole lines, which ends before the damage of a truncated file.

    `offset` is the position of the stream's first byte in its file. Lines of more than `most` bytes
    are skipped, and listed in `long_lines`. `cut` is the message of the error that ended a
    truncated stream, or None; ``reopen()`` then opens the stream again, to read the rest byte by
    byte. `check` gets the number of bytes of whole lines so far, and may raise to end the reading.
    """

    def __init__(
        self,
        stream: BinaryIO,
        most: int,
        offset: int = 0,
        reopen: Opener = io.BytesIO,
        check: Callable[[int], None] = lambda kept_bytes: None,
    ) -> None:
        self._stream, self._reopen, self._most = stream, reopen, most
        self._check, self._kept_bytes = check, 0
        self._offset, self._read_bytes, self._has_ended = offset, 0, False
        self._line: list[bytes] = []  # pieces of an unfinished line
        self._line_bytes = 0
        self._ready = memoryview(b"")
        self.long_lines: list[BadLine] = []
        self.cut: str | None = None

    def readable(self) -> bool:
        """Return True: the stream can always be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read bytes into the buffer and return their number, 0 at the end of the stream."""
        while not self._ready and not self._has_ended:
            self._ready = memoryview(self._next())
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def readall(self) -> bytes:
        """Read and return all whole lines that are left."""
        pieces = [bytes(self._ready)]
        while not self._has_ended:
            pieces.append(self._next())
        return b"".join(pieces)

    def read_range(self, start: int, end: float) -> tuple[int, bytes]:
        """Read the lines that begin in ``[start, end)``; return their offset and their content.

        The offset is the first line's, even if it is too long and skipped; `start` if there is
        none. This must be the first read. Afterwards, `long_lines` and `cut` are about the range
        only.
        """
        pieces: list[bytes] = []
        offsets = []  # offsets of kept content
        while self._offset < end and not self._has_ended:
            content = self._next()
            offset = self._offset - len(content)
            first = first_line(content, start - offset)
            stop = len(content)
            if self._offset > end:
                stop = first_line(content, int(end) - offset)
            if first < stop:
                pieces.append(content[first:stop])
                offsets.append(offset + first)
        self.long_lines = [line for line in self.long_lines if start <= line.offset < end]
        if not start <= self._offset < end:
            self.cut = None
        offsets += [line.offset for line in self.long_lines]
        return min(offsets, default=start), b"".join(pieces)

    def _next(self) -> bytes:
        chunk = b"" if self.cut else self._chunk()
        self._has_ended = not chunk
        end = chunk.find(b"\n") + 1
        self._line_bytes += end or len(chunk)
        if self._line_bytes <= self._most or not self._line:
            self._line.append(chunk[: end or None])
        if chunk and not end:
            return b""
        if self._line_bytes > self._most:
            reason = f"the line has more than {self._most:,} bytes (max_line_bytes=)"
            beginning = b"".join(self._line[:2])
            self.long_lines.append(BadLine(self._offset, beginning, reason, self._line_bytes))
        is_whole = self._line_bytes <= self._most and (end or not self.cut)
        last = chunk.rfind(b"\n") + 1
        whole = b"".join([*(self._line if is_whole else ()), chunk[end:last]])
        self._offset += self._line_bytes + last - end
        self._line, self._line_bytes = [chunk[last:]], len(chunk) - last
        self._kept_bytes += len(whole)
        self._check(self._kept_bytes)
        return whole

    def _chunk(self) -> bytes:
        try:
            chunk = self._stream.read(min(CHUNK_BYTES, self._most))
        except (EOFError, OSError) as err:
            if not isinstance(err, EOFError) and "Truncated" not in str(err):
                raise
            self.cut = f"{err}: it is cut off, and only the whole lines before are there"
            pieces, left = [], self._read_bytes
            with contextlib.suppress(UnreadableInputError), self._reopen() as stream:
                while left:
                    left -= len(stream.read(min(left, CHUNK_BYTES)))
                while piece := stream.read(1):
                    pieces.append(piece)
            chunk = b"".join(pieces)
        self._read_bytes += len(chunk)
        return chunk


def parse(
    lines: Sequence[bytes],
    schema: pa.Schema | None,
    is_projected: bool = False,
    replaces: bool = False,
) -> pa.Table:
    """Parse JSON lines into an Arrow table, with a row for each line that is not blank.

    `lines` keep their line breaks. Without a schema, columns are inferred. Fields that the schema
    lacks are ignored if `is_projected`, and refused otherwise if they have values. With `replaces`,
    halves of surrogate pairs become U+FFFD, except in columns of Arrow's JSON type, which get the
    text of their values. A bad line raises one of `BROKEN_LINES`.
    """
    rows = sum(map(_check_line, lines))
    if not rows:
        return (schema or pa.schema([])).empty_table()
    texts = json_columns(schema or ())
    if not texts:
        try:
            return _parse(lines, rows, schema, is_projected)
        except BROKEN_LINES:
            if not ((is_projected or replaces) and _HALF_PAIR.search(b"".join(lines))):
                raise
    kept = schema.names if schema and not replaces else ()
    lines = [
        _edit(line, texts, kept) if texts or _HALF_PAIR.search(line) else line for line in lines
    ]
    if not texts:
        return _parse(lines, rows, schema, is_projected)
    return cast(_parse(lines, rows, changed_schema(schema, plain_type), is_projected), schema)


def _parse(
    lines: Sequence[bytes], rows: int, schema: pa.Schema | None, is_projected: bool
) -> pa.Table:
    from pyarrow import json as arrow_json

    content = b"".join(lines)
    table = arrow_json.read_json(
        io.BytesIO(content),
        # All lines are one block, because lines must not cross blocks, and may be long.
        read_options=arrow_json.ReadOptions(block_size=len(content) + 1),
        parse_options=arrow_json.ParseOptions(
            explicit_schema=schema,
            # "infer" would add the unknown fields of one line to every row.
            unexpected_field_behavior=(
                "ignore" if is_projected else "error" if schema and rows > 1 else "infer"
            ),
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
    _check_finite(table, content)
    table.validate(full=True)  # pyarrow's reader accepts text that is not UTF-8
    return table


def _check_finite(table: pa.Table, content: bytes) -> None:
    """Raise BadLineError if pyarrow read a number beyond float64 as infinity."""
    columns = [chunk for column in table.columns for chunk in column.chunks]
    while columns:
        column = columns.pop()
        if pa.types.is_list(column.type) or pa.types.is_struct(column.type):
            columns += column.flatten() if pa.types.is_struct(column.type) else [column.flatten()]
        elif pa.types.is_floating(column.type) and pc.any(pc.is_inf(column)).as_py():
            if b"Infinity" in content and not _LONG_NUMBER.search(content):
                continue
            raise BadLineError(
                "a number is beyond 64 bits of floating point: name the columns to keep (fields=) "
                'without it, or keep its digits as text (types={"meta": "json"})'
            )


def parse_good(
    content: bytes, offset: int, schema: pa.Schema, is_projected: bool, replaces: bool = False
) -> tuple[pa.Table, list[BadLine]]:
    """Parse JSON lines at `offset` of a file into a table of good lines, and a list of bad ones.

    `is_projected` and `replaces` are as in `parse`. Blank lines give no row.
    """
    tables: list[pa.Table] = [schema.empty_table()]
    bad: list[BadLine] = []
    for begin, lines in _blocks(content):
        for result in _parse_bisecting(lines, offset + begin, schema, is_projected, replaces):
            (bad if isinstance(result, BadLine) else tables).append(result)
    return pa.concat_tables(tables), bad


def _blocks(content: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the offset in `content` and the lines of blocks of about 16 MiB."""
    begin = 0
    while begin < len(content):
        end = content.find(b"\n", begin + MOST_BYTES_AT_ONCE - 1) + 1 or len(content)
        yield begin, io.BytesIO(content[begin:end]).readlines()
        begin = end


def line_offsets(content: bytes, offset: int) -> np.ndarray:
    """Return the offset in the file of each line that is not blank, int64 (rows,)."""
    offsets = [np.zeros(0, dtype=np.int64)]
    for begin, lines in _blocks(content):
        ends = offset + begin + np.cumsum([*map(len, lines)])
        starts = np.array([0, *ends[:-1]])
        starts[0] = offset + begin
        offsets.append(starts[[bool(line.strip(_BLANKS)) for line in lines]])
    return np.concatenate(offsets)


def _parse_bisecting(
    lines: Sequence[bytes], offset: int, schema: pa.Schema, is_projected: bool, replaces: bool
) -> Iterator[pa.Table | BadLine]:
    def run(start: int, stop: int) -> pa.Table:
        return parse(lines[start:stop], schema, is_projected, replaces)

    offsets = list(itertools.accumulate(map(len, lines), initial=offset))
    for row, result in isolate_bad_rows(run, 0, len(lines), BROKEN_LINES):
        if isinstance(result, Exception):
            reason = _reason(lines[row], schema, result)
            yield BadLine(offsets[row], lines[row].rstrip(b"\r\n"), reason)
        else:
            yield result


def json_columns(schema: Iterable[pa.Field]) -> list[str]:
    """List the names of columns of Arrow's JSON type, which hold the text of any JSON value."""
    return [field.name for field in schema if isinstance(field.type, pa.JsonType)]


def line_types(columns: pa.Schema, in_lines: pa.Schema) -> dict[str, pa.DataType | None]:
    """Return types for parsing columns of JSON lines, if they differ from types in `columns`.

    `columns` is the schema of Parquet files and JSON lines, and `in_lines` of JSON lines alone. The
    result has types by name; None is for a column that lines cannot hold.
    """
    types: dict[str, pa.DataType | None] = {}
    own = {field.name: field.type for field in in_lines}
    for field in columns:
        kind = own.get(field.name)
        if isinstance(kind, pa.JsonType):
            types[field.name] = kind
            continue
        try:
            parse([b"{}\n"], pa.schema([field]))
        except pa.ArrowNotImplementedError:
            types[field.name] = kind
    return {name: kind for name, kind in types.items() if kind != columns.field(name).type}


def _edit(line: bytes, texts: Collection[str], kept: Collection[str]) -> bytes:
    """Return a line with values of columns `texts` as JSON strings, to read them as text.

    Halves of surrogate pairs become U+FFFD in columns neither in `texts` nor in `kept`.
    """
    text, pieces, done = line.decode(), [], 0
    start = _SEPARATOR.match(text, text.find("{") + 1).end()  # type: ignore[union-attr]
    while text[start : start + 1] == '"':
        name, end = _DECODER.raw_decode(text, start)
        begin = _SEPARATOR.match(text, end).end()  # type: ignore[union-attr]
        end = _DECODER.raw_decode(text, begin)[1]
        value = text[begin:end]
        if name in texts:
            if _CONTROL.search(value):
                value = json.dumps(json.loads(value, strict=False))
            pieces += [text[done:begin], value if value == "null" else json.dumps(value)]
            done = end
        elif name not in kept:
            replaced = _ESCAPE.sub(
                lambda escape: r"\ufffd" if len(escape[0]) == 6 else escape[0], text[start:end]
            )
            pieces += [text[done:start], replaced]
            done = end
        start = _SEPARATOR.match(text, end).end()  # type: ignore[union-attr]
    return "".join([*pieces, text[done:]]).encode()


def line_schemas(content: bytes, texts: Collection[str] = ()) -> Counter[pa.Schema]:
    """Count JSON lines by the Arrow schema that pyarrow infers for them.

    Adjacent lines whose types fit together have one schema. Bad lines and blank lines are not
    counted, and counting ends early after many conflicts. `texts` are columns to read as text.
    """
    lines = io.BytesIO(content).readlines()
    for index, line in enumerate(lines if texts else ()):
        with contextlib.suppress(*BROKEN_LINES):
            _check_line(line)
            lines[index] = _edit(line, texts, ())

    def run(start: int, stop: int) -> pa.Table:
        part = lines[start:stop]
        if sum(line.count(b":") for line in part) * len(part) > MOST_VALUES:
            found = itertools.chain.from_iterable(map(_STRING.finditer, part))
            if len({string[1] for string in found if string[2]}) * len(part) > MOST_VALUES:
                raise BadLineError("a table of these lines would hold little but nulls")
        return parse(part, None, replaces=True)

    counts: Counter[pa.Schema] = Counter()
    results = isolate_bad_rows(run, 0, len(lines), BROKEN_LINES)
    for _, result in itertools.islice(results, MOST_RUNS):
        if not isinstance(result, Exception):
            counts[result.schema] += len(result)
    return counts


def frequent_columns(
    schema: pa.Schema, samples: Sequence[bytes], kept: Collection[str]
) -> pa.Schema:
    """Return the schema without columns in less than 1% of the lines, if it has more than 500.

    Each row of a frame would have all of these columns. Columns are counted in the lines of
    `samples`, and columns named in `kept` stay.
    """
    if len(schema) <= MOST_COLUMNS:
        return schema
    lines, counts = 0, Counter(kept)
    for line in itertools.chain.from_iterable(map(bytes.splitlines, samples)):
        with contextlib.suppress(*BROKEN_LINES):
            if _check_line(line):
                counts.update(json.loads(line).keys())
                lines += 1
    names = [name for name in schema.names if name in kept or counts[name] * FEW_LINES >= lines]
    return pa.schema([schema.field(name) for name in names])


def exact_integers(schema: pa.Schema, samples: Sequence[bytes]) -> pa.Schema:
    """Return the schema with int64 or uint64 in place of floats if all sampled values are integers.

    pyarrow infers floating point if one integer exceeds int64, and then all of them lose digits,
    such as identifiers that are 64-bit hashes. Integers that exceed 64 bits do not count; if there
    are no others, the column stays floating point.
    """
    if "double" not in str(schema.types):
        return schema
    records = []
    for line in itertools.chain.from_iterable(content.split(b"\n") for content in samples):
        with contextlib.suppress(*BROKEN_LINES):
            _check_line(line)
            records.append(json.loads(line))
    exact = _exact(pa.struct(schema), records, "column")
    return pa.schema([f.with_type(new.type) for f, new in zip(schema, exact, strict=True)])


def _exact(kind: pa.DataType, values: list[Any], name: str) -> pa.DataType:
    """Return the type `kind` with integers for floats, also inside, if all values are integers."""
    if pa.types.is_list(kind):
        inner = [item for value in values if isinstance(value, list) for item in value]
        return pa.list_(_exact(kind.value_type, inner, name))
    if pa.types.is_struct(kind):
        by_field: dict[str, list[Any]] = {}
        for value in values:
            for key, item in value.items() if isinstance(value, dict) else ():
                by_field.setdefault(key, []).append(item)
        return pa.struct(
            f.with_type(_exact(f.type, by_field.get(f.name, []), f"{name} {f.name!r}"))
            for f in kind.fields
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
    """Explain why a line cannot be read, and how to cure it; `err` is the parser's error."""
    try:
        line.decode()
    except UnicodeDecodeError as wrong:
        return (
            f"byte {wrong.start} of the line is not UTF-8: convert the file from the encoding that "
            "it has, such as with `iconv -f LATIN1 -t UTF-8 FILE`"
        )
    if line.strip(_BLANKS) == b"{":
        return ONE_A_LINE
    with contextlib.suppress(*BROKEN_LINES):
        _check_line(line)
        if _HALF_PAIR.search(_edit(line, json_columns(schema), schema.names)):
            return HALF_OF_A_PAIR
    text = str(err).removesuffix(" in row 0")
    if not any(words in text for words in _OTHER_TYPE):
        return text

    def read(start: int, stop: int) -> None:
        parse([line], pa.schema([schema.field(index) for index in range(start, stop)]), True)

    tried = isolate_bad_rows(read, 0, len(schema), BROKEN_LINES) if schema.names else ()
    bad = (schema.field(index) for index, err in tried if err is not None)
    columns = {
        f.name: f"{f.name} ({f.type} in the samples)" for f in itertools.islice(bad, MOST_NAMED)
    }
    # If all columns of the schema are good, an unknown field has values of several types.
    if not columns and (named := _COLUMN.search(text)):
        columns = {named[1]: named[1]}
    return (
        f"a value does not fit its column {', '.join(columns.values())}: {text}; name the columns "
        "to keep (fields=) without that one, or pass its type, for numbers such as "
        f'types={{"price": "double"}}, and for values of any kinds '
        f"types={{{next(iter(columns), 'meta')!r}: 'json'}}, which keeps the text of each"
    )


def _check_line(line: bytes) -> bool:
    """Return False for a blank line; raise BadLineError for one that pyarrow must not parse."""
    text = line.strip(_BLANKS)
    if text and text[:1] != b"{":
        raise BadLineError(ONE_A_LINE)
    brackets = text.count(b"[") + text.count(b"{")
    if brackets > DEEPEST_NESTING or text.count(b",") > MOST_VALUES:
        _check_structure(text)
    return bool(text)


def _check_structure(text: bytes) -> None:
    """Raise BadLineError if the line is nested over 1,000 deep, or holds over 4 million values."""
    # Without escapes, every other quote begins a string.
    text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    level = values = quotes = 0
    for start in range(0, len(text), CHUNK_BYTES):
        piece = np.frombuffer(text[start : start + CHUNK_BYTES], dtype=np.uint8)
        before = quotes + np.cumsum(piece == ord('"'))
        marks = piece[before % 2 == 0]
        steps = np.isin(marks, _OPENING).view(np.int8) - np.isin(marks, _CLOSING)
        levels = level + np.cumsum(steps)
        values += int(np.count_nonzero(marks == ord(",")))
        if levels.max(initial=0) > DEEPEST_NESTING:
            raise BadLineError(f"the line is nested more than {DEEPEST_NESTING} deep")
        if values > MOST_VALUES:
            raise BadLineError(f"the line holds more than {MOST_VALUES:,} values")
        level, quotes = int([level, *levels[-1:]][-1]), int(before[-1])


def _check_depth(schema: pa.Schema) -> None:
    """Raise BadLineError if a column is nested over 99 deep, where a list counts twice."""
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
        inner += [(kind.field(index).type, below, name) for index in range(kind.num_fields)]


def _check_objects_stay_empty(lines: Sequence[bytes], schema: pa.Schema) -> None:
    """Raise one of `BROKEN_LINES` if an object without fields in `schema` has some in the lines."""
    names = [field.name for field in schema if holds_no_fields(field.type)]
    if names:
        records = [json.loads(text) for line in lines if (text := line.strip(_BLANKS))]
        rows = [{name: record[name] for name in names if name in record} for record in records]
        parse(
            [json.dumps(record).encode() + b"\n" for record in rows],
            pa.schema([schema.field(name) for name in names]),
        )


def _check_nothing_is_lost(parsed: pa.Schema, schema: pa.Schema) -> None:
    """Raise BadLineError if the lines' own schema `parsed` has values that `schema` lacks."""
    known = {field.name: field.type for field in schema}
    unknown = [
        field.name
        for field in parsed
        if not pa.types.is_null(field.type) and known.get(field.name) != field.type
    ]
    if unknown:
        names = ", ".join(unknown[:MOST_NAMED])
        more = f" and {len(unknown) - MOST_NAMED:,} more" if len(unknown) > MOST_NAMED else ""
        raise BadLineError(
            f"{names}{more} has fields that are not in the samples of the "
            f"files, from which columns are read, or of more than {MOST_COLUMNS} columns in fewer "
            f"than one line of {FEW_LINES}: name the columns to keep (fields=), which leaves out "
            "others; if names of fields are data, keep them in one column of JSON "
            '(types={"meta": "json"})'
        )

"""JSON lines as Arrow tables: byte ranges, types from samples, and lines that cannot be read."""

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

# What pyarrow's reader takes at once is less than 2 GiB; less than that is faster to bisect, and
# takes less memory where lines are blank or short.
MOST_BYTES_AT_ONCE = 16 << 20
# A parser without a limit overflows its stack: pyarrow's between 10,000 and 100,000.
DEEPEST_NESTING = 1_000
MOST_VALUES = 4_000_000  # in a line: pyarrow and Python take some 100 bytes for each
# Levels of a column, a list two, as readers of Parquet count and bear them; pickles some 50 more.
DEEPEST_COLUMN = 99
MOST_LINE_BYTES = 256 << 20
PIECE_BYTES, CHUNK_BYTES = 8 << 10, 1 << 20  # at a time, where an end is looked for
# Of more columns than these, one in fewer than one line of so many is not taken from samples.
MOST_COLUMNS, FEW_LINES = 500, 100
MOST_LINES_COUNTED = 2_000  # or runs of them, of a sample whose lines do not fit together
ONE_A_LINE = (
    "the line is no JSON object: a file of JSON lines holds one object a line, which "
    "`jq -c '.[]' FILE` makes of an array, and `jq -c . FILE` of objects over several lines"
)
# pyarrow's words for a value of another type than the column's.
_COLUMN = re.compile(r"Column\(/?([^/()]+)")
_OTHER_TYPE = ("Failed to convert JSON", ") changed from ")
MOST_NAMED = 4
HALF_OF_A_PAIR = (
    "a text has half of a surrogate pair, such as \\ud83d, which is no character: take U+FFFD for "
    'it (surrogates="replace" of a JsonlReader), or name the columns to keep (fields=) without it'
)
_BLANKS = b" \t\r\n\f\v\xef\xbb\xbf"  # and the mark that some programs begin files with
_BETWEEN = re.compile(r"[ \t\r\n]*[:,]?[ \t\r\n]*")  # a name and its value, or two of them
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, strict=False)
_CONTROL = re.compile("[\0-\x1f]")
# An escape of one character or of two, with both halves of a pair or one.
_ESCAPE = re.compile(
    r"\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|\\u[dD][89a-fA-F][\da-fA-F]{2}|\\."
)
_HALF = re.compile(
    rb"\\u[dD](?:[89abAB][\da-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][\da-fA-F]{2}\\u[dD])[c-fC-F])"
)
_LONG_NUMBER = re.compile(rb"[0-9]{309}")  # float64 ends below 10^309
_STRING = re.compile(rb'"((?:[^"\\\n]|\\.)*)"?([ \t\r]*:)?')  # and whether it is a name
_OPENING, _CLOSING = list(b"[{"), list(b"]}")


class BadLineError(ValueError):
    """Error for lines that are not rows of the wanted columns."""


# What broken lines raise; names of fields that are not UTF-8 raise a UnicodeDecodeError.
BROKEN_LINES = (ValueError, RecursionError, pa.ArrowException)


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be read, and where in the (decompressed) file its first byte is.

    Of one that is too long, `line` is the beginning, and `skipped` tells its bytes.
    """

    offset: int
    line: bytes
    reason: str
    skipped: int = 0


def read_range(file: BinaryIO, start: int, length: int, most: int) -> tuple[int, bytes]:
    """Read the lines that begin in ``[start, start + length)``, the last one whole.

    Returns where they begin, and the lines. Of a last line with more than `most` bytes only some
    more. Reads forwards, which is one request where a store is read ahead. (`fsspec`'s
    ``read_block`` looks for the end first, and then goes back.)
    """
    begin, end = start, start + length
    if start:  # behind the line that begins before
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


class WholeLines(io.RawIOBase):
    """Lines of a stream, without those that are too `long`, up to where its file is `cut` off.

    `again` opens the stream anew: what was there when a call fails is read byte by byte. `check`
    gets the bytes of lines so far, without those too long, and may raise before there are more.
    """

    def __init__(
        self,
        stream: BinaryIO,
        most: int,
        offset: int = 0,
        again: Opener = io.BytesIO,
        check: Callable[[int], None] = lambda kept_bytes: None,
    ) -> None:
        self._stream, self._again, self._most = stream, again, most
        self._check, self._kept_bytes = check, 0
        self._offset, self._read_bytes, self._has_ended = offset, 0, False
        self._line: list[bytes] = []  # whose end is still to come
        self._line_bytes = 0
        self._ready = memoryview(b"")
        self.long: list[BadLine] = []
        self.cut: str | None = None

    def readable(self) -> bool:
        """Return True: the stream can always be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read bytes into the buffer, and return their number, as any raw stream does."""
        while not self._ready and not self._has_ended:
            self._ready = memoryview(self._next())
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def readall(self) -> bytes:
        """Read all that is left."""
        pieces = [bytes(self._ready)]
        while not self._has_ended:
            pieces.append(self._next())
        return b"".join(pieces)

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
            shown = b"".join(self._line[:2])
            self.long.append(BadLine(self._offset, shown, reason, self._line_bytes))
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
            with contextlib.suppress(UnreadableInputError), self._again() as stream:
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
    """Parse lines that are all good into a table.

    Raises one of `BROKEN_LINES` if some are not. Without a schema, its columns are those that are
    found. Fields that it lacks are refused, or left out if it is a projection. Of columns of JSON
    it has the text; halves of surrogate pairs are U+FFFD in what it leaves out, and with `replaces`
    everywhere.
    """
    rows = sum(map(_check_line, lines))
    if not rows:
        return (schema or pa.schema([])).empty_table()
    texts = json_columns(schema or ())
    if not texts:
        try:
            return _parse(lines, rows, schema, is_projected)
        except BROKEN_LINES:
            if not ((is_projected or replaces) and _HALF.search(b"".join(lines))):
                raise
    kept = schema.names if schema and not replaces else ()
    lines = [_edited(line, texts, kept) if texts or _HALF.search(line) else line for line in lines]
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
        # One block holds everything: a line may not cross blocks, and it may be long.
        read_options=arrow_json.ReadOptions(block_size=len(content) + 1),
        parse_options=arrow_json.ParseOptions(
            explicit_schema=schema,
            # With "infer", every row would have the fields of each line, known or not.
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
    table.validate(full=True)  # finds text that is not UTF-8, which pyarrow's reader lets pass
    return table


def _check_finite(table: pa.Table, content: bytes) -> None:
    """Raise BadLineError if a number beyond float64 has become infinity."""
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
    """Parse the lines at `offset` of a file; return a table of the good ones, and the bad ones."""
    tables: list[pa.Table] = [schema.empty_table()]
    bad: list[BadLine] = []
    for begin, lines in _blocks(content):
        for result in _isolated(lines, offset + begin, schema, is_projected, replaces):
            (bad if isinstance(result, BadLine) else tables).append(result)
    return pa.concat_tables(tables), bad


def _blocks(content: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """Yield runs of lines, of which few are Python objects at a time, and where each run begins."""
    begin = 0
    while begin < len(content):
        end = content.find(b"\n", begin + MOST_BYTES_AT_ONCE - 1) + 1 or len(content)
        yield begin, io.BytesIO(content[begin:end]).readlines()
        begin = end


def line_places(content: bytes, offset: int) -> np.ndarray:
    """Return where in the file lines begin that are not blank, int64 (rows,); see `parse_good`."""
    places = [np.zeros(0, dtype=np.int64)]
    for begin, lines in _blocks(content):
        ends = offset + begin + np.cumsum([*map(len, lines)])
        starts = np.array([0, *ends[:-1]])
        starts[0] = offset + begin
        places.append(starts[[bool(line.strip(_BLANKS)) for line in lines]])
    return np.concatenate(places)


def _isolated(
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
    """List the columns that hold the text of any JSON."""
    return [field.name for field in schema if isinstance(field.type, pa.JsonType)]


def _edited(line: bytes, texts: Collection[str], kept: Collection[str]) -> bytes:
    """Return the line with the values of columns `texts` as texts of JSON; null stays null.

    Beside these and columns that are `kept`, halves of surrogate pairs become U+FFFD.
    """
    text, pieces, done = line.decode(), [], 0
    place = _BETWEEN.match(text, text.find("{") + 1).end()  # type: ignore[union-attr]
    while text[place : place + 1] == '"':
        name, end = _DECODER.raw_decode(text, place)
        begin = _BETWEEN.match(text, end).end()  # type: ignore[union-attr]
        end = _DECODER.raw_decode(text, begin)[1]
        value = text[begin:end]
        if name in texts:
            if _CONTROL.search(value):
                value = json.dumps(json.loads(value, strict=False))
            pieces += [text[done:begin], value if value == "null" else json.dumps(value)]
            done = end
        elif name not in kept:
            whole = _ESCAPE.sub(
                lambda escape: r"\ufffd" if len(escape[0]) == 6 else escape[0], text[place:end]
            )
            pieces += [text[done:place], whole]
            done = end
        place = _BETWEEN.match(text, end).end()  # type: ignore[union-attr]
    return "".join([*pieces, text[done:]]).encode()


def line_schemas(content: bytes, texts: Collection[str] = ()) -> Counter[pa.Schema]:
    """Count the lines by their columns, in smaller runs only if they do not fit together.

    Columns `texts` are those of JSON.
    """
    lines = io.BytesIO(content).readlines()
    for place, line in enumerate(lines if texts else ()):
        with contextlib.suppress(*BROKEN_LINES):
            _check_line(line)
            lines[place] = _edited(line, texts, ())

    def run(start: int, stop: int) -> pa.Table:
        some = lines[start:stop]
        if sum(line.count(b":") for line in some) * len(some) > MOST_VALUES:
            found = itertools.chain.from_iterable(map(_STRING.finditer, some))
            if len({string[1] for string in found if string[2]}) * len(some) > MOST_VALUES:
                raise BadLineError("a table of these lines would hold little but nulls")
        return parse(some, None, replaces=True)

    counts: Counter[pa.Schema] = Counter()
    results = isolate_bad_rows(run, 0, len(lines), BROKEN_LINES)
    for _, result in itertools.islice(results, MOST_LINES_COUNTED):
        if not isinstance(result, Exception):
            counts[result.schema] += len(result)
    return counts


def frequent_columns(
    schema: pa.Schema, samples: Sequence[bytes], kept: Collection[str]
) -> pa.Schema:
    """Return the schema without columns that few lines have, if there are very many columns.

    Every row would have all of them. Lines that have others are refused by their number.
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
    """Return the schema with integer types for columns of nothing but integers.

    pyarrow takes a column for floating point as soon as one integer exceeds int64, and then all of
    them lose digits: identifiers that are 64-bit hashes. Those that do so all the same are logged.
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
    """Return the type with integers for floating point where all of the values are integers."""
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
    """Return why a single line cannot be read, and the cure as far as there is one."""
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
        if _HALF.search(_edited(line, json_columns(schema), schema.names)):
            return HALF_OF_A_PAIR
    text = str(err).removesuffix(" in row 0")
    if not any(words in text for words in _OTHER_TYPE):
        return text

    def read(start: int, stop: int) -> None:
        parse([line], pa.schema([schema.field(place) for place in range(start, stop)]), True)

    tried = isolate_bad_rows(read, 0, len(schema), BROKEN_LINES) if schema.names else ()
    bad = (schema.field(place) for place, err in tried if err is not None)
    columns = {
        f.name: f"{f.name} ({f.type} in the samples)" for f in itertools.islice(bad, MOST_NAMED)
    }
    if not columns and (named := _COLUMN.search(text)):  # whose values differ in the line itself
        columns = {named[1]: named[1]}
    return (
        f"a value does not fit its column {', '.join(columns.values())}: {text}; name the columns "
        "to keep (fields=) without that one, or give a JsonlReader its type, for numbers such as "
        f'types={{"price": "double"}}, and for values of any kinds '
        f"types={{{next(iter(columns), 'meta')!r}: 'json'}}, which keeps the text of each"
    )


def _check_line(line: bytes) -> bool:
    """Tell whether a line holds something; raise for what would crash pyarrow's parser."""
    text = line.strip(_BLANKS)
    if text and text[:1] != b"{":
        raise BadLineError(ONE_A_LINE)
    brackets = text.count(b"[") + text.count(b"{")
    if brackets > DEEPEST_NESTING or text.count(b",") > MOST_VALUES:
        _check_structure(text)
    return bool(text)


def _check_structure(text: bytes) -> None:
    """Raise BadLineError for a line of JSON that is nested too deep, or holds too many values."""
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
        rows = [{name: record[name] for name in names if name in record} for record in records]
        parse(
            [json.dumps(record).encode() + b"\n" for record in rows],
            pa.schema([schema.field(name) for name in names]),
        )


def _check_nothing_is_lost(parsed: pa.Schema, schema: pa.Schema) -> None:
    """Raise BadLineError if there are fields, other than nulls, that the schema lacks."""
    known = {field.name: field.type for field in schema}
    late = [
        field.name
        for field in parsed
        if not pa.types.is_null(field.type) and known.get(field.name) != field.type
    ]
    if late:
        more = f" and {len(late) - MOST_NAMED:,} more" if len(late) > MOST_NAMED else ""
        raise BadLineError(
            f"{', '.join(late[:MOST_NAMED])}{more} has fields that are not in the samples of the "
            f"files, from which columns are read, or of more than {MOST_COLUMNS} columns in fewer "
            f"than one line of {FEW_LINES}: name the columns to keep (fields=), which leaves out "
            "others; if names of fields are data, keep them in one column of JSON "
            '(types={"meta": "json"})'
        )

"""Parquet of any type: rows that come out are pyarrow's own, or a clear refusal.

What is wanted is read by plain pyarrow, and compared as Arrow prints it.
"""

import base64
import contextlib
import json
import math
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuclassify import JsonlWriter, ParquetWriter, Pipeline
from gpuclassify.jobs.input.readers import FileReader
from gpuclassify.jobs.stores.store import UnreadableInputError

UNITS = ["s", "ms", "us", "ns"]
SIMPLE = [
    *(pa.null(), pa.bool_(), pa.string(), pa.large_string(), pa.binary(), pa.large_binary()),
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    *(pa.float16(), pa.float32(), pa.float64(), pa.binary(2)),
    *(pa.date32(), pa.date64(), pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")),
    *(pa.timestamp(unit) for unit in UNITS),
    *(pa.timestamp("us", "UTC"), pa.timestamp("ns", "Europe/Berlin"), pa.timestamp("s", "+05:30")),
    *(pa.duration(unit) for unit in UNITS),
    *(pa.decimal128(5, 2), pa.decimal128(38, 0), pa.decimal256(60, 10)),
    *(
        pa.string_view(),
        pa.binary_view(),
        pa.struct([("__dummy_field_in_empty_struct", pa.null())]),
        pa.struct([("a", pa.null())]),
    ),
    pa.struct([("a", pa.int64()), ("a", pa.string())]),
]
KEYS = st.sampled_from([pa.string(), pa.int32()])


def nested(inner):
    names = st.sampled_from(["a", "", "a.b", "é"])
    return st.one_of(
        inner.map(pa.list_),
        inner.map(pa.large_list),
        inner.map(lambda kind: pa.list_(kind, 2)),
        st.dictionaries(names, inner, max_size=3).map(lambda kinds: pa.struct(list(kinds.items()))),
        st.tuples(KEYS, inner).map(lambda kinds: pa.map_(*kinds)),
    )


kinds = st.one_of(
    st.sampled_from(SIMPLE),
    st.recursive(st.sampled_from(SIMPLE), nested, max_leaves=3),
    st.sampled_from([pa.string(), pa.int64(), pa.timestamp("us")]).map(
        lambda kind: pa.dictionary(pa.int8(), kind)
    ),
)


def values(kind):
    """Values of a type; times as the numbers that they are stored as."""
    if pa.types.is_null(kind):
        return st.none()
    if pa.types.is_boolean(kind):
        found = st.booleans()
    elif pa.types.is_floating(kind):
        found = st.floats(width=kind.bit_width)
    elif pa.types.is_decimal(kind):
        most = 10 ** min(kind.precision - kind.scale, 28) - 1
        found = st.decimals(-most, most, places=kind.scale)
    elif pa.types.is_fixed_size_binary(kind):
        found = st.binary(min_size=2, max_size=2)
    elif pa.types.is_binary(kind) or kind in (pa.large_binary(), pa.binary_view()):
        found = st.binary(max_size=4)
    elif pa.types.is_string(kind) or kind in (pa.large_string(), pa.string_view()):
        found = st.text(max_size=6)
    elif pa.types.is_map(kind):
        pairs = st.tuples(
            values(kind.key_type).filter(lambda key: key is not None), values(kind.item_type)
        )
        found = st.lists(pairs, max_size=2)
    elif pa.types.is_fixed_size_list(kind):
        found = st.lists(values(kind.value_type), min_size=2, max_size=2)
    elif pa.types.is_nested(kind) and not pa.types.is_struct(kind):
        found = st.lists(values(kind.value_type), max_size=3)
    elif pa.types.is_struct(kind):
        # Pairs, as names may be there twice.
        found = st.tuples(*[values(field.type) for field in kind]).map(
            lambda held: list(zip(kind.names, held, strict=True))
        )
    elif pa.types.is_time(kind):
        seconds = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[kind.unit]
        found = st.integers(0, 86_400 * seconds - 1)
    else:
        bits = kind.bit_width
        least, most = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        if pa.types.is_unsigned_integer(kind):
            least, most = 0, 2**bits - 1
        day = 86_400_000 if kind == pa.date64() else 1
        usual = st.integers(max(least, -100), min(most, 20_000)).map(lambda number: number * day)
        found = (
            usual
            | usual
            | st.integers(-(-least // day), most // day).map(lambda number: number * day)
        )
    return st.none() | found


@st.composite
def columns(draw, rows):
    kind = draw(kinds)
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    column = pa.array([draw(values(plain)) for _ in range(rows)], plain)
    if kind == pa.string() and draw(st.integers(0, 9)) == 0:
        column = pa.array([b"\xff"] * rows, pa.binary()).view(kind)
    return column.dictionary_encode() if plain != kind else column


NAMES = ["text", "n", "", "a.b", "größe", "\u2028", "x\x00y"]


@st.composite
def tables(draw):
    rows = draw(st.integers(0, 6))
    names = draw(
        st.lists(
            st.sampled_from(NAMES), min_size=1, max_size=4, unique=draw(st.integers(0, 19)) > 0
        )
    )
    return pa.table([draw(columns(rows)) for _ in names], names)


WRITTEN = st.fixed_dictionaries(
    {
        "row_group_size": st.sampled_from([None, 1, 2]),
        "compression": st.sampled_from(["none", "snappy", "gzip", "zstd", "lz4", "brotli"]),
        "version": st.sampled_from(["1.0", "2.6"]),
        "data_page_version": st.sampled_from(["1.0", "2.0"]),
        "use_dictionary": st.booleans(),
        "store_schema": st.sampled_from([True, True, False]),
        "write_page_checksum": st.booleans(),
    }
)
DAMAGE = [
    *[None] * 20,
    lambda content: content[:-5],
    lambda content: b"",
    lambda content: content[4:],
]


@st.composite
def some_inputs(draw):
    first = draw(tables())
    every = [first]
    for _ in range(draw(st.sampled_from([0, 0, 1]))):
        every.append(
            draw(
                st.one_of(
                    st.just(first.slice(1)),
                    st.just(
                        first.select(first.schema.names[:1])
                        if len({*first.schema.names}) == len(first.schema)
                        else first
                    ),
                    tables(),
                )
            )
        )
    return [(table, draw(WRITTEN), draw(st.sampled_from(DAMAGE))) for table in every]


inputs = some_inputs()
options = st.fixed_dictionaries(
    {
        "writer": st.sampled_from([ParquetWriter, JsonlWriter]),
        "on_error": st.sampled_from(["raise", "quarantine"]),
        "part_bytes": st.sampled_from([None, 1]),
    }
)


def plain(value, kind):
    """What JSON has for a value of Python."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        if "__dummy_field_in_empty_struct" in value:
            return {}
        return {field.name: plain(value[field.name], field.type) for field in kind}
    if pa.types.is_map(kind):
        pairs = [(key, plain(item, kind.item_type)) for key, item in value]
        if kind.key_type == pa.string():
            return dict(pairs)
        return [{"key": key, "value": item} for key, item in pairs]
    if pa.types.is_nested(kind):
        return [plain(item, kind.value_type) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value if isinstance(value, (bool, int, float, str)) else str(value)


def shown(column):
    """All values as text; NaN of a column of numbers is null, as in pandas."""
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column.cast(pa.float64())), None, column)
    return column.to_string(window=1_000, container_window=1_000)


def as_type(column, kind):
    """The column of a type; pyarrow 26 breaks some that it casts to their own."""
    return column if column.type == kind else column.cast(kind)


# One of them is in every refusal.
CURES = ("fields=", "on_error=", "neither rows nor columns", "nothing of the input")


def check(files, writer, on_error, part_bytes):
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "in").mkdir()
        held = {}
        for number, (table, how, damage) in enumerate(files):
            path = root / "in" / f"{number}.parquet"
            try:
                pq.write_table(table, path, **how)
            except (pa.ArrowException, ValueError):
                return "not written"  # by pyarrow itself
            try:
                held[str(path)] = pq.ParquetFile(path).read()
            except (pa.ArrowException, OSError):
                return "not read"
            if damage is not None:
                path.write_bytes(damage(path.read_bytes()))
        reader = FileReader(root / "in", part_bytes=part_bytes)
        job = Pipeline([reader, lambda frame: frame, writer(f"{root}/out")], on_error=on_error)
        try:
            summary = job.run(report=lambda *_: None)
        except (UnreadableInputError, TypeError) as err:
            assert any(words in str(err) for words in CURES), err
            return "refused"
        left = [
            json.loads(line)
            for path in (root / "out" / "_quarantine").glob("*")
            for line in path.read_bytes().splitlines()
        ]
        broken = {
            each["source"].partition(", row groups")[0] for each in left if each["kind"] == "file"
        }
        good = {path: table for path, table in held.items() if path not in broken}
        out = sorted((root / "out").glob("part-*"))
        rows_out = sum(len(table) for table in good.values()) - sum(
            e["kind"] == "row" for e in left
        )
        assert summary.rows_written == summary.rows_read == rows_out
        if left:
            return "left out"
        if writer is JsonlWriter:
            rows = [json.loads(line) for path in out for line in path.read_text().split("\n")[:-1]]
            assert len(rows) == rows_out
            if len(good) == 1:
                [table] = good.values()
                with contextlib.suppress(OverflowError):  # in years that Python lacks
                    kind = pa.struct(table.schema)
                    assert [plain(row, kind) for row in table.to_pylist()] == rows
            return "read"
        rows = pa.concat_tables([pq.read_table(path) for path in out])
        for field in rows.schema:
            wanted = [
                as_type(table[field.name], field.type)
                if field.name in table.schema.names
                else pa.chunked_array([pa.nulls(len(table), field.type)])
                for table in good.values()
            ]
            chunks = [chunk for column in wanted for chunk in column.chunks]
            assert shown(pa.chunked_array(chunks, field.type)) == shown(rows[field.name])
        return "read"


MANY = pytest.param(1_500, marks=[pytest.mark.faults, pytest.mark.timeout(1_200)])


@pytest.mark.parametrize("examples", [30, MANY])
def test_every_row_comes_out_or_is_named(examples):
    @settings(max_examples=examples)
    @given(inputs, options)
    def check_all(files, options):
        check(files, **options)

    check_all()

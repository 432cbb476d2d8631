"""Every type that Parquet can hold comes out of a job with the values that it went in with.

pyarrow and DuckDB read the input and the output, next to a stage that changes nothing and next to a
text classifier.
"""

import datetime as dt
import uuid
from decimal import Decimal

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpuclassify import DomainClassifier, FileReader, ParquetWriter, Pipeline

DAYS = [dt.date(1, 1, 1), dt.date(9999, 12, 31), dt.date(1970, 1, 1), None]
TIMES = [dt.time(0), dt.time(23, 59, 59), dt.time(1, 2, 3), None]
TEXTS, BYTES = ["a", "", "ü\0", None], [b"a", b"", b"\xff", None]
NUMBERS = [1, 2**62 + 1, 1, None]
INTEGERS = [*(pa.int8(), pa.int16(), pa.int32(), pa.int64())]
UNSIGNED = [*(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())]
DECIMALS = [*(pa.decimal32(5, 2), pa.decimal64(12, 2), pa.decimal128(38, 2), pa.decimal256(70, 2))]
ZONES = [None, "UTC", "Europe/Berlin", "+05:30"]
STAMPS = [pa.timestamp(unit, zone) for unit in ("s", "ms", "us", "ns") for zone in ZONES]
VIEW = pa.string_view()


def coded(values, kind, codes):
    return pa.array(values, kind).dictionary_encode().cast(pa.dictionary(codes, kind))


def extended(kind, values):
    return pa.ExtensionArray.from_storage(kind, pa.array(values, kind.storage_type))


IDS = extended(pa.uuid(), [uuid.UUID(int=number).bytes for number in range(3)] + [None])
JSON = extended(pa.json_(), ['{"a": 1}', "null", "[1]", None])
PAGE = pa.struct([("a", pa.large_string()), ("v", VIEW), ("f", pa.float16()), ("d", pa.date32())])
A_DAY = {"f": 0.5, "d": DAYS[0]}
PAGES = [{"a": "x", "v": "y", "f": 0.5, "d": DAYS[0]}, {"a": None}, None, {"v": "z"}]
COLUMNS = [
    *(
        pa.array([-(2 ** (k.bit_width - 1)), 0, 2 ** (k.bit_width - 1) - 1, None], k)
        for k in INTEGERS
    ),
    *(pa.array([0, 1, 2**kind.bit_width - 1, None], kind) for kind in UNSIGNED),
    *(
        pa.array([0.5, -1, float("inf"), None], k)
        for k in (pa.float16(), pa.float32(), pa.float64())
    ),
    pa.array([True, False, True, None]),
    *(pa.array([Decimal("1.25"), Decimal("-3.00"), Decimal("999.99"), None], k) for k in DECIMALS),
    *(pa.array(DAYS, kind) for kind in (pa.date32(), pa.date64())),
    *(
        pa.array(TIMES, k)
        for k in (pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"))
    ),
    *(pa.array([0, 1_700_000_000, -5, None], pa.int64()).cast(kind) for kind in STAMPS),
    *(
        pa.array([0, 17, -5, None], pa.int64()).cast(pa.duration(u))
        for u in ("s", "ms", "us", "ns")
    ),
    *(pa.array(TEXTS, kind) for kind in (pa.string(), pa.large_string(), VIEW)),
    *(pa.array(BYTES, kind) for kind in (pa.binary(), pa.large_binary(), pa.binary_view())),
    pa.array([b"ab", b"cd", b"\0\0", None], pa.binary(2)),
    *(coded(["a", "b", "a", None], pa.string(), codes) for codes in (*INTEGERS, *UNSIGNED)),
    *(coded(["a", "b", "a", None], kind, pa.int32()) for kind in (pa.large_string(), pa.binary())),
    coded(NUMBERS, pa.int64(), pa.int32()),
    coded([0, 5, 0, None], pa.timestamp("us"), pa.int32()),
    coded([Decimal("1.25"), Decimal("2.25"), None, None], pa.decimal128(5, 2), pa.int32()),
    pa.DictionaryArray.from_arrays(pa.array([0, 1, 0, None]), pa.array(["b", "a"]), ordered=True),
    *(
        pa.array([["a"], [None, "b"], [], None], make(pa.string()))
        for make in (pa.list_, pa.large_list)
    ),
    *(
        pa.array([["a"], [None, "b"], [], None], m(VIEW))
        for m in (pa.list_view, pa.large_list_view)
    ),
    pa.array([[["a"]], [None, []], [], None], pa.list_(pa.list_view(pa.string()))),
    pa.array([[1], [2, 3], [], None], pa.list_(pa.field("x", pa.int16(), nullable=False))),
    pa.array([[1, 2], [None, 4], [5, 6], None], pa.list_(pa.float32(), 2)),
    pa.array([["a", "b"], [None, "c"], ["", ""], None], pa.list_(pa.string(), 2)),
    pa.array([[("a", 1)], [], [("b", None)], None], pa.map_(pa.string(), pa.int64())),
    pa.array([[(1, ["a"])], [], [(2, None)], None], pa.map_(pa.int32(), pa.list_(pa.string()))),
    pa.array([[("a", b"x")], [], [("b", None)], None], pa.map_(VIEW, pa.binary_view())),
    pa.array(PAGES, PAGE),
    pa.array([[A_DAY], [], [None], None], pa.list_(pa.struct([*PAGE][2:]))),
    pa.StructArray.from_arrays([coded(["a", "b", "a", None], pa.string(), pa.int8())], ["codes"]),
    pa.nulls(4),
    pa.array([{"a": None}, None, {"a": None}, None], pa.struct([("a", pa.null())])),
    pa.array([[None], [], [None, None], None], pa.list_(pa.null())),
    *(IDS, JSON, extended(pa.json_(pa.large_string()), JSON.storage)),
    extended(pa.bool8(), [0, 1, 1, None]),
    extended(pa.fixed_shape_tensor(pa.float32(), (2,)), [[1, 2], [3, 4], [5, 6], None]),
    extended(pa.opaque(pa.binary(), "name", "vendor"), BYTES),
    pa.StructArray.from_arrays([IDS, JSON], ["id", "json"]),
    pa.ListArray.from_arrays(pa.array([0, 1, 2, 4, 4], pa.int32()), IDS),
]
NAMES = {f"{number} {str(column.type)[:50]}": column for number, column in enumerate(COLUMNS)}


@pytest.fixture(scope="module")
def files(tmp_path_factory, checkpoint):
    """Files with a column of each type: the input, and the output of each stage."""
    folder = tmp_path_factory.mktemp("types")
    columns = [pa.array(["a", "b", "c", "d"]), *NAMES.values()]
    pq.write_table(pa.table(columns, ["text", *NAMES]), folder / "in.parquet")
    stages = {
        "nothing": lambda frame: frame,
        "model": DomainClassifier(model=checkpoint("domain"), autocast=False),
    }
    for name, stage in stages.items():
        reader = FileReader(folder / "in.parquet")
        Pipeline([reader, stage, ParquetWriter(f"{folder}/{name}")]).run()
    return [folder / "in.parquet", *(next(folder.glob(f"{name}/part-*")) for name in stages)]


def plain(value):
    """The value with bytes for UUIDs, as extension types within others become their storage."""
    if isinstance(value, (list, tuple)):
        return [*map(plain, value)]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, str) and len(value) == 36:  # as DuckDB gives UUIDs to Arrow
        value = uuid.UUID(value)
    return value.bytes if isinstance(value, uuid.UUID) else value


def by_pyarrow(path, name):
    return plain(pq.read_table(path, columns=[name])[name].to_pylist())


def by_duckdb(path, name):
    # As Arrow, because Python's values of times with a zone need another library.
    return plain(
        duckdb.sql(f"""select "{name}" from '{path}'""").to_arrow_table()[name].to_pylist()
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("read", [by_pyarrow, by_duckdb])
def test_a_column_comes_out_as_it_went_in(files, name, read):
    wanted, *found = (read(path, name) for path in files)
    assert found == [wanted] * 2
    if isinstance(NAMES[name], pa.ExtensionArray) and NAMES[name].type != JSON.type:
        types = [pq.read_schema(path).field(name).type for path in files]
        assert isinstance(NAMES[name].type, pa.JsonType) or types == [types[0]] * 3

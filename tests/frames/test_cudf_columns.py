"""What cudf says of columns that libcudf makes, without a GPU: their memory is never read."""

import inspect
import io

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

pytestmark = pytest.mark.rapids

ROWS = 3


@pytest.fixture(scope="module")
def cudf():
    import cudf

    return cudf


def fake(type_name, *children, rows=ROWS, is_nullable=False):
    """A libcudf column whose pointers lead nowhere."""
    import pylibcudf as plc

    def memory(size):
        interface = {"shape": (size,), "typestr": "|u1", "strides": None, "version": 3}
        interface["data"] = (4096, False)
        return plc.gpumemoryview(type("Memory", (), {"__cuda_array_interface__": interface})())

    kind = plc.DataType(getattr(plc.TypeId, type_name))
    data = None if type_name in ("LIST", "STRUCT") else memory(64)
    mask = memory(64) if is_nullable else None
    return plc.Column(kind, rows, data, mask, int(is_nullable), 0, list(children))


def column_of(field, **options):
    """The column that libcudf makes of an Arrow array of that field."""
    if pa.types.is_list(field.type):
        offsets, values = fake("INT32", rows=ROWS + 1), fake("FLOAT32", rows=2 * ROWS)
        return fake("LIST", offsets, values, **options)
    if pa.types.is_string(field.type):
        return fake("STRING", fake("INT32", rows=ROWS + 1), **options)
    names = {pa.float32(): "FLOAT32", pa.int64(): "INT64", pa.bool_(): "BOOL8"}
    return fake(names[field.type], **options)


@pytest.mark.parametrize("is_nullable", [True, False])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (pa.string(), pd.StringDtype(na_value=np.nan)),
        (pa.float32(), np.dtype("float32")),
        (pa.int64(), np.dtype("int64")),
        (pa.bool_(), np.dtype("bool")),
        (pa.list_(pa.float32()), None),
    ],
)
def test_columns_have_the_announced_dtypes_with_and_without_nulls(cudf, kind, dtype, is_nullable):
    column = column_of(pa.field("x", kind), is_nullable=is_nullable)
    series = cudf.Series.from_pylibcudf(column, {"name": "x"})
    assert series.dtype == (dtype or cudf.ListDtype("float32"))
    assert len(series) == ROWS
    assert series.name == "x"


def test_a_struct_keeps_the_names_of_its_fields(cudf, monkeypatch):
    """Without the copy, which is what needs a GPU."""
    import pylibcudf

    from gpuclassify.frames import cudf as backend

    kind = pa.struct([("High", pa.float32()), ("a/b c", pa.float32())])
    array = pa.array([{"High": 0.25, "a/b c": 0.75}, None, {"High": 1, "a/b c": 0}], kind)
    numbers = [fake("FLOAT32", is_nullable=True) for _ in kind]

    class Copied(pylibcudf.Column):
        @staticmethod
        def from_arrow(given):
            assert given is array
            return fake("STRUCT", *numbers, is_nullable=True)

    monkeypatch.setattr(pylibcudf, "Column", Copied)
    series = backend._series(array, "scores")

    assert series.dtype == cudf.StructDtype({"High": "float32", "a/b c": "float32"})
    assert len(series) == ROWS


def text_frame(cudf, index):
    column = column_of(pa.field("text", pa.string()))
    series = cudf.Series.from_pylibcudf(column, {"name": "text", "index": index})
    return series.to_frame()


@pytest.fixture
def with_columns(cudf, monkeypatch):
    """The verb without its copies, which are what needs a GPU: arrays are their fields here."""
    from cudf.core.column import ColumnBase

    from gpuclassify.frames import cudf as backend

    monkeypatch.setattr(backend, "_device_column", column_of)
    monkeypatch.setattr(ColumnBase, "copy", lambda column, deep=True: column)
    return backend.with_columns


@pytest.mark.parametrize("name", ["docs", None])
@pytest.mark.parametrize("replaced", ["label", "text"])
def test_columns_are_set_without_looking_at_the_index(cudf, with_columns, name, replaced):
    index = cudf.Index.from_pylibcudf(fake("INT64"), {"name": name})  # reading it would fail
    frame = text_frame(cudf, index)
    schema = pa.schema([(replaced, pa.string()), ("scores", pa.list_(pa.float32()))])

    result = with_columns(frame, {field.name: field for field in schema}, schema, None)

    assert list(result.columns) == list(dict.fromkeys(["text", *schema.names]))
    assert result.scores.dtype == cudf.ListDtype("float32")
    assert result.index is frame.index
    assert (result.index.name, len(result)) == (name, ROWS)
    assert list(frame.columns) == ["text"]


def test_a_text_column_is_known_by_its_dtype(cudf):
    from gpuclassify.frames import backend_of

    frame = text_frame(cudf, cudf.RangeIndex(ROWS))
    backend = backend_of(frame)
    backend.check_text_column(frame, "text")
    assert backend.text_series(frame, "text", None).dtype == frame.text.dtype
    wrong = cudf.Series.from_pylibcudf(fake("INT64"), {"name": "text"}).to_frame()
    with pytest.raises(TypeError, match=r"'text' holds int64, not strings: convert it with df"):
        backend.check_text_column(wrong, "text")


def test_float16_is_refused(cudf):
    from gpuclassify.frames import cudf as backend

    with pytest.raises(TypeError, match="float16, which cudf has no type for"):
        backend.check_new_columns(pa.schema([("vector", pa.list_(pa.float16()))]))


def test_cudf_has_the_calls_that_signatures_and_digests_are_made_with(cudf):
    from cudf.core.accessors.lists import ListMethods

    texts = text_frame(cudf, cudf.RangeIndex(ROWS)).text
    numbers = np.ones(2, np.uint32)
    inspect.signature(texts.str.minhash).bind(0, a=numbers, b=numbers, width=5)
    inspect.signature(texts.hash_values).bind(method="md5")
    assert isinstance(ListMethods.leaves, property)


@pytest.mark.parametrize("made_by", ["cudf", "pandas"])
def test_pandas_reads_files_of_lists_that_were_made_on_either_backend(cudf, monkeypatch, made_by):
    """Lists that come from pandas keep its dtype in cudf, whose name no reader can parse."""
    from cudf.core.column import ColumnBase

    from gpuclassify.jobs.output.encoding import Encoding, arrow_table

    kind, values = pa.list_(pa.float32()), [[0.25, 0.75], None, [1.0, 0.0]]
    column = column_of(pa.field("scores", kind), is_nullable=True)
    series = cudf.Series.from_pylibcudf(column, {"name": "scores"})
    if made_by == "pandas":
        series = series.astype(pd.ArrowDtype(kind))  # the last thing that cudf.from_pandas does
    monkeypatch.setattr(ColumnBase, "to_arrow", lambda column: pa.array(values, kind))

    content = Encoding("parquet", "zstd").encode(arrow_table(series.to_frame()))

    read = pd.read_parquet(io.BytesIO(content))["scores"]
    assert [None if value is None else value.tolist() for value in read] == values
    assert read[0].dtype == np.float32

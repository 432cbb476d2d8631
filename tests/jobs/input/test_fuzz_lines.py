"""JSON lines of any kind: what comes out and what is left out are all lines, or a clear refusal.

Written without the reader's own code: lines are those of `bytes.split`, values those of `json`.
"""

import bz2
import contextlib
import gzip
import json
import lzma
import math
import tempfile
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuclassify import JsonlWriter, ParquetWriter, Pipeline
from gpuclassify.jobs.input.readers import FileReader
from gpuclassify.jobs.stores.store import UnreadableInputError

EMPTY = {"__dummy_field_in_empty_struct": None}  # what Parquet has for {}
BLANK = b" \t\r\n\f\v\xef\xbb\xbf"
KEYS = ["text", "n", "meta", "", "a.b", "größe", "\u2028", "x\x00y"]
# What breaks parsers, and what they read in several ways.
RAW = [
    *(b"", b" ", b"\t\r", b"\x00", b"{", b"}", b"[]", b"null", b'"a"', b"{}", b"  {}  ", b"{}{}"),
    *(b'{"n":1}{"n":2}', b'[{"n":1}]', b'{"n":1,"n":2}', b'{"n":01}', b'{"n":1,}', b"{'n':1}"),
    *(b'{"n":1e400}', b'{"n":-1e-400}', b'{"n":1E5}', b'{"n":-0}', b'{"n":-0.0}', b'{"n":.5}'),
    *(b'{"n":Infinity}', b'{"n":-Infinity}', b'{"n":NaN}', b'{"n":nan}', b'{"n":+1}'),
    *(b'{"n":' + b"9" * 400 + b"}", b'{"n":0.' + b"1" * 400 + b"}"),
    *(b'{"text":"\xff"}', b'{"\xe9":1}', b'{"text":"\\ud800"}', b'{"text":"\\udc00\\ud800"}'),
    *(b'{"text":"\xed\xa0\x80"}', b'{"text":"a\x00b"}', b'{"text":"\\u0000"}', b'{"text":"\x01"}'),
    *(b'{"text":"a\rb"}', b'{"text":"a\tb"}', b'\xef\xbb\xbf{"n":1}', b'{"n":1}\x0c', b'{"n":1} #'),
    *(b'{"meta":{"a":1,"a":2}}', b'{"":{"":[{"":{}}]}}', b'{"n":true}', b'{"n":"1"}', b'{"n":[]}'),
    *(b'{"text":"' + b"x" * 5_000 + b'"}', b'{"meta":' + b"[" * 300 + b"]" * 300 + b"}"),
]
INTEGERS = [0, -1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 2**64, 10**30]
TEXTS = [
    "",
    "2024-01-01",
    "2024-01-01T00:00:00Z",
    "\u2028",
    "\x00",
    "é\U0001f600",
    "NaN",
    "1",
    "\r",
]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(INTEGERS),
    st.integers(-1_000, 1_000),
    st.floats(),
    st.sampled_from(TEXTS),
    st.text(max_size=8),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)
    ),
    max_leaves=6,
)
# Values of one kind, as most columns have them.
KINDS = [
    st.text(max_size=8) | st.sampled_from(TEXTS),
    st.integers(-1_000, 1_000) | st.sampled_from(INTEGERS[:7]),
    st.sampled_from(INTEGERS),
    st.floats(),
    st.floats() | st.integers(-1_000, 1_000) | st.sampled_from(INTEGERS),
    st.booleans(),
    st.none(),
    st.just({}),
    st.just({}) | st.fixed_dictionaries({}, optional={"a": st.integers(0, 9), "b": st.just({})}),
    st.lists(st.integers(-5, 5), max_size=3),
    st.lists(st.just({}), max_size=2),
    st.fixed_dictionaries({}, optional={"a": scalars, "": st.lists(scalars, max_size=2)}),
]


MIXTURES = [
    ["row"],
    ["row"],
    ["anything"],
    ["row"] * 30 + ["raw"],
    ["row"] * 3 + ["anything", "raw"],
]


@st.composite
def lines(draw):
    """Lines without their ends: objects whose columns have a kind each, and some of anything."""
    kinds = draw(st.dictionaries(st.sampled_from(KEYS), st.sampled_from(KINDS), max_size=4))
    row = st.fixed_dictionaries({}, optional=kinds)
    anything = st.dictionaries(st.sampled_from(KEYS), values, max_size=3)
    kind = st.sampled_from(draw(st.sampled_from(MIXTURES)))

    def line(of):
        if of == "raw":
            return draw(st.sampled_from(RAW))
        record = draw(row if of == "row" else anything)
        is_ascii = of == "anything" or draw(st.booleans())
        separators = draw(st.sampled_from([(",", ":"), (", ", ": ")]))
        text = json.dumps(record, ensure_ascii=is_ascii, separators=separators)
        return text.encode("utf-8", "surrogatepass")

    return [line(draw(kind)) for _ in range(draw(st.integers(0, 12)))]


@st.composite
def contents(draw):
    """The bytes of a file before it is compressed."""
    end = draw(st.sampled_from([b"\n"] * 6 + [b"\r\n", b"\r\n", b"\n\n", b"\r"]))
    content = end.join(draw(lines())) + draw(st.sampled_from([end, end, b"", b"\n \n"]))
    # Many lines, so that some are beyond the samples.
    content = content * draw(st.sampled_from([1, 1, 1, 20])) + end.join(draw(lines()))
    kind = draw(st.sampled_from(["utf-8"] * 15 + ["utf-8-sig", "utf-16", "latin-1"]))
    with contextlib.suppress(UnicodeError):
        return content.decode().encode(kind)
    return content


def gz_members(content):
    half = len(content) // 2
    return gzip.compress(content[:half]) + gzip.compress(content[half:])


def zst(content):
    return pa.compress(content, "zstd", asbytes=True)


def before_cut(path, packed):
    """The whole lines of what zlib makes of a file that is cut off; blocks of zstd are larger."""
    try:
        content = zlib.decompressobj(31).decompress(packed) if path.endswith(".gz") else b""
    except zlib.error:
        content = b""
    return content[: content.rfind(b"\n") + 1]


PACKED = [
    *[("", bytes)] * 10,
    *[(".gz", gzip.compress), (".gz", gz_members), (".bz2", bz2.compress), (".zst", zst)] * 2,
    (".xz", lzma.compress),
    (".lz4", lambda content: pa.compress(content, "lz4", asbytes=True)),
    (".lz4", lambda content: pa.compress(content, "lz4_raw", asbytes=True)),
    (".gz", lambda content: gzip.compress(content)[:-9]),
    (".zst", lambda content: zst(content)[:-1]),
    (".gz", bytes),
]
FOLDERS = [*[""] * 20, *["lang=de/"] * 5, *["lang=en/"] * 5, "n=1/", "n=1/", "k=%FF/"]
inputs = st.lists(
    st.tuples(st.sampled_from(FOLDERS), contents(), st.sampled_from(PACKED)), min_size=1, max_size=3
)
options = st.fixed_dictionaries(
    {
        "writer": st.sampled_from([ParquetWriter, JsonlWriter]),
        "on_error": st.sampled_from(["raise", "quarantine", "quarantine"]),
        "fields": st.sampled_from([None] * 7 + [["text"], ["meta", "n"]]),
        "part_bytes": st.sampled_from([None, 50, 400]),
        "samples": st.sampled_from([(30, 512 << 10), (1, 60), (3, 100)]),
    }
)


def offsets_of(content):
    """Where lines that hold something begin."""
    offsets, at = [], 0
    for line in content.split(b"\n"):
        if line.strip(BLANK):
            offsets.append(at)
        at += len(line) + 1
    return offsets


def rows_of(folder):
    rows = []
    for path in sorted(folder.glob("part-*")):
        if path.suffix == ".parquet":
            rows += pq.read_table(path).to_pylist()
        else:
            rows += map(json.loads, path.read_text().split("\n")[:-1])
    return rows


def agrees(wanted, got):
    """Whether a value that came out is that of the line, as far as its column can hold it."""
    if got == EMPTY:
        got = {}
    if wanted is None or got is None:
        lost = isinstance(wanted, float) and not math.isfinite(wanted)
        return (wanted is None or lost) and (got is None or got != got)
    if isinstance(wanted, dict):
        if not isinstance(got, dict):
            return False
        return all(agrees(wanted.get(key), got.get(key)) for key in {*wanted, *got})
    if isinstance(wanted, list):
        return isinstance(got, list) and len(wanted) == len(got) and all(map(agrees, wanted, got))
    if isinstance(wanted, (bool, str)):
        return type(got) is type(wanted) and got == wanted
    if isinstance(got, float):
        return float(str(wanted)) == got or (wanted != wanted and got != got)
    return type(got) is int and type(wanted) is int and got == wanted


# One of them is in every refusal.
CURES = (
    *("fields=", "on_error=", "rename", "wanted names", "no column"),
    *("neither rows nor columns", "nothing of the input"),
)


def check(files, writer, on_error, fields, part_bytes, samples):
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        held = {}
        for number, (folder, content, (suffix, pack)) in enumerate(files):
            path = root / "in" / folder / f"{number}.jsonl{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pack(content))
            held[str(path)] = (folder, content)
        reader = FileReader(root / "in", fields=fields, part_bytes=part_bytes)
        vars(reader).update(samples=samples[0], sample_bytes=samples[1])
        job = Pipeline([reader, lambda frame: frame, writer(f"{root}/out")], on_error=on_error)
        try:
            summary = job.run(report=lambda *_: None)
        except UnreadableInputError as err:
            assert any(words in str(err) for words in CURES), err
            return "refused"
        rows = rows_of(root / "out")
        assert len(rows) == summary.rows_written == summary.rows_read
        left = [
            json.loads(line)
            for path in (root / "out" / "_quarantine").glob("*")
            for line in path.read_bytes().splitlines()
        ]
        assert {"line": 0, "file": 0} | summary.left_out == {
            kind: sum(each["kind"] == kind for each in left) for kind in ("line", "file")
        }
        broken = {
            each["source"].partition(", from byte")[0] for each in left if each["kind"] == "file"
        }
        wanted = []
        for path in sorted(held):
            folder, content = held[path]
            if path in broken:
                content = before_cut(path, Path(path).read_bytes())
            bad = [each["offset"] for each in left if each["source"] == path and "offset" in each]
            offsets = offsets_of(content)
            assert len({*bad}) == len(bad) and {*bad} <= {*offsets}
            for offset in {*offsets} - {*bad}:
                end = content.find(b"\n", offset)
                line = content[offset : end if end >= 0 else None]
                wanted.append((path, offset, folder, line.strip(BLANK)))
        wanted.sort(key=lambda each: each[:2])
        assert len(wanted) == len(rows)
        everything = b"".join(content for _, content in held.values())
        for (_, _, folder, line), row in zip(wanted, rows, strict=True):
            record = json.loads(line.decode(errors="replace"), strict=False)
            key, _, value = folder.rstrip("/").partition("=")
            if folder and key in row and record.get(key) is None:
                given = str(row[key]) == value
                assert given or (row[key] is None and key.encode() in everything), (row, folder)
                record[key] = row[key]
            if fields is not None:
                record = {name: record.get(name) for name in fields}
            assert agrees(record, row), (line, row)
        return "read"


MANY = pytest.param(1_500, marks=[pytest.mark.faults, pytest.mark.timeout(1_200)])


@pytest.mark.parametrize("examples", [30, MANY])
def test_every_line_comes_out_or_is_named(examples):
    @settings(max_examples=examples)
    @given(inputs, options)
    def check_all(files, options):
        check(files, **options)

    check_all()

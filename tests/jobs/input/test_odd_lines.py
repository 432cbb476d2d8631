"""Lines that are too long or hold half of a pair, files that are cut off, and names of files."""

import bz2
import gzip
import json
import lzma
import subprocess
import sys
import zlib

import pyarrow as pa
import pytest

from gpuclassify import FileReader, JsonlReader, JsonlWriter, Pipeline
from gpuclassify.jobs.input.readers import first_rows, read_files
from gpuclassify.jobs.stores.store import UnreadableInputError


def run(reader, folder, restart=False, **options):
    job = Pipeline([reader, lambda frame: frame, JsonlWriter(f"{folder}/out")], **options)
    return job.run(restart=restart)


def rows_of(folder):
    paths = sorted((folder / "out").glob("part-*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def problems_of(folder):
    paths = sorted((folder / "out" / "_quarantine").glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


# Half of a surrogate pair.

HALVES = {
    r"\ud83d": "\ufffd",
    r"\uDE00": "\ufffd",
    r"\ud83dx\uDE00": "\ufffdx\ufffd",
    r"\ude00\ud83d": "\ufffd\ufffd",
    r"\ud83d\ud83d\ude00": "\ufffd\U0001f600",
    r"\\\ud83d\n\u00e9": "\\\ufffd\n\u00e9",
}
WHOLE = {
    r"\ud83d\ude00": "\U0001f600",
    r"\\ud83d": r"\ud83d",
    r"\\\\ude00 \u4e2d": "\\\\ude00 \u4e2d",
}


@pytest.fixture(params=HALVES)
def halves(request, tmp_path):
    lines = [
        f'{{"text": "{text}", "n": {number}, "meta": {{"a": ["b{half}"]}}, "{key}": 0}}\n'
        for half in [request.param]
        for number, (text, key) in enumerate([("a", "k"), *((whole, "k") for whole in WHOLE)])
    ]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    return HALVES[request.param]


TEXTS = ["a", *WHOLE.values()]


def test_half_of_a_pair_in_a_column_that_is_not_read_stops_nothing(tmp_path, halves):
    reader = JsonlReader(tmp_path / "a.jsonl", fields=["text", "n"])
    assert run(reader, tmp_path).left_out == {}
    assert [row["text"] for row in rows_of(tmp_path)] == TEXTS
    assert read_files(tmp_path / "a.jsonl", fields=["n"]).compute()["n"].tolist() == [*range(4)]


def test_half_of_a_pair_is_refused_left_out_or_replaced(tmp_path, halves):
    told = r"line 1, .*half of a surrogate pair.*surrogates=\"replace\".*fields=.*quarantine"
    with pytest.raises(UnreadableInputError, match=told):
        run(JsonlReader(tmp_path / "a.jsonl"), tmp_path)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"text": "z", "n": 9, "meta": {"a": []}, "k": 1}\n')
    assert run(JsonlReader(tmp_path / "a.jsonl"), tmp_path, on_error="quarantine").left_out == {
        "line": 4
    }
    assert [row["text"] for row in rows_of(tmp_path)] == ["z"]
    assert all("half of a surrogate" in each["reason"] for each in problems_of(tmp_path))
    reader = JsonlReader(tmp_path / "a.jsonl", surrogates="replace")
    assert run(reader, tmp_path, restart=True).left_out == {}
    rows = rows_of(tmp_path)
    assert [row["text"] for row in rows] == [*TEXTS, "z"]
    assert [row["meta"]["a"] for row in rows] == [[f"b{halves}"]] * 4 + [[]]


def test_half_of_a_pair_may_be_in_a_name_and_in_json(tmp_path):
    line = r'{"text": "a", "\ud83d": 1, "meta": "\ud83d"}'
    (tmp_path / "a.jsonl").write_text(f"{line}\n")
    assert len(read_files(tmp_path / "a.jsonl", fields="text").compute()) == 1
    reader = JsonlReader(tmp_path / "a.jsonl", fields=["text", "meta"], types={"meta": "json"})
    run(reader, tmp_path)
    [path] = (tmp_path / "out").glob("part-*")
    assert path.read_text() == '{"text": "a", "meta": "\\ud83d"}\n'


def test_what_is_done_with_halves_is_one_of_two(tmp_path):
    with pytest.raises(ValueError, match="surrogates"):
        JsonlReader(tmp_path, surrogates="drop")
    with pytest.raises(ValueError, match="max_line_bytes"):
        JsonlReader(tmp_path, max_line_bytes=0)


# Lines that are too long.


def write_long(path, lengths, pack):
    lines = [json.dumps({"n": n, "text": "x" * length}) for n, length in enumerate(lengths)]
    content = "\n".join(lines).encode()
    path.write_bytes(pack(content))
    offsets = [sum(len(line) + 1 for line in lines[:n]) for n in range(len(lines))]
    return {
        n: offsets[n] for n, line in enumerate(lines) if len(line) + (n < len(lines) - 1) > MOST
    }


MOST = 3_000
LENGTHS = {
    "between": [5, 9_000, 7, 2_900, 40_000, 3],
    "first and last": [100_000, 5, 6, 50_000],
    "all": [4_000, 700_000],
    "none": [5, 2_960, 6],
    "at the bound": [MOST - 24, MOST - 23, MOST - 22, 5],
}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("part_bytes", [None, 1_000, 10_000])
def test_a_line_that_is_too_long_is_left_out_by_its_number(tmp_path, lengths, name, part_bytes):
    packs = {"a.jsonl": bytes, "a.jsonl.gz": gzip.compress}
    pack = packs.get(name, lambda content: pa.compress(content, "zstd", asbytes=True))
    long = write_long(tmp_path / name, LENGTHS[lengths], pack)
    options = {"max_line_bytes": MOST, "part_bytes": part_bytes}
    reader = JsonlReader(tmp_path / name, types={"n": "int64", "text": "string"}, **options)
    if long:
        with pytest.raises(UnreadableInputError, match=r"line \d+, .*more than 3,000 bytes \(max_"):
            run(reader, tmp_path)
    summary = run(reader, tmp_path, on_error="quarantine")
    assert [row["n"] for row in rows_of(tmp_path)] == [
        n for n in range(len(LENGTHS[lengths])) if n not in long
    ]
    found = problems_of(tmp_path)
    assert summary.left_out == ({"line": len(long)} if long else {})
    assert {each["offset"] for each in found} == {*long.values()}
    assert {each["reason"].partition(":")[0] for each in found} == {f"line {n + 1}" for n in long}


def test_bad_lines_behind_one_that_is_too_long_have_their_place(tmp_path):
    content = b'{"n": 1}\n{"n": "' + b"x" * 500_000 + b'"}\n{"n": 2}\n{broken\n{"n": 3}\n'
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    run(JsonlReader(tmp_path / "a.jsonl.gz", max_line_bytes=MOST), tmp_path, on_error="quarantine")
    assert [each["offset"] for each in problems_of(tmp_path)] == [9, content.index(b"{broken")]
    assert [row["n"] for row in rows_of(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl"])
def test_a_line_that_is_far_too_long_takes_no_memory(tmp_path, name):
    size = 1 << 28
    if name == "a.jsonl":  # whose middle is a hole
        with (tmp_path / name).open("wb") as file:
            file.write(b'{"n": 1}\n')
            file.seek(size)
            file.write(b'"}\n{"n": 2}\n')
    else:
        packer = zlib.compressobj(1, wbits=31)
        with (tmp_path / name).open("wb") as file:
            file.write(packer.compress(b'{"n": 1}\n{"n": "'))
            for _ in range(size >> 24):
                file.write(packer.compress(bytes(1 << 24)))
            file.write(packer.compress(b'"}\n{"n": 2}\n') + packer.flush())
    (tmp_path / "small.jsonl").write_bytes(b'{"n": 1}\n')
    script = (
        "import re; from gpuclassify import *\n"
        # Of this program: the system counts what its parent had in ru_maxrss.
        r"peak = lambda: int(re.search(r'VmHWM:\s+(\d+)', open('/proc/self/status').read())[1])"
        "\ndef run(name, out):\n"
        "    reader = JsonlReader(name, max_line_bytes=8 << 20)\n"
        "    Pipeline([reader, JsonlWriter(out)], on_error='quarantine').run()\n"
        "run('small.jsonl', 'small'); before = peak()\n"
        f"run('{name}', 'out'); print(peak() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert int(done.stdout.split()[-1]) < 150 << 10  # KiB
    assert [row["n"] for row in rows_of(tmp_path)] == [1, 2]
    [problem] = problems_of(tmp_path)
    assert problem["offset"] == 9
    assert problem["reason"].startswith("line 2: the line has more than 8,388,608 bytes")


# Files that are cut off.

RECORDS = [{"id": n, "text": zlib.crc32(b"%d" % n).to_bytes(4, "big").hex()} for n in range(9_000)]
CONTENT = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()


def arrow(codec):
    return lambda content: pa.compress(content, codec, asbytes=True)


PACKS = {
    ".gz": gzip.compress,
    ".bz2": lambda content: bz2.compress(content, 1),
    ".zst": arrow("zstd"),
    ".xz": lzma.compress,
    ".lz4": arrow("lz4"),
}
WITHIN = {
    ".gz": lambda: zlib.decompressobj(31),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
}


@pytest.mark.parametrize("suffix", PACKS)
@pytest.mark.parametrize("at", [0.5, 0.99])
def test_the_lines_before_a_cut_are_kept(tmp_path, suffix, at):
    packed = PACKS[suffix](CONTENT)
    cut = packed[: int(at * len(packed))]
    (tmp_path / "in").mkdir()
    (tmp_path / f"in/b.jsonl{suffix}").write_bytes(cut)
    (tmp_path / "in/a.jsonl").write_bytes(CONTENT[: CONTENT.index(b"\n") + 1])
    reader = JsonlReader(tmp_path / "in")
    with pytest.raises(UnreadableInputError, match=rf"b\.jsonl{suffix} cannot be read: .*cut off"):
        run(reader, tmp_path)
    assert run(reader, tmp_path, on_error="quarantine").left_out == {"file": 1}
    found = [row["id"] for row in rows_of(tmp_path)][1:]
    if suffix in WITHIN:
        within = WITHIN[suffix]().decompress(cut)
        wanted = within.count(b"\n")
    else:  # whole blocks, of 128 KiB and 64 KiB of its content
        wanted = len(found)
        assert wanted > at * len(RECORDS) - 128 * 1024 / 36
    assert found == [*range(wanted)]
    assert 0 < wanted < len(RECORDS) or suffix == ".gz"
    [problem] = problems_of(tmp_path)
    assert (problem["kind"], problem["source"]) == ("file", str(tmp_path / f"in/b.jsonl{suffix}"))
    with pytest.raises(UnreadableInputError, match="cut off"):
        first_rows(FileReader([str(tmp_path / f"in/b.jsonl{suffix}")]), 100_000)


# Names of files.


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("a.jsonl.zstd", arrow("zstd")),
        ("a.jsonl.xz", lzma.compress),
        ("a.jsonl.gzip", gzip.compress),
        ("a.jsonl.lz4", arrow("lz4")),
        ("a.jsonlines", bytes),
        ("a.ndjson", bytes),
        ("A.JSONL", bytes),
        ("A.JSON.GZ", gzip.compress),
        ("a.jsonlines.XZ", lzma.compress),
        ("a.json.xz", lambda content: lzma.compress(content[:9]) + lzma.compress(content[9:])),
    ],
)
def test_files_of_lines_are_known_by_many_names(tmp_path, name, pack):
    (tmp_path / name).write_bytes(pack(CONTENT))
    for inputs in (tmp_path, tmp_path / name):
        assert read_files(inputs).compute()["id"].tolist() == [*range(len(RECORDS))]


@pytest.mark.parametrize("name", ["a.parq", "A.PARQUET", "a.Pq"])
def test_files_of_parquet_are_known_by_many_names(tmp_path, name):
    (tmp_path / "a.jsonl").write_bytes(CONTENT)
    (tmp_path / "in").mkdir()
    read_files(tmp_path / "a.jsonl").compute().to_parquet(tmp_path / "in" / name)
    assert len(read_files(tmp_path / "in").compute()) == len(RECORDS)


def test_a_window_that_is_too_large_is_refused_with_its_cure(tmp_path):
    # A frame of zstd whose header asks for a window of 2^31 bytes, and with a block that is empty.
    (tmp_path / "a.jsonl.zst").write_bytes(bytes.fromhex("28b52ffd00a8010000"))
    with pytest.raises(UnreadableInputError, match=r"window above 2\^27 .*zstd -dc --long=31"):
        FileReader(tmp_path).find_parts()

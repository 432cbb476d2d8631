"""Broken files, lines and rows: errors with position, or descriptions in quarantine."""

import contextlib
import gzip
import hashlib
import json
import os
import shutil
import socket
import sys
import time
from pathlib import Path

import dask
import dask.dataframe as dd
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distributed import Client

from gpuclassify import DomainClassifier
from gpuclassify.cluster import get_client
from gpuclassify.jobs.input import parts
from gpuclassify.jobs.input.readers import (
    FileReader,
    JsonlReader,
    ParquetReader,
    first_rows,
    read_files,
)
from gpuclassify.jobs.output.writers import JsonlWriter, ParquetWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.stores.opening import open_store
from gpuclassify.jobs.stores.store import UnreadableInputError

pytestmark = pytest.mark.usefixtures("one_torch_thread")

GOOD = [json.dumps({"id": i, "text": f"text {i}"}).encode() for i in range(60)]
NESTED = b'{"id": 1, "text": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
BAD = {
    "cut": b'{"id": 1, "text": "no end',
    "no JSON": b"text: 5",
    "a null": b"null",
    "an array": b'["a", 1]',
    "two objects": b'{"id": 1} {"id": 2}',
    "a lone surrogate": b'{"id": 1, "text": "a\\ud800b"}',
    "no UTF-8": b'{"id": 1, "text": "\xff"}',
    "a name in no UTF-8": b'{"id": 1, "t\xffxt": "a"}',
    "a number for a text": b'{"id": 1, "text": 5}',
    "a text for a number": b'{"id": "one", "text": "a"}',
    "an integer above 64 bits": b'{"id": 18446744073709551616, "text": "a"}',
    "a number above double": b'{"id": 1e400, "text": "a"}',
    "nesting that overflows the parser": NESTED,
    "zeros": b"\x00\x00\x00",
    "lists too deep for a column": b'{"id": 1, "deep": ' + b"[" * 50 + b"]" * 50 + b"}",
    "lists too deep for pickle": b'{"id": 1, "deep": ' + b"[" * 300 + b"]" * 300 + b"}",
    "lists too deep for Python": b'{"id": 1, "deep": ' + b"[" * 998 + b"]" * 998 + b"}",
    "objects too deep for a column": b'{"deep": ' * 100 + b"1" + b"}" * 100,
    "objects too deep for pickle": b'{"deep": ' * 300 + b"1" + b"}" * 300,
    "objects too deep for Python": b'{"deep": ' * 999 + b"1" + b"}" * 999,
}


class OneSample(JsonlReader):
    """Takes its columns from a few lines."""

    samples, sample_bytes = 1, 400


def same(frame):
    return frame


def run(folder, reader, stage=same, **options):
    writer = ParquetWriter(f"{folder}/out")
    return Pipeline([reader, stage, writer], on_error="quarantine", **options).run()


def rows(folder):
    return pd.concat(map(pd.read_parquet, sorted((folder / "out").glob("*.parquet"))))


def problems(folder):
    found = sorted((folder / "out" / "_quarantine").glob("*.jsonl"))
    return [json.loads(line) for path in found for line in path.read_text().splitlines()]


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        (tmp_path / "in").mkdir(exist_ok=True)
        path = tmp_path / "in" / name
        path.write_bytes(content)
        return path

    return write


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_line_stops_a_job_or_is_left_out_with_its_place(write, tmp_path, kind):
    contents = {}
    for at in (0, 30, 60):  # the first, amidst and the last
        content = b"\n".join([*GOOD[:at], BAD[kind], *GOOD[at:]])
        contents[str(write(f"{at}.jsonl", content))] = content
    reader = JsonlReader(f"{tmp_path}/in", part_bytes=len(content) // 4)
    message = r"\.jsonl, line \d+, from byte \d+ cannot be read.*on_error=\"quarantine\""
    with pytest.raises(UnreadableInputError, match=message) as caught:
        Pipeline([reader, same, JsonlWriter(f"{tmp_path}/no")]).run()
    (named,) = [path for path in contents if path in str(caught.value)]
    assert f"from byte {contents[named].index(BAD[kind])} " in str(caught.value)
    summary = run(tmp_path, reader)
    assert rows(tmp_path)["id"].tolist() == [*range(60)] * 3
    found = problems(tmp_path)
    assert [(problem["kind"], problem["source"]) for problem in found] == [
        ("line", path) for path in contents
    ]
    for problem in found:
        assert problem["offset"] == contents[problem["source"]].index(BAD[kind])
        assert problem["reason"]
        shown = BAD[kind].decode("utf-8", "backslashreplace")
        assert shown.startswith(problem["content"][:10_000])
    assert summary.left_out == {"line": 3}
    assert (summary.rows_read, summary.rows_written) == (180, 180)
    written = read_files(sorted(map(str, (tmp_path / "out/_quarantine").iterdir()))).compute()
    assert written.columns.tolist() == ["kind", "source", "reason", "offset", "content"]
    assert len(written) == 3


@pytest.mark.parametrize(("begin", "end", "depth"), [(b"[", b"]", 49), (b'{"a":', b"}", 98)])
def test_a_column_may_be_as_deep_as_readers_of_parquet_bear(write, tmp_path, begin, end, depth):
    line = b'{"id": 60, "text": "deep", "deep": ' + begin * depth + b"7" + end * depth + b"}"
    write("a.jsonl", b"\n".join([*GOOD, line]))
    for writer in (ParquetWriter(f"{tmp_path}/rows"), JsonlWriter(f"{tmp_path}/lines")):
        with Client(n_workers=1, processes=False, dashboard_address=None) as client:
            Pipeline([JsonlReader(f"{tmp_path}/in"), same, writer]).run(client)
    [part] = (tmp_path / "rows").glob("*.parquet")
    [lines] = (tmp_path / "lines").glob("*.jsonl")
    assert pq.read_table(part).to_pylist()[60] == json.loads(line)
    assert json.loads(lines.read_bytes().splitlines()[60]) == json.loads(line)


@pytest.mark.parametrize("zeros", [1, 511, 100_000])
def test_zeros_behind_gzip_are_none_of_it(write, tmp_path, zeros):
    """As in `gzip -d`, because tapes and `dd` fill blocks with zeros."""
    content = gzip.compress(b"\n".join(GOOD[:30]) + b"\n") + b"\0" * zeros
    path = write("a.jsonl.gz", content + gzip.compress(b"\n".join(GOOD[30:])) + b"\0" * zeros)
    assert gzip.decompress(path.read_bytes()) == b"\n".join(GOOD)
    assert run(tmp_path, JsonlReader(f"{tmp_path}/in")).left_out == {}
    assert rows(tmp_path)["id"].tolist() == list(range(60))


def test_a_compressed_file_that_is_large_within_is_told(write, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(parts, "LARGE_BYTES", 1_000)
    write("small.jsonl.gz", gzip.compress(GOOD[0]))
    write("large.jsonl.gz", gzip.compress(b"\n".join(GOOD)))
    assert run(tmp_path, JsonlReader(f"{tmp_path}/in")).rows_written == 61
    assert "large.jsonl.gz holds more than" in caplog.text
    assert "small.jsonl.gz" not in caplog.text


@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(b"\n".join(GOOD), mtime=0) + b"tail"],
    ids=["another format", "followed by something"],
)
@pytest.mark.parametrize("name", ["0.jsonl.gz", "z.jsonl.gz"])
def test_a_broken_file_is_left_out_whole(write, tmp_path, name, content):
    path = write(name, content)
    write("a.jsonl.gz", gzip.compress(b"\n".join(GOOD)))
    summary = run(tmp_path, OneSample(f"{tmp_path}/in"))
    assert rows(tmp_path)["id"].tolist() == list(range(60))
    assert [(p["kind"], p["source"]) for p in problems(tmp_path)] == [("file", str(path))]
    assert summary.left_out == {"file": 1}


def test_parquet_files_that_are_broken_or_do_not_fit_are_left_out(tmp_path):
    (tmp_path / "in").mkdir()
    table = pa.table({"text": ["a"] * 1_000, "id": range(1_000)})
    for name in "abc":
        pq.write_table(table, tmp_path / f"in/{name}.parquet", row_group_size=100)
    (tmp_path / "in/no.parquet").write_bytes(b"not parquet")
    (tmp_path / "in/empty.parquet").write_bytes(b"")
    pq.write_table(pa.table({"text": [[1]], "id": [1]}), tmp_path / "in/other.parquet")
    damaged = bytearray((tmp_path / "in/b.parquet").read_bytes())
    damaged[4:200] = b"\xff" * 196  # the first row group
    (tmp_path / "in/b.parquet").write_bytes(damaged)
    with pytest.raises(UnreadableInputError, match=r"empty\.parquet cannot be read"):
        ParquetReader(f"{tmp_path}/in").find_parts()
    summary = run(tmp_path, ParquetReader(f"{tmp_path}/in", part_bytes=1))
    assert summary.left_out == {"file": 4}
    assert len(rows(tmp_path)) == 2_900
    reasons = {p["source"].removeprefix(f"{tmp_path}/in/"): p["reason"] for p in problems(tmp_path)}
    assert "b.parquet, row groups 0 to 0" in reasons
    assert all(reason == " ".join(reason.split()) for reason in reasons.values())
    assert "text is list" in reasons["other.parquet"]


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_bit_that_flips_in_a_page_with_a_checksum_is_noticed(tmp_path, compression):
    texts = [
        f"text {number} " + hashlib.sha256(b"%d" % number).hexdigest() for number in range(900)
    ]
    (tmp_path / "in").mkdir()
    path = tmp_path / "in/a.parquet"
    pq.write_table(
        pa.table({"text": texts, "id": range(900)}),
        path,
        row_group_size=300,
        compression=compression,
        use_dictionary=False,
        write_page_checksum=True,
    )
    content = bytearray(path.read_bytes())
    column = pq.read_metadata(path).row_group(1).column(0)
    content[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(content)
    reader = ParquetReader(f"{tmp_path}/in", part_bytes=1)
    message = r"a\.parquet, row groups 1 to 1 cannot be read: .*checksum.*bring the file again"
    with pytest.raises(UnreadableInputError, match=message):
        Pipeline([reader, same, ParquetWriter(f"{tmp_path}/no")]).run()
    with pytest.raises(UnreadableInputError, match=r"a\.parquet.*checksum"):
        first_rows(FileReader([f"{tmp_path}/in"]), 400)
    assert run(tmp_path, reader).left_out == {"file": 1}
    assert rows(tmp_path)["text"].tolist() == texts[:300] + texts[600:]


@pytest.fixture
def odd_files(write, tmp_path):
    """Names that are no regular files, with the reason in their error messages."""
    write("a.jsonl", b"\n".join(GOOD))
    inside = tmp_path / "in"
    os.mkfifo(inside / "fifo.jsonl")
    (tmp_path / "folder").mkdir()
    (inside / "folder.jsonl").symlink_to(tmp_path / "folder")
    (inside / "gone.jsonl").symlink_to("nowhere.jsonl")
    (inside / "loop.jsonl").symlink_to("loop.jsonl")
    (inside / "through.jsonl").symlink_to("fifo.jsonl")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(inside / "s.jsonl"))
        yield {
            "fifo": "a FIFO, not a regular file",
            "folder": "a directory, not a regular file",
            "gone": "a link to nowhere.jsonl, which leads to no file",
            "loop": "a link to loop.jsonl, which leads to no file",
            "s": "a socket, not a regular file",
            "through": "a FIFO, not a regular file",
        }


@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_what_is_no_file_is_named_and_hangs_nothing(odd_files, tmp_path, kind, scheme):
    if kind == "parquet":
        for path in (tmp_path / "in").iterdir():
            path.rename(path.with_suffix(".parquet"))
        pd.DataFrame({"id": range(60), "text": "a"}).to_parquet(tmp_path / "in/a.parquet")
        links = {name: kind for name, kind in odd_files.items() if name not in ("loop", "through")}
    else:
        links = odd_files
    reader = FileReader(f"{scheme}{tmp_path}/in")
    with pytest.raises(UnreadableInputError, match=rf"fifo\.{kind} cannot be read: it is a FIFO"):
        reader.find_parts()
    with pytest.raises(UnreadableInputError, match=rf"fifo\.{kind} cannot be read: it is a FIFO"):
        first_rows(FileReader([f"{scheme}{tmp_path}/in"]), 100)
    with pytest.raises(UnreadableInputError, match=r"gone.*a link to nowhere.*leads to no file"):
        FileReader(f"{tmp_path}/in/gone.{kind}").find_parts()
    assert run(tmp_path, reader).left_out == {"file": len(odd_files)}
    assert rows(tmp_path)["id"].tolist() == list(range(60))
    reasons = {Path(problem["source"]).stem: problem["reason"] for problem in problems(tmp_path)}
    assert reasons.keys() == odd_files.keys()
    assert all(what in reasons[name] for name, what in links.items())


def test_rows_of_parquet_that_are_no_utf8_are_left_out(tmp_path):
    (tmp_path / "in").mkdir()
    texts = pa.array([b"a", b"\xff", b"c", b"\xfe"]).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"text": texts, "id": range(4)}), tmp_path / "in/a.parquet")
    with pytest.raises(UnreadableInputError, match=r"a\.parquet, row groups 0 to 0, row 1 cannot"):
        Pipeline([FileReader(f"{tmp_path}/in"), ParquetWriter(f"{tmp_path}/no")]).run()
    run(tmp_path, FileReader(f"{tmp_path}/in"))
    assert rows(tmp_path)["id"].tolist() == [0, 2]
    assert [(p["kind"], p["row"]) for p in problems(tmp_path)] == [("row", 1), ("row", 3)]


def test_integers_up_to_64_bits_keep_all_their_digits(write, tmp_path):
    values = [2**64 - 1, 2**63, 5, None]
    lines = [json.dumps({"hash": v, "in": {"h": v}, "list": [v], "text": "a"}) for v in values]
    write("a.jsonl", "\n".join(lines).encode())
    reader = JsonlReader(f"{tmp_path}/in")
    Pipeline([reader, same, JsonlWriter(f"{tmp_path}/out")]).run()
    [part] = (tmp_path / "out").glob("*.jsonl")
    assert [json.loads(line) for line in part.read_text().splitlines()] == [
        json.loads(line) for line in lines
    ]


def test_a_row_that_cannot_be_scored_is_left_out_with_its_reason(write, tmp_path, checkpoint):
    class Broken(DomainClassifier):
        """A model that gives no number for one text."""

        def activate(self, outputs):
            return outputs

        def compute(self, texts, name_row):
            from gpuclassify.mapping.runners import NonFiniteOutputError

            if "text 7" in texts:
                raise NonFiniteOutputError(f"NaN for {name_row(texts.index('text 7'))}")
            return super().compute(texts, name_row)

    write("a.jsonl", b"\n".join(GOOD))
    classifier = Broken(model=checkpoint("domain"), autocast=False)
    summary = run(tmp_path, JsonlReader(f"{tmp_path}/in"), classifier)
    assert rows(tmp_path)["id"].tolist() == [i for i in range(60) if i != 7]
    [problem] = problems(tmp_path)
    assert (problem["kind"], problem["row"]) == ("row", 7)
    assert "NaN for row" in problem["reason"]
    assert json.loads(problem["content"]) == {"id": 7, "text": "text 7"}
    assert (summary.rows_read, summary.rows_written, summary.left_out) == (60, 59, {"row": 1})


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("parquet", "in/a.parquet, row groups 1 to 1"),
        ("jsonl", "in/a.jsonl, from byte 0"),
        ("joined", "in/b.parquet, row groups 0 to 0"),
        ("frame", "partition 1"),
    ],
)
def test_the_place_of_a_row_is_spelled_as_that_of_a_file(tmp_path, kind, place):
    null = "__HIVE_DEFAULT_PARTITION__"
    frame = pd.DataFrame({"text": ["a", "b"], "k": ["x", null]})
    folder = tmp_path / "in"
    folder.mkdir()
    if kind == "frame":
        source = dd.from_pandas(frame, npartitions=2)
    elif kind == "jsonl":
        (folder / "a.jsonl").write_text(f'{{"k":"x","n":1}}\n{{"k":"{null}","n":2}}\n')
        source = JsonlReader(folder, part_bytes=99)
    else:
        frame.to_parquet(folder / "a.parquet", row_group_size=1)
        if kind == "joined":
            frame[:1].to_parquet(folder / "a.parquet")
            frame[1:].to_parquet(folder / "b.parquet")
        source = ParquetReader(folder, part_bytes=None if kind == "joined" else 1)
    writer = ParquetWriter(tmp_path / "out", partition_by="k")
    Pipeline([source, same, writer], on_error="quarantine").run()
    (problem,) = problems(tmp_path)
    assert problem["source"].removeprefix(f"{tmp_path}/") == place
    assert problem["content"].startswith("{")


def test_reasons_have_no_spelling_of_python(write, tmp_path):
    frame = pd.DataFrame({"text": pd.Series(["a", "b\ud800"], dtype=object)})
    with dask.config.set({"dataframe.convert-string": False}):
        run(tmp_path, dd.from_pandas(frame, npartitions=1))
    (row,) = problems(tmp_path)
    assert row["reason"].startswith(r"a text has \ud800, half of a surrogate pair, which UTF-8")
    shutil.rmtree(tmp_path / "out")
    write("a.jsonl", b"\n".join(GOOD))
    write("b.jsonl.gz", b"\x00\xff")
    run(tmp_path, JsonlReader(f"{tmp_path}/in"))
    (file,) = problems(tmp_path)
    assert file["reason"] == "Not a gzipped file"


def test_a_job_that_stopped_goes_on_with_quarantine(write, tmp_path):
    write("a.jsonl", b"\n".join([*GOOD[:30], BAD["cut"], *GOOD[30:]]))
    reader = OneSample(f"{tmp_path}/in", part_bytes=400)
    with pytest.raises(UnreadableInputError):
        Pipeline([reader, same, ParquetWriter(f"{tmp_path}/out")]).run()
    assert run(tmp_path, reader).resumed_parts > 0
    assert rows(tmp_path)["id"].tolist() == list(range(60))


@pytest.mark.parametrize("done", ["finished", "half done"])
def test_a_quarantine_file_that_is_not_what_was_written_is_made_anew(write, tmp_path, done):
    write("a.jsonl", b"\n".join([*GOOD[:30], b"{broken", *GOOD[30:]]))
    reader = JsonlReader(f"{tmp_path}/in")
    run(tmp_path, reader)
    [problems] = (tmp_path / "out/_quarantine").iterdir()
    content = problems.read_bytes()
    problems.write_bytes(content.replace(b"{broken", b"[broken"))
    if done == "half done":
        for path in [*(tmp_path / "out").glob("part-*"), *tmp_path.glob("out/_gpu*/records/*")]:
            path.unlink()
    summary = run(tmp_path, reader)
    assert problems.read_bytes() == content
    assert (summary.left_out, len(rows(tmp_path))) == ({"line": 1}, 60)


@pytest.mark.parametrize("folder", ["{}", "memory://{}"])
def test_a_job_whose_quarantine_file_is_missing_goes_on_in_every_store(write, tmp_path, folder):
    write("a.jsonl", b"\n".join([*GOOD[:30], b"{broken", *GOOD[30:]]))
    folder, reader = folder.format(tmp_path), JsonlReader(f"{tmp_path}/in")
    run(folder, reader)
    store = open_store(f"{folder}/out")
    [name] = store.sizes("_quarantine")
    content = store.read(f"_quarantine/{name}")
    store.remove(f"_quarantine/{name}")
    summary = run(folder, reader)
    assert (summary.left_out, summary.resumed_parts) == ({"line": 1}, 0)
    assert store.read(f"_quarantine/{name}") == content


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (
            "a.jsonl.gz",
            gzip.compress(b"\n".join(GOOD), mtime=0)[:20],
            r"gz: Compressed file ended before",
        ),
        ("a.jsonl", '{"text": "é"}'.encode("latin-1"), r"from byte 0: byte 10 .* not UTF-8.*iconv"),
        ("a.parquet", b"", "file size is 0 bytes"),
    ],
)
@pytest.mark.parametrize("fields", [None, ["text"]])
def test_an_input_of_which_nothing_can_be_read_is_refused_with_the_reason(
    write, tmp_path, name, content, reason, fields
):
    write(name, content)
    reader = FileReader(f"{tmp_path}/in", fields=fields)
    with pytest.raises(UnreadableInputError, match=f"nothing of the input can be read; .*{reason}"):
        run(tmp_path, reader)


def test_parquet_columns_of_one_name_are_refused_unless_others_are_read(write, tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"])] * 3, ["text", "x", "x"])
    (tmp_path / "in").mkdir()
    pq.write_table(table, tmp_path / "in/a.parquet")
    with pytest.raises(UnreadableInputError, match=r"columns are called 'x': rename them.*fields="):
        ParquetReader(f"{tmp_path}/in").find_parts()
    assert read_files(f"{tmp_path}/in", fields=["text"]).compute()["text"].tolist() == ["a"]
    pq.write_table(table.select([0]), tmp_path / "in/b.parquet")
    assert run(tmp_path, ParquetReader(f"{tmp_path}/in")).left_out == {"file": 1}


PANICS = "a" * 60 + "b"


@pytest.fixture
def panicking(checkpoint, tmp_path):
    """A model whose tokenizer panics, as Rust code does, on the text `PANICS`."""
    folder = shutil.copytree(checkpoint("domain"), tmp_path / "model")
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated"}
    steps = [split | {"invert": False}, tokenizer["pre_tokenizer"]]
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    path.write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.parametrize("on_workers", [False, True])
def test_a_panic_of_a_tokenizer_leaves_out_its_row_or_ends_the_job(panicking, tmp_path, on_workers):
    texts = [f"text {number}" for number in range(30)]
    frame = pd.DataFrame({"text": [*texts[:9], PANICS, *texts[9:]]})
    stages = [dd.from_pandas(frame, npartitions=2), DomainClassifier(model=panicking)]
    scope = get_client("cpu", n_workers=1) if on_workers else contextlib.nullcontext()
    with scope as client:
        writer = ParquetWriter(tmp_path / "out")
        done = Pipeline([*stages, writer], on_error="quarantine").run(client)
        with pytest.raises(RuntimeError, match="retry-limit-in-match over"):
            Pipeline([*stages, ParquetWriter(tmp_path / "other")]).run(client)
    assert (done.rows_written, done.left_out) == (30, {"row": 1})
    (problem,) = problems(tmp_path)
    assert "PanicException" in problem["reason"]
    assert PANICS in problem["content"]


class Stop(BaseException):
    """An error that a library hides from handlers of `Exception`."""


def leaves(frame):
    if len(frame):
        sys.exit("no more")
    return frame


def breaks_off(frame):
    if len(frame):
        raise Stop("no more")
    return frame


@pytest.mark.parametrize(
    ("stage", "words"),
    [(leaves, r"a task called sys.exit\('no more'\)"), (breaks_off, "Stop: no more")],
)
@pytest.mark.parametrize("on_workers", [False, True])
def test_a_stage_that_ends_its_process_ends_the_job_at_once(tmp_path, stage, words, on_workers):
    frame = dd.from_pandas(pd.DataFrame({"text": ["a", "b"]}), npartitions=1)
    scope = get_client("cpu", n_workers=1) if on_workers else contextlib.nullcontext()
    with scope as client, pytest.raises(RuntimeError, match=words):
        began = time.monotonic()
        Pipeline([frame, stage, ParquetWriter(tmp_path / "out")]).run(client)
    assert time.monotonic() - began < 30

"""Small parts become few files, and every row is there once, wherever a run is killed."""

import functools
import json
import shutil
from pathlib import Path
from unittest.mock import patch

import duckdb
import pandas as pd
import pyarrow.parquet as pq
import pytest

from gpuclassify import (
    AnnotationWriter,
    FileReader,
    JsonlWriter,
    ParquetWriter,
    Pipeline,
    read_files,
)
from gpuclassify.jobs.ledger.manifest import manifest_of
from gpuclassify.jobs.report.progress import JobProgress
from gpuclassify.jobs.stores.opening import open_store
from gpuclassify.jobs.task import join_parts, run_part
from tests.kills import kills

PARTS, ROWS = 6, 60
WRITERS = {
    "parquet": ParquetWriter,
    "jsonl": JsonlWriter,
    "jsonl.gz": functools.partial(JsonlWriter, compression="gzip"),
    "jsonl.zst": functools.partial(JsonlWriter, compression="zstd"),
    "folders": functools.partial(ParquetWriter, partition_by="kind"),
    "annotations": AnnotationWriter,
}


def write(folder, first=0, files=PARTS):
    """Ten lines in each file, of which one of the last file is broken."""
    (folder / "in").mkdir(exist_ok=True)
    for number in range(first, first + files):
        rows = [
            {"id": row, "kind": "ab"[row % 2], "text": f"text {row} " + "ü" * row}
            for row in range(10 * number, 10 * number + 10)
        ]
        lines = [json.dumps(row) for row in rows] + ["{broken"] * (number == PARTS - 1)
        (folder / f"in/{number}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def doubled(frame):
    return frame.assign(doubled=frame["id"] * 2)


def job(folder, kind, out="out", output_bytes=None, stage=doubled):
    options = {} if output_bytes is None else {"output_bytes": output_bytes}
    writer = WRITERS[kind](f"{folder}/{out}", **options)
    return Pipeline([FileReader(f"{folder}/in"), stage, writer], on_error="quarantine")


def run(*arguments, **options):
    return job(*arguments, **options).run(report=lambda *_: None)


def paths(folder, out="out"):
    """Return the files that readers of datasets see."""
    found = sorted(Path(folder, out).rglob("part-*"))
    return [path for path in found if "/_" not in str(path.relative_to(folder))]


def rows(folder, kind, out="out"):
    """Read the visible files by DuckDB."""
    files = [str(path) for path in paths(folder, out)]
    if not files:
        return []
    read = "read_json_auto" if kind.startswith("jsonl") else "read_parquet"
    table = duckdb.sql(f"select doubled from {read}({files})")
    return sorted(value for (value,) in table.fetchall() if value is not None)


def run_until_joining(*arguments, **options):
    failing = patch("gpuclassify.jobs.job.join_parts", side_effect=KeyboardInterrupt)
    with failing, pytest.raises(KeyboardInterrupt):
        run(*arguments, **options)


def size_of_three(folder, kind):
    """Return the bytes of about three parts."""
    run_until_joining(folder, kind, out="parts")
    sizes = [path.stat().st_size for path in (folder / "parts/_gpuclassify/parts").iterdir()]
    assert len(sizes) == PARTS
    return 3 * max(sizes)


def assert_whole(folder, kind, files):
    assert rows(folder, kind) == [2 * row for row in range(ROWS)]
    assert len({path.name for path in paths(folder)}) == files
    books = folder / "out/_gpuclassify"
    assert len([*(books / "records").iterdir()]) == files
    assert not [*books.glob("parts/*"), *books.glob("attempts/*"), *books.glob("whole/*")]
    lines = [json.loads(line) for line in (books / "manifest.jsonl").read_text().splitlines()]
    assert sum(record["rows_out"] for record in lines) == ROWS + (kind == "annotations")
    assert sum(len(record["joined"]) for record in lines) == PARTS
    assert manifest_of(open_store(f"{folder}/out")).is_complete()
    assert len([*(folder / "out/_quarantine").iterdir()]) == 1


@pytest.mark.parametrize("kind", WRITERS)
def test_small_parts_become_files_of_a_size(tmp_path, kind):
    write(tmp_path)
    summary = run(tmp_path, kind)
    assert (summary.parts, summary.rows_written) == (PARTS, ROWS)
    assert sorted(summary.files) == [*map(str, paths(tmp_path))]
    assert summary.output_bytes == sum(path.stat().st_size for path in paths(tmp_path))
    assert_whole(tmp_path, kind, files=1)
    again = run(tmp_path, kind)
    assert (again.resumed_parts, again.files) == (PARTS, summary.files)
    shutil.rmtree(tmp_path / "out")
    run(tmp_path, kind, output_bytes=size_of_three(tmp_path, kind))
    assert 2 <= len({path.name for path in paths(tmp_path)}) <= 3


def test_the_display_counts_files_that_are_joined(tmp_path):
    write(tmp_path)
    shown, size = [], size_of_three(tmp_path, "parquet")
    with JobProgress("Joining") as progress:

        def report(*call):
            progress.parts(*call)
            shown.append(progress._line)

        job(tmp_path, "parquet", output_bytes=size).run(report=report)
    files = len(paths(tmp_path))
    assert shown[-2].endswith(f"{files} of {files} files are joined")
    assert "joined" not in shown[-1]


@pytest.mark.timeout(1_200)
@pytest.mark.parametrize(
    "kind",
    [
        "parquet",
        pytest.param("jsonl.gz", marks=pytest.mark.slow),
        pytest.param("folders", marks=pytest.mark.slow),
        pytest.param("annotations", marks=pytest.mark.slow),
    ],
)
def test_a_kill_at_any_moment_of_joining_loses_and_doubles_nothing(tmp_path, kind):
    write(tmp_path)
    size = size_of_three(tmp_path, kind)
    action = functools.partial(run, tmp_path, kind, output_bytes=size)
    run_until_joining(tmp_path, kind, output_bytes=size)
    assert not paths(tmp_path)
    shutil.copytree(tmp_path / "out", tmp_path / "kept")

    def prepare():
        shutil.rmtree(tmp_path / "out")
        shutil.copytree(tmp_path / "kept", tmp_path / "out")

    prepare()
    action()
    files = len({path.name for path in paths(tmp_path)})
    assert 2 <= files < PARTS
    for _ in kills(action, prepare):
        seen = rows(tmp_path, kind)
        assert len({*seen}) == len(seen)
        assert action().resumed_parts == PARTS
        assert_whole(tmp_path, kind, files)


@pytest.mark.parametrize("kind", ["parquet", "folders", "annotations"])
def test_parts_of_a_damaged_file_are_done_again(tmp_path, kind):
    write(tmp_path)
    size = size_of_three(tmp_path, kind)
    run(tmp_path, kind, output_bytes=size)
    files = [path.name for path in paths(tmp_path)]
    records = sorted((tmp_path / "out/_gpuclassify/records").iterdir())
    for damaged in (paths(tmp_path)[0], records[-1]):
        damaged.write_bytes(damaged.read_bytes()[:-9])
        assert not manifest_of(open_store(f"{tmp_path}/out")).is_complete()
        summary = run(tmp_path, kind, output_bytes=size)
        assert 0 < summary.resumed_parts < PARTS
        assert_whole(tmp_path, kind, len({*files}))
        assert [path.name for path in paths(tmp_path)] == files
    summary = job(tmp_path, kind, output_bytes=size).run(restart=True)
    assert summary.resumed_parts == 0
    assert not {path.name for path in paths(tmp_path)} & {*files}
    assert_whole(tmp_path, kind, len({*files}))


def test_attempts_that_come_late_or_twice_change_nothing(tmp_path):
    """A part is written again after it has been joined, and two clients join the same parts."""
    write(tmp_path)
    prepared = job(tmp_path, "parquet").prepare()
    prepared.run()
    names, part = prepared.manifest.names(), prepared.source.input.parts[0]
    contents = [path.read_bytes() for path in paths(tmp_path)]
    run_part(part, 0, names[0], prepared.spec.pack())
    assert [path.read_bytes() for path in paths(tmp_path)] == contents
    manifest = prepared.manifest
    again = join_parts(manifest.directory, names, manifest.count, manifest.encoding)
    assert [record.name for record in again] == [path.name for path in paths(tmp_path)]
    assert not manifest.is_complete()  # a part has come late
    assert run(tmp_path, "parquet").resumed_parts == PARTS
    assert_whole(tmp_path, "parquet", files=1)


def mixed(frame):
    """A column of which only some parts tell the type, and another of several types."""
    first = frame["id"].min() if len(frame) else 0
    vague = [None if first < 20 else "text"] * len(frame)
    several = [5 if first < 40 else "text"] * len(frame)
    new = {"doubled": frame["id"] * 2, "vague": vague, "several": several}
    return frame.assign(**{name: pd.Series(v, frame.index, object) for name, v in new.items()})


def test_parts_whose_columns_have_no_common_type_are_not_joined(tmp_path):
    write(tmp_path)
    run(tmp_path, "parquet", stage=mixed)
    files = paths(tmp_path)
    assert 1 < len(files) < PARTS
    tables = [pq.read_table(path).to_pandas() for path in files]
    found = pd.concat(tables, ignore_index=True)
    assert found["id"].tolist() == [*range(ROWS)]
    assert found["vague"].fillna("none").tolist() == ["none"] * 20 + ["text"] * 40
    assert found["several"].tolist() == [5] * 40 + ["text"] * 20


def test_two_clients_that_join_parts_without_a_common_type_find_the_same_files(tmp_path):
    write(tmp_path)
    run(tmp_path, "parquet", stage=mixed)
    manifest = manifest_of(open_store(f"{tmp_path}/out"))
    again = join_parts(manifest.directory, manifest.names(), manifest.count, manifest.encoding)
    assert [record.name for record in again] == [path.name for path in paths(tmp_path)]


def test_annotations_of_joined_parts_and_of_later_files_reach_their_rows(tmp_path):
    write(tmp_path)
    run(tmp_path, "annotations")
    write(tmp_path, first=PARTS, files=3)
    run(tmp_path, "annotations")
    assert len(paths(tmp_path)) == 2 and len(paths(tmp_path, "out/more-00001")) == 1
    whole = [str(path) for path in sorted((tmp_path / "in").iterdir()) if path.stem != "5"]
    options = {"annotations": str(tmp_path / "out"), "annotations_complete": False}
    frame = read_files(whole, part_bytes=300, **options)  # several parts in each file
    assert frame.npartitions > 9
    found = frame.compute()
    assert found["id"].tolist() == [row for row in range(10 * PARTS + 30) if not 50 <= row < 60]
    assert (found["doubled"] == 2 * found["id"]).all()


def test_annotations_of_an_unfinished_set_reach_their_rows(tmp_path):
    write(tmp_path)

    def stop(done, of, summary):
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job(tmp_path, "annotations").run(report=stop)
    whole = [f"{tmp_path}/in/{number}.jsonl" for number in range(5)]
    options = {"annotations": str(tmp_path / "out"), "annotations_complete": False}
    found = read_files(whole, **options).compute()
    assert found["doubled"].isna().tolist() == [row >= 40 for row in range(50)]
    assert (found["doubled"] == 2 * found["id"]).sum() == 40


def test_files_of_an_object_store_are_joined(tmp_path, prefix):
    shutil.rmtree(tmp_path / "in")
    write(tmp_path)
    out = f"{prefix}/joined"
    for kind in ("parquet", "folders", "jsonl.gz"):
        writer = WRITERS[kind](f"{out}/{kind}")
        pipeline = Pipeline([FileReader(f"{tmp_path}/in"), doubled, writer], on_error="quarantine")
        summary = pipeline.run()
        store = open_store(f"{out}/{kind}")
        names = [*store.part_sizes()]
        files = sorted(name for name in names if name.rpartition("/")[2].startswith("part-"))
        assert len(files) == (2 if kind == "folders" else 1)
        assert len(store.sizes("_gpuclassify/records")) == 1
        assert not store.sizes("_gpuclassify/parts")
        frame = read_files(f"{out}/{kind}").compute()
        assert sorted(frame["doubled"]) == [2 * row for row in range(ROWS)]
        assert pipeline.run().resumed_parts == summary.parts == PARTS

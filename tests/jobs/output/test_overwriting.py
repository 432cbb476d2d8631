"""Overwritten files are replaced as a whole, after all new files are complete."""

from pathlib import Path

import dask
import dask.dataframe as dd
import pandas as pd
import pyarrow.dataset
import pytest

from gpuclassify import (
    Deduplicate,
    ExactDuplicates,
    FileReader,
    ParquetWriter,
    Pipeline,
    read_files,
    to_parquet,
)
from gpuclassify.commands.settings import JobSettings
from gpuclassify.curator import DocumentDataset
from gpuclassify.jobs.output.writers import _publish, _write_part
from tests.kills import is_killed

pytestmark = pytest.mark.contract


def write(folder, ids=(0, 1, 2), suffix="parquet"):
    folder.mkdir(parents=True, exist_ok=True)
    for number in ids:
        frame = pd.DataFrame({"id": [number], "text": ["t"]})
        if suffix == "parquet":
            frame.to_parquet(folder / f"part-{number:05d}.parquet")
        else:
            frame.to_json(folder / f"part-{number:05d}.jsonl", orient="records", lines=True)


def ids(folder):
    return sorted(pyarrow.dataset.dataset(folder).to_table()["id"].to_pylist())


def linked(path):
    Path(f"{path}-link").symlink_to(path)
    return dd.read_parquet(f"{path}-link")


def found_later(path):
    """Read files that the graph does not name, each when others may be written already."""
    names = sorted(map(str, names_in(path)), reverse=True)
    return dd.from_delayed([dask.delayed(_read)(path.split("/"), name) for name in names])


def _read(steps, name):
    return pd.read_parquet("/".join([*steps, name]))


def delayed(path):
    return dd.from_delayed([dask.delayed(pd.read_parquet)(file) for file in paths_in(path)])


def paths_in(path):
    return sorted(map(str, Path(path).glob("*.parquet")))


def names_in(path):
    return sorted(file.name for file in Path(path).iterdir())


UNKNOWN = ("from_map", "from_delayed", "unknown")  # the files of such frames are unknown
FRAMES = {
    "read_files": read_files,
    "read_parquet": dd.read_parquet,
    "a pattern": lambda path: dd.read_parquet(f"{path}/*.parquet"),
    "arrow": lambda path: dd.read_parquet(path, filesystem="arrow"),
    "from_map": lambda path: dd.from_map(pd.read_parquet, paths_in(path)[::-1]),
    "from_delayed": delayed,
    "curator": lambda path: DocumentDataset.read_parquet(path).df,
    "a link": linked,
    "unknown": found_later,
}


@pytest.mark.parametrize("kind", FRAMES)
def test_what_a_frame_is_read_from_outlives_what_is_written_over_it(tmp_path, kind):
    write(tmp_path / "data")
    frame = FRAMES[kind](f"{tmp_path}/data")
    if kind in UNKNOWN:
        to_parquet(frame, f"{tmp_path}/data", overwrite=True)
    else:
        with pytest.raises(ValueError, match=r"is read from .*would remove it first"):
            to_parquet(frame, f"{tmp_path}/data", overwrite=True)
    assert ids(tmp_path / "data") == [0, 1, 2]
    assert len(names_in(tmp_path / "data")) == 3


@pytest.mark.parametrize("kind", sorted({*FRAMES} - {"arrow"}))  # it reads _SUCCESS, too
def test_a_job_that_starts_over_removes_no_row_that_it_reads(tmp_path, kind):
    write(tmp_path / "in")
    out = f"{tmp_path}/data"
    Pipeline([FileReader(f"{tmp_path}/in", part_bytes=1), ParquetWriter(out)]).run()
    names = [Path(path).name for path in paths_in(out)]
    if kind == "unknown":
        parts = [dask.delayed(_read)(out.split("/"), name) for name in names]
        frame = dd.from_delayed(parts)
    else:
        frame = FRAMES[kind](out)
    if kind in UNKNOWN:
        Pipeline([frame, ParquetWriter(out)]).run(restart=True)
        assert {*names_in(out)}.isdisjoint(names)
    else:
        with pytest.raises(ValueError, match="lies in the output directory"):
            Pipeline([frame, ParquetWriter(out)]).run(restart=True)
    assert ids(out) == [0, 1, 2]


def test_an_output_within_the_input_is_refused_however_the_input_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in", suffix="jsonl")
    (tmp_path / "beside").mkdir()
    write(tmp_path / "in/sub", suffix="jsonl")
    (tmp_path / "in/b").symlink_to(tmp_path / "beside")
    write(tmp_path / "beside", suffix="jsonl")
    settings = {"input": ["in"], "classifiers": [{"classifier": "domain"}]}
    for out in ("in/out", "in/sub/../out", "beside/out"):
        with pytest.raises(ValueError, match="lies in the input, which would grow"):
            JobSettings.of({**settings, "output": out, "limit": 2}).job()
    globs = map(read_files, ("in/**/*.jsonl", "in/*", "*"))  # folders that match are read, too
    for frame in (read_files("in"), FileReader("in"), *globs):
        with pytest.raises(ValueError, match="lies in the input, which would grow"):
            Pipeline([frame, ParquetWriter("in/out")]).prepare()
    with pytest.raises(ValueError, match="lies in the input, which would grow"):
        to_parquet(read_files("in"), "in/out")
    assert not (tmp_path / "in/out").exists()


def test_an_earlier_corpus_is_not_removed_by_starting_over(tmp_path):
    write(tmp_path / "in")
    Pipeline([FileReader(f"{tmp_path}/in"), ParquetWriter(f"{tmp_path}/old")]).run()
    earlier = FileReader(f"{tmp_path}/old/*.parquet")
    with pytest.raises(ValueError, match="lies in the output directory"):
        Deduplicate(
            FileReader(f"{tmp_path}/in"),
            ExactDuplicates(),
            ParquetWriter(f"{tmp_path}/old"),
            against=earlier,
        ).run(restart=True)
    assert ids(tmp_path / "old") == [0, 1, 2]


@pytest.mark.parametrize(
    "name",
    ["part.0.parquet", "train-00000-of-00001.parquet", "lang=de/part-0.parquet", "k=1/j=2/x.pq",
     "part-0.jsonl", "lang=de/part-0.jsonl.gz"],
)  # fmt: skip
def test_rows_of_whoever_wrote_them_are_refused_or_replaced(tmp_path, name):
    (tmp_path / "out" / name).parent.mkdir(parents=True)
    pd.DataFrame({"id": [9], "text": ["old"]}).to_parquet(tmp_path / "out" / name)
    (tmp_path / "out/_metadata").write_bytes(b"a list of old files")
    new = pd.DataFrame({"id": [1], "text": ["new"]})
    with pytest.raises(FileExistsError, match=rf"{name}: choose.*overwrite=True"):
        to_parquet(new, f"{tmp_path}/out")
    to_parquet(new, f"{tmp_path}/out", overwrite=True)
    assert names_in(tmp_path / "out") == ["part-00000.parquet"]
    assert ids(tmp_path / "out") == [1]


@pytest.mark.parametrize("is_linked", [False, True])
def test_rows_in_other_folders_are_not_replaced_and_not_mixed(tmp_path, is_linked):
    write(tmp_path / "other")
    (tmp_path / "out").mkdir()
    if is_linked:
        (tmp_path / "out/k=1").symlink_to(tmp_path / "other")
    else:
        (tmp_path / "other").rename(tmp_path / "out/k")
    with pytest.raises(FileExistsError, match=r"k.*/part-00000\.parquet, in another folder or beh"):
        to_parquet(pd.DataFrame({"id": [1]}), f"{tmp_path}/out", overwrite=True)
    assert len([*tmp_path.rglob("other/*"), *tmp_path.rglob("k/*")]) == 3


def test_a_frame_that_fails_leaves_what_was_there(tmp_path):
    def fail(frame, partition_info=None):
        if partition_info["number"]:
            raise ValueError("no")
        return frame

    write(tmp_path / "out")
    frame = dd.from_pandas(pd.DataFrame({"id": range(8)}), npartitions=4)
    frame = frame.map_partitions(fail, meta=frame._meta)
    with pytest.raises(ValueError, match="no"), dask.config.set(scheduler="synchronous"):
        to_parquet(frame, f"{tmp_path}/out", overwrite=True)
    assert len(names_in(tmp_path / "out")) == 3
    assert ids(tmp_path / "out") == [0, 1, 2]


def test_a_writer_that_is_killed_loses_no_row(tmp_path):
    """Old files exist until all new files do."""
    new = dd.from_pandas(pd.DataFrame({"id": [10, 11, 12], "text": "new"}), npartitions=3)
    out = tmp_path / "out"
    write(out)

    def overwrite():
        with dask.config.set(scheduler="synchronous"):
            to_parquet(new, str(out), overwrite=True)

    kills = 0
    while is_killed(overwrite, kills + 1):
        kills += 1
        there = ids(out)
        assert {0, 1, 2} <= {*there} or {10, 11, 12} <= {*there} or len(there) == 3
    assert kills > 5
    assert ids(out) == [10, 11, 12]
    assert len(names_in(out)) == 3


def test_a_switch_that_was_cut_off_is_made_again_and_loses_nothing(tmp_path):
    out, written = tmp_path / "out", []
    out.mkdir()
    for number in range(3):
        frame = pd.DataFrame({"id": [10 + number]})
        written.append(_write_part(frame, str(out), f".part-{number}", None, None))
    write(out)
    names = [f"part-{number:05d}.parquet" for number in range(3)]
    (out / ".part-0").rename(out / names[0])
    for _ in range(2):
        assert _publish(written, str(out), None, names, names) == [f"{out}/{n}" for n in names]
        assert ids(out) == [10, 11, 12]
    write(out)
    with pytest.raises(FileNotFoundError):  # neither exists
        _publish(written, str(out), None, names, names)

"""Changed output files are noticed when the job continues, and by `verify`."""

import json
import shutil

import fsspec
import pandas as pd
import pyarrow.dataset as ds
import pytest
from click.testing import CliRunner
from job_faults import write_input

from gpuclassify import JsonlReader, JsonlWriter, ParquetReader, ParquetWriter, Pipeline, read_files
from gpuclassify.commands.cli import main
from gpuclassify.jobs.ledger import encoding as encodings
from gpuclassify.jobs.ledger.manifest import CARD
from gpuclassify.jobs.stores.opening import open_store
from gpuclassify.jobs.stores.store import Store
from tests.processes import local_client


@pytest.fixture
def folder(tmp_path):
    write_input(tmp_path / "in")
    return tmp_path


def job(folder, writer=ParquetWriter, **options):
    reader = JsonlReader(f"{folder}/in/*.jsonl", part_bytes=8_000)
    return Pipeline([reader, with_kind, writer(f"{folder}/out", output_bytes=0, **options)])


def with_kind(frame):
    return frame.assign(kind=frame["text"].str.len() % 2)


def content(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in (folder / "out").rglob("part-*")
    }


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit(path):
    record = json.loads(path.read_bytes())
    path.write_text(json.dumps({**record, "rows_out": record["rows_out"] + 1}))


def swap(path):
    other = sorted(path.parent.iterdir())[-1]
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    other.write_bytes(one)


def command(*words):
    result = CliRunner().invoke(main, [*map(str, words)])
    return result.exit_code, result.output


def test_a_record_of_no_part_goes(folder):
    job(folder).run()
    records = folder / "out/_gpuclassify/records"
    whole = sorted(path.name for path in records.iterdir())
    first = records / whole[0]
    stray = records / first.name.replace("part-00000-", "part-00777-")
    stray.write_bytes(first.read_bytes())
    (records / "mine.json").write_text("{}")
    before = content(folder)
    job(folder).run()
    assert sorted(path.name for path in records.iterdir()) == sorted([*whole, "mine.json"])
    assert content(folder).items() >= {k: v for k, v in before.items() if "00777" not in k}.items()


@pytest.mark.parametrize("options", [{}, {"partition_by": "kind"}], ids=["plain", "folders"])
@pytest.mark.parametrize("writer", [ParquetWriter, JsonlWriter])
@pytest.mark.parametrize("is_finished", [True, False])
@pytest.mark.parametrize("harm", [flip, edit, swap])
def test_a_change_of_the_same_length_is_done_again_and_named(
    folder, writer, options, is_finished, harm, caplog
):
    job(folder, writer, **options).run()
    before, parts = content(folder), len([*(folder / "out/_gpuclassify/records").iterdir()])
    if not is_finished:
        (folder / "out/_SUCCESS").unlink()
    where = "out/**/part-*" if harm is flip else "out/_gpuclassify/records/*"
    harmed = sorted(path for path in folder.glob(where) if "records" in path.parts or harm is flip)
    harm(next(path for path in harmed if ("records" in path.parts) is (harm is not flip)))

    found = command("verify", folder / "out", "--json")
    assert found[0] == 1
    values = json.loads(found[1])
    assert not values["is_sound"] and values["parts_done"] == parts - (2 if harm is swap else 1)
    summary = job(folder, writer, **options).run()
    assert summary.parts - summary.resumed_parts == (2 if harm is swap else 1)
    assert summary.checked.startswith("digests of ")
    for name in values["damage"]:
        assert f"writing {name} again: " in caplog.text
    after = content(folder)
    assert {**after, **before}.keys() == before.keys()
    assert {k: v for k, v in after.items() if "records" not in k} == {
        k: v for k, v in before.items() if "records" not in k
    }
    assert command("verify", folder / "out")[0] == 0


def test_sizes_alone_are_enough_for_those_who_ask(folder):
    job(folder).run()
    harmed = min((folder / "out").glob("part-*"))
    flip(harmed)
    summary = job(folder).run(verify="size")
    assert summary.resumed_parts == summary.parts
    assert summary.checked.startswith("sizes alone of ")
    with pytest.raises(ValueError, match="verify='md5'"):
        job(folder).run(verify="md5")


@pytest.mark.parametrize(
    "name", ["part-00099-KEY.parquet", "kind=9/part-00000-KEY.parquet", "mine.parquet"]
)
def test_a_file_beside_the_parts_is_refused_by_name(folder, name):
    job(folder).run()
    (part, *_) = sorted((folder / "out").glob("part-*"))
    name = name.replace("KEY", part.name.split("-")[2].partition(".")[0])
    (folder / "out" / name).parent.mkdir(exist_ok=True)
    shutil.copy(part, folder / "out" / name)
    with pytest.raises(FileExistsError, match=rf"{name}.* move"):
        job(folder).run()
    code, output = command("verify", folder / "out")
    assert (code, name in output) == (1, True)


def test_an_output_that_is_not_finished_is_not_sound_and_no_output_is_told(folder):
    job(folder).run()
    min((folder / "out/_gpuclassify/records").iterdir()).unlink()
    code, output = command("verify", folder / "out")
    assert code == 1 and "The output is not complete" in output
    code, output = command("verify", folder)
    assert code == 2 and "is no output of a job" in output


def test_workers_read_what_is_verified(folder):
    job(folder, partition_by="kind").run()
    flip(min((folder / "out").glob("kind=*/part-*")))
    with local_client() as client:
        summary = job(folder, partition_by="kind").run(client)
    assert summary.parts - summary.resumed_parts == 1


def test_a_store_that_tells_of_content_is_not_read(prefix, bucket, monkeypatch):
    pipeline = Pipeline(
        [JsonlReader(f"{prefix}/in/*.jsonl"), ParquetWriter(f"{prefix}/out", output_bytes=0)]
    )
    pipeline.run()
    read = []
    digest = Store.digest
    monkeypatch.setattr(Store, "digest", lambda *call: read.append(call) or digest(*call))
    assert pipeline.run().checked.startswith("digests of 3 files")
    assert read == []
    directory = open_store(f"{prefix}/out")
    name = min(name for name in directory.part_sizes() if name[0] not in "._")
    damaged = bytearray(directory.read(name))
    damaged[-1] ^= 1
    bucket.pipe_file(directory.path(name), bytes(damaged))
    summary = pipeline.run()
    assert summary.parts - summary.resumed_parts == 1
    assert [name for _, name in read] == [name]


def test_a_part_whose_file_lacks_rows_is_not_published(folder, monkeypatch):
    write = encodings.pq.write_table
    monkeypatch.setattr(
        encodings.pq, "write_table", lambda table, *a, **k: write(table[1:], *a, **k)
    )
    with pytest.raises(RuntimeError, match=r"rows became files of"):
        job(folder).run()
    with pytest.raises(RuntimeError, match=r"rows became files of"):
        job(folder, partition_by="kind").run(restart=True)
    assert not [*(folder / "out").rglob("part-*.parquet")]


FOLDERS = {
    "str": ["007", "7", "", "a/b =ü", "50%", "__x", "null", None, "x" * 200, "ü" * 20],
    "int8": [1, -3, None],
    "uint64": [2**64 - 1, 0],
    "bool": [True, False, None],
    "category": ["1", "b"],
}


@pytest.mark.parametrize("writer", [ParquetWriter, JsonlWriter])
@pytest.mark.parametrize("kind", FOLDERS)
def test_folders_give_back_what_went_in(tmp_path, kind, writer):
    values = FOLDERS[kind]
    dtype = {"int8": "Int8", "uint64": "UInt64", "bool": "boolean"}.get(kind, kind)
    frame = pd.DataFrame({"n": range(len(values)), "lab": pd.array(values, dtype)})
    frame.assign(is_even=frame["n"] % 2 == 0).to_parquet(tmp_path / "in.parquet")
    reader = ParquetReader(f"{tmp_path}/in.parquet")
    Pipeline([reader, writer(f"{tmp_path}/out", partition_by=["lab", "is_even"])]).run()
    found = read_files(tmp_path / "out").compute().sort_values("n")
    assert found["is_even"].astype(str).tolist() == frame["n"].mod(2).eq(0).astype(str).tolist()
    found = found["lab"]
    assert found.astype(object).where(found.notna(), None).tolist() == values
    if kind == "str":
        assert (tmp_path / "out/lab=50%25/is_even=true").is_dir()
        if writer is ParquetWriter:
            read = ds.dataset(tmp_path / "out", partitioning="hive").to_table().sort_by("n")
            assert read["lab"].to_pylist() == values


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("__HIVE_DEFAULT_PARTITION__", "take for null"),
        ("字" * 84, "name of 760 bytes"),
        ("a" * 400, "name of 404 bytes"),
    ],
)
@pytest.mark.parametrize("writer", [ParquetWriter, JsonlWriter])
def test_values_that_cannot_name_folders_are_refused_or_left_out(tmp_path, value, says, writer):
    frame = pd.DataFrame({"id": range(30), "lab": [value, None, "a"] * 10})
    frame.to_parquet(tmp_path / "in.parquet")
    stages = [
        ParquetReader(f"{tmp_path}/in.parquet"),
        writer(f"{tmp_path}/out", partition_by="lab"),
    ]
    for _ in range(2):
        with pytest.raises(ValueError, match=says):
            Pipeline(stages).run()
        assert not [*(tmp_path / "out").rglob("part-*.*")]
    summary = Pipeline(stages, on_error="quarantine").run()
    assert (summary.rows_read, summary.rows_written, summary.left_out) == (30, 20, {"row": 10})
    assert read_files(tmp_path / "out").compute()["id"].nunique() == 20
    (listed,) = (tmp_path / "out/_quarantine").iterdir()
    assert {json.loads(line)["row"] for line in listed.open()} == {*range(0, 30, 3)}


def test_what_a_killed_run_left_is_swept(folder):
    job(folder).run()
    here = open_store(f"{folder}/out")
    with pytest.raises(KeyboardInterrupt), here.replacing(here.path("_SUCCESS")) as file:
        alive = file.name
        raise KeyboardInterrupt
    gone = alive.rpartition("-")[0].rpartition("-")[0] + "-4194304-" + "0" * 32
    other = alive.rpartition(".")[0] + ".00000000-1-" + "0" * 32
    for name in (gone, other):
        open(name, "w").close()  # noqa: PTH123
    job(folder).run()
    left = {path.name for path in (folder / "out").glob(".*")}
    assert left == {other.rpartition("/")[2], CARD}
    fsspec.filesystem("file").rm_file(other)

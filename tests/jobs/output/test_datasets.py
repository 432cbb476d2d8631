"""The library datasets reads the output of a job unchanged, and no user's file is lost."""

import json

import dask.dataframe as dd
import datasets
import pandas as pd
import pyarrow.dataset as ds
import pytest

from gpuclassify import FileReader, JsonlReader, JsonlWriter, ParquetWriter, Pipeline
from gpuclassify.jobs.input.readers import read_files

CARD = ".huggingface.yaml"
ROWS = [
    {
        "id": row,
        "text": f"text {row}",
        "lang": ("en", "de")[row % 2],
        "meta": {"n": row, "l": ["x"]},
    }
    for row in range(60)
]
WRITERS = {
    "parquet": (ParquetWriter, {}),
    "lines": (JsonlWriter, {}),
    "packed lines": (JsonlWriter, {"compression": "gzip"}),
    "folders": (ParquetWriter, {"partition_by": "lang"}),
    "folders of folders": (JsonlWriter, {"partition_by": ["lang", "kind"]}),
}


@pytest.fixture
def run(tmp_path):
    """Run or continue the job over `ROWS` in several parts."""
    lines = (json.dumps({**row, "kind": row["id"] % 3}) for row in ROWS)
    (tmp_path / "in.jsonl").write_text("\n".join(lines))

    def run(make=ParquetWriter, restart=False, **options):
        reader = JsonlReader(f"{tmp_path}/in.jsonl", part_bytes=1_000)
        return Pipeline([reader, make(f"{tmp_path}/out", **options)]).run(restart=restart)

    return run


def load(folder, *words, **options):
    datasets.disable_progress_bars()
    return datasets.load_dataset(*words, cache_dir=f"{folder}/cache", **options)["train"]


@pytest.mark.contract
@pytest.mark.parametrize("kind", WRITERS)
def test_datasets_loads_the_folder_of_a_job(tmp_path, run, kind):
    make, options = WRITERS[kind]
    assert run(make, **options).parts > 3
    found = load(tmp_path, f"{tmp_path}/out").to_pandas().sort_values("id")
    expected = pd.DataFrame(ROWS).assign(kind=lambda frame: frame["id"] % 3)
    folders = options.get("partition_by", [])
    expected = expected.drop(columns=folders)
    assert [*found.columns] == [*expected.columns]
    for name in ("id", "text"):
        assert found[name].tolist() == expected[name].tolist()
    assert [one["n"] for one in found["meta"]] == [*range(60)]


def test_columns_of_folders_come_with_pyarrow_or_by_the_names_of_folders(tmp_path, run):
    run(partition_by="lang")
    table = ds.dataset(tmp_path / "out", partitioning="hive").to_table()
    whole = datasets.Dataset(table).to_pandas().sort_values("id")
    assert whole["lang"].tolist() == [row["lang"] for row in ROWS]
    files = {lang: f"{tmp_path}/out/lang={lang}/part-*" for lang in ("en", "de")}
    splits = datasets.load_dataset("parquet", data_files=files, cache_dir=f"{tmp_path}/cache")
    for first, lang in enumerate(("en", "de")):
        assert sorted(splits[lang]["id"]) == [*range(first, 60, 2)]


def test_other_readers_pass_over_what_datasets_reads(tmp_path, run):
    summary = run()
    assert (tmp_path / "out" / CARD).exists()
    folder = str(tmp_path / "out")
    for read in (pd.read_parquet, dd.read_parquet, read_files):
        assert len(read(folder)) == 60
    assert len(summary.files) == len(FileReader(folder).find_parts().files)


def test_a_restart_replaces_the_jobs_description_and_going_on_keeps_it(tmp_path, run):
    card = tmp_path / "out" / CARD
    run()
    before = card.read_bytes()
    run()
    assert card.read_bytes() == before
    middle = len(before) // 2
    flipped = before[:middle] + bytes([before[middle] ^ 1]) + before[middle + 1 :]
    for damaged in (b"", before[:middle], flipped):
        card.write_bytes(damaged)
        run()
        assert card.read_bytes() == before
    card.unlink()
    run()
    assert card.read_bytes() == before
    run(JsonlWriter, restart=True)
    assert b"part-*.jsonl" in card.read_bytes()
    assert len(load(tmp_path, f"{tmp_path}/out")) == 60


@pytest.mark.parametrize("restart", [False, True])
def test_what_a_user_wrote_stays(tmp_path, run, restart):
    card, readme = tmp_path / "out" / CARD, tmp_path / "out/README.md"
    run()
    changed = card.read_bytes().partition(b"\n")[2].replace(b"part-*", b"part-00000-*")
    card.write_bytes(changed)
    run(restart=restart)
    assert card.read_bytes() == changed
    card.unlink()
    readme.write_text("Mine.\n")
    run(restart=restart)
    assert readme.read_text() == "Mine.\n"
    assert not card.exists()  # it would override the user's README.md
    readme.unlink()
    card.symlink_to(tmp_path / "in.jsonl")
    run(restart=restart)
    assert card.is_symlink()
    card.unlink()
    card.mkdir()
    run(restart=restart)
    assert card.is_dir()

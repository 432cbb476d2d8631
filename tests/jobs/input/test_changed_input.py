"""Input files that change while a job runs are noticed; those that do not are read."""

import os
from pathlib import Path

import pandas as pd
import pytest
from distributed import Client

from gpuclassify.jobs.files import ChangedInputError, UnreadableInputError
from gpuclassify.jobs.input.readers import FileReader, JsonlReader, ParquetReader
from gpuclassify.jobs.output.writers import ParquetWriter
from gpuclassify.jobs.pipeline import Pipeline


def same(frame):
    return frame


@pytest.fixture
def numbered(tmp_path):
    """Four files of six rows, found through a symbolic link too."""
    (tmp_path / "in").mkdir()
    for number in range(4):
        frame = pd.DataFrame({"text": ["t"] * 6, "id": range(number * 6, number * 6 + 6)})
        frame.to_parquet(tmp_path / f"in/{number}.parquet")
        frame.to_json(tmp_path / f"in/{number}.jsonl", orient="records", lines=True)
    for name in ("3.parquet", "3.jsonl"):
        (tmp_path / "in" / name).rename(tmp_path / name)
        (tmp_path / "in" / name).symlink_to(tmp_path / name)
    return tmp_path


def regroup(path):
    pd.read_parquet(path).to_parquet(path, row_group_size=2)


def cut(path):
    content = path.read_bytes()
    path.write_bytes(content[: content.rfind(b"\n", 0, len(content) // 2) + 1])


def append(path):
    with path.open("ab") as file:
        file.write(b'{"text": "new", "id": 24}\n')


def write_again(path):
    """As many bytes at a later time."""
    path.write_bytes(path.read_bytes().replace(b'"t"', b'"u"'))
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime + 10))


CHANGES = [
    (regroup, "parquet", r"has \d+ bytes and had \d+"),
    (write_again, "parquet", "was written again"),
    (Path.unlink, "parquet", "is gone"),
    (cut, "jsonl", r"has \d+ bytes and had \d+"),
    (append, "jsonl", r"has \d+ bytes and had \d+"),
    (write_again, "jsonl", "was written again"),
    (Path.unlink, "jsonl", "is gone"),
]


@pytest.mark.parametrize("number", [0, 3], ids=["read already", "not yet"])
@pytest.mark.parametrize(("change", "kind", "words"), CHANGES)
def test_a_file_that_changes_while_the_job_runs_fails_it(numbered, change, kind, words, number):
    counts = []

    def meddle(done, total, summary):
        counts.append(done)
        if done == 2:
            change((numbered / f"in/{number}.{kind}").resolve())

    reader, writer = FileReader(f"{numbered}/in/*.{kind}"), ParquetWriter(f"{numbered}/out")
    told = rf"{number}\.{kind} is not what it was when the job began, it {words}: .*--restart"
    with pytest.raises(ChangedInputError, match=told) as caught:
        Pipeline([reader, same, writer], on_error="quarantine").run(report=meddle)
    assert counts == ([0, 1, 2, 3] if number else [0, 1, 2, 3, 4])
    assert "to continue" not in str(getattr(caught.value, "__notes__", []))
    assert not (numbered / "out/_SUCCESS").exists()


def test_workers_notice_changed_files_too(numbered):
    job = Pipeline(
        [JsonlReader(f"{numbered}/in/*.jsonl"), same, ParquetWriter(f"{numbered}/out")]
    ).prepare()
    append(numbered / "in/1.jsonl")
    with (
        Client(n_workers=1, processes=False, dashboard_address=None) as client,
        pytest.raises(ChangedInputError, match=r"1\.jsonl is not what it was") as caught,
    ):
        job.run(client)
    [note] = caught.value.__notes__
    assert note.startswith("part part-00001-")


def test_files_that_did_not_change_are_read_however_they_are_named(numbered, monkeypatch):
    monkeypatch.chdir(numbered)
    (numbered / "in.parquet").symlink_to(numbered / "in")
    for number, paths in enumerate([
        "in/*.parquet", "in.parquet/*.parquet", "in/3.parquet", f"file://{numbered}/in/*.parquet",
        [f"in/{number}.jsonl" for number in range(4)],
    ]):  # fmt: skip
        summary = Pipeline([FileReader(paths), same, ParquetWriter(f"out-{number}")]).run()
        assert summary.rows_in in (6, 24)


def test_files_that_come_later_are_none_of_the_jobs(numbered):
    def add(done, total, summary):
        (numbered / "in/new.jsonl").write_text('{"text": "new", "id": 24}\n')

    reader = JsonlReader(f"{numbered}/in/*.jsonl")
    pipeline = Pipeline([reader, same, ParquetWriter(f"{numbered}/out")])
    assert pipeline.run(report=add).rows_in == 24


def test_input_that_stays_unreadable_is_not_to_be_tried_again(numbered):
    path = numbered / "in/2.parquet"
    content = bytearray(path.read_bytes())
    content[10:60] = b"\xff" * 50  # a page; the footer, which is planned by, stays whole
    path.write_bytes(content)
    reader = ParquetReader(f"{numbered}/in/*.parquet")
    with pytest.raises(UnreadableInputError, match=r"2\.parquet.* cannot be read") as caught:
        Pipeline([reader, same, ParquetWriter(f"{numbered}/out")]).run()
    [note] = caught.value.__notes__
    assert note.startswith("part part-00002-")

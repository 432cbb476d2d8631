"""Input files that change while a job runs are noticed; those that do not are read."""

import os
from pathlib import Path

import pandas as pd
import pytest
from distributed import Client

from gpuclassify.jobs.input import files
from gpuclassify.jobs.input.files import ChangedInputError, _digest
from gpuclassify.jobs.input.readers import FileReader, JsonlReader, ParquetReader
from gpuclassify.jobs.ledger.records import JobChangedError
from gpuclassify.jobs.output.writers import ParquetWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.stores.store import UnreadableInputError


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
    told = rf"{number}\.{kind} is not what it was when the job began, it {words}: .*restart=True"
    with pytest.raises(ChangedInputError, match=told) as caught:
        Pipeline([reader, same, writer], on_error="quarantine").run(report=meddle)
    assert counts == ([0, 1, 2, 3] if number else [0, 1, 2, 3, 4])
    assert "to continue" not in str(getattr(caught.value, "__notes__", []))
    assert not (numbered / "out/_SUCCESS").exists()


def hold_others(path):
    """As many bytes at the same time, as `rsync -t` leaves them: in a new file."""
    before, new = path.stat(), path.with_name("new")
    new.write_bytes(path.read_bytes().replace(b'"t"', b'"u"'))
    os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
    new.replace(path)


def hold_others_in_place(path):
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b'"t"', b'"u"'))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def lines_job(folder, **options):
    reader = JsonlReader(f"{folder}/in/*.jsonl", **options)
    return Pipeline([reader, same, ParquetWriter(f"{folder}/out")])


@pytest.mark.parametrize("number", [0, 3], ids=["read already", "not yet"])
@pytest.mark.parametrize("change", [hold_others, hold_others_in_place])
def test_a_digest_tells_other_bytes_of_the_same_size_and_time(numbered, change, number):
    def meddle(done, total, summary):
        if done == 2:
            change((numbered / f"in/{number}.jsonl").resolve())

    told = (
        rf"{number}\.jsonl is not what .* it holds other bytes, as many as before: .*restart=True"
    )
    with pytest.raises(ChangedInputError, match=told):
        lines_job(numbered, input_digest=True).run(report=meddle)
    assert not (numbered / "out/_SUCCESS").exists()
    with pytest.raises(JobChangedError, match=rf"{number}\.jsonl.*sha256:"):
        lines_job(numbered, input_digest=True).run()


def test_a_digest_lets_files_have_other_times(numbered, monkeypatch):
    read = []
    monkeypatch.setattr(files, "_digest", lambda *call: read.append(call[0].path) or digest(*call))
    digest, paths = _digest, sorted(map(str, (numbered / "in").glob("*.jsonl")))

    def touch(done, total, summary):
        if done == 2:
            (numbered / "in/1.jsonl").touch()
            (numbered / "in/2.jsonl").touch()

    assert lines_job(numbered, input_digest=True).run(report=touch).rows_read == 24
    assert sorted(read) == sorted([*paths, *paths[1:3]])  # what was touched again, and once
    (numbered / "in/0.jsonl").touch()
    assert lines_job(numbered, input_digest=True).run().resumed_parts == 4
    with pytest.raises(JobChangedError):
        lines_job(numbered).run()


def test_a_plan_takes_no_digests(numbered, monkeypatch):
    monkeypatch.setattr(files, "_digest", None)
    assert lines_job(numbered, input_digest=True).plan(trial_seconds=None)


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
        assert summary.rows_read in (6, 24)


def test_files_that_come_later_are_none_of_the_jobs(numbered):
    def add(done, total, summary):
        (numbered / "in/new.jsonl").write_text('{"text": "new", "id": 24}\n')

    reader = JsonlReader(f"{numbered}/in/*.jsonl")
    pipeline = Pipeline([reader, same, ParquetWriter(f"{numbered}/out")])
    assert pipeline.run(report=add).rows_read == 24


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

"""Every row once in spite of killed clients and workers, crashes while publishing, and races."""

import json
import random
import shutil
import signal
import time
from pathlib import Path

import dask.dataframe as dd
import job_faults as faults
import pandas as pd
import pytest
from job_faults import in_process, job, result, slowly

from gpuclassify.jobs.job import PartsNote
from gpuclassify.jobs.ledger.manifest import DamagedMetadataError, JobChangedError, read_job
from gpuclassify.jobs.ledger.records import complete
from gpuclassify.jobs.output.writers import ParquetWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.report.report import report_of
from gpuclassify.jobs.stores.opening import open_store
from gpuclassify.jobs.task import run_part

pytestmark = pytest.mark.contract


def metadata(folder, name=""):
    return folder / "out" / "_gpuclassify" / name


def records(folder):
    return [json.loads(path.read_bytes()) for path in sorted(metadata(folder, "records").iterdir())]


def assert_whole(folder, expected):
    """The output equals an undisturbed run's, its metadata agrees, and nothing else is left."""
    pd.testing.assert_frame_equal(result(folder), expected)
    found = records(folder)
    parts = {path.name: path for path in (folder / "out").glob("*.parquet")}
    assert sorted(parts) == [record["name"] for record in found]
    assert all(parts[r["name"]].stat().st_size == r["file_bytes"] for r in found)
    assert sum(record["rows_out"] for record in found) == len(expected)
    manifest = metadata(folder, "manifest.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in manifest] == found
    assert list(metadata(folder, "attempts").iterdir()) == []
    assert (folder / "out" / "_SUCCESS").exists()


def test_an_undisturbed_run_has_every_row_once(folder, expected):
    assert expected["id"].tolist() == [i for i in range(600) if i % 3]
    assert expected["doubled"].tolist() == [2 * i for i in expected["id"]]
    job(folder).run()
    assert_whole(folder, expected)


def test_a_client_that_is_killed_again_and_again_finishes(folder, expected):
    random.seed(7)
    for done in range(2, 14, 2):
        process = in_process(faults.run_job, folder, slowly, done + 3)
        while len(list((folder / "out").glob("*.parquet"))) < done:
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.05))
        process.kill()
        process.join()
    done = len(list((folder / "out").glob("*.parquet")))
    assert not (folder / "out" / "_SUCCESS").exists()
    summary = job(folder, slowly).run()
    assert 12 <= done == summary.resumed_parts < len(summary.files) == 45
    assert_whole(folder, expected)


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("link", [7, 8, 9], ids=["intent", "part", "record"])
def test_a_crash_in_publishing_loses_and_doubles_nothing(folder, expected, link, is_done):
    """Links make the probe (2), job.json (1), and the intent, file and record of each part."""
    process = in_process(faults.run_job_until_link, folder, link, is_done)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    published = len(list((folder / "out").glob("*.parquet")))
    assert published == (1 if (link, is_done) < (8, True) else 2)
    assert job(folder).run().resumed_parts == published  # published parts are not done again
    assert_whole(folder, expected)


def test_of_racing_attempts_one_counts_and_all_know_which(folder):
    prepared = job(folder, faults.with_process).prepare()
    assert list(prepared.manifest.begin()) == []
    barrier, answers = faults.PROCESSES.Barrier(4), faults.PROCESSES.Queue()
    processes = [in_process(faults.race, folder, barrier, answers) for _ in range(4)]
    winners = [answers.get(timeout=240) for _ in range(20)]
    for process in processes:
        process.join()
    assert len(set(winners)) == 5  # every attempt names the same winner
    for record in records(folder):
        content = (folder / "out" / record["name"]).read_bytes()
        assert (record["name"], record["digest"]) in winners
        assert record["file_bytes"] == len(content)
    assert list(metadata(folder, "attempts").iterdir()) == []
    assert set(result(folder)["process"]) <= {process.pid for process in processes}


def test_a_loser_completes_the_work_of_a_winner_that_died(folder, expected):
    """The winner published its part, and died before its record."""
    process = in_process(faults.run_job_until_link, folder, 8, True)
    process.join()
    prepared = job(folder).prepare()
    name = max((folder / "out").glob("*.parquet")).name
    assert not any(name.startswith(path.stem) for path in metadata(folder, "records").iterdir())
    manifest = prepared.manifest
    assert complete(manifest.directory, name, manifest.encoding).name == name
    assert len(records(folder)) == 2
    job(folder).run()
    assert_whole(folder, expected)


def test_a_part_that_nobody_can_vouch_for_is_done_again(folder, expected):
    job(folder).run()
    [*_, record] = sorted(metadata(folder, "records").iterdir())
    record.unlink()
    part = next((folder / "out").glob(f"{record.stem}*"))
    part.write_bytes(b"half")
    cut = sorted((folder / "out").glob("*.parquet"))[0]
    cut.write_bytes(cut.read_bytes()[:-1])
    sorted(metadata(folder, "records").iterdir())[1].write_bytes(b"")  # power was lost
    gone = sorted((folder / "out").glob("*.parquet"))[2]
    gone.unlink()
    summary = job(folder).run()
    assert len(summary.files) - summary.resumed_parts == 4
    assert_whole(folder, expected)


def triple(frame):
    """Another stage, which makes another job."""
    return faults.double(frame).assign(tripled=frame["id"] * 3)


def assert_of_other(folder):
    """The output is complete, and all of it is from the job that has started over."""
    other = job(folder, triple).prepare().manifest
    assert "tripled" in result(folder)
    assert sorted(path.name for path in (folder / "out").glob("*.parquet")) == other.names()
    manifest = metadata(folder, "manifest.jsonl").read_text().splitlines()
    assert [json.loads(line)["name"] for line in manifest] == other.names()
    for path in ("_SUCCESS", "_report/report.json", "_gpuclassify/job.json"):
        assert json.loads((folder / "out" / path).read_text())["key"] == other.key


def restarting_at(folder, count):
    """A report function that starts over with other settings after a number of parts."""

    def report(done, total, summary):
        if done == count:
            job(folder, triple).run(restart=True)

    return report


@pytest.mark.parametrize("count", [3, 45], ids=["in between", "at the end"])
def test_a_run_stops_when_another_starts_over(folder, count):
    with pytest.raises(
        JobChangedError, match=r"another run has started over in .*/out: "
    ) as caught:
        job(folder).run(report=restarting_at(folder, count))
    assert "to continue" not in str(getattr(caught.value, "__notes__", []))
    assert_of_other(folder)


def test_partitions_of_a_frame_stop_too(folder):
    frame = dd.read_json(f"{folder}/in/*.jsonl", lines=True)
    writer = ParquetWriter(f"{folder}/out")

    def restart(part):
        if 200 in set(part["id"]):
            job(folder, triple).run(restart=True)
        return faults.double(part)

    with pytest.raises(JobChangedError, match="another run has started over"):
        Pipeline([frame, restart, writer]).run()
    assert_of_other(folder)


def test_a_run_that_ends_after_another_started_over_leaves_it_alone(folder):
    first = job(folder).prepare()
    first.run()
    part, name = first.source.input.parts[0], first.manifest.names()[0]
    late = [folder / "out" / name, metadata(folder, f"records/{Path(name).stem}.json")]
    contents = [path.read_bytes() for path in late]
    job(folder, triple).run(restart=True)
    with pytest.raises(JobChangedError, match="another run has started over in"):
        first.manifest.finish()
    assert_of_other(folder)
    for path, content in zip(late, contents, strict=True):  # a late attempt
        path.write_bytes(content)
    with pytest.raises(JobChangedError, match="another run has started over in"):
        run_part(part, 0, name, first.spec.pack())


@pytest.mark.parametrize("count", [3, 45], ids=["in between", "at the end"])
def test_metadata_that_vanishes_stops_the_run(folder, count):
    prepared = job(folder).prepare()
    prepared.run()
    next(metadata(folder, "records").iterdir()).unlink()
    with pytest.raises(JobChangedError, match=r"metadata of this job is gone from .*/out: "):
        prepared.manifest.finish()

    def remove(done, total, summary):
        if done == count:
            shutil.rmtree(folder / "out")

    with pytest.raises(JobChangedError, match=r"metadata of this job is gone from .*/out: "):
        job(folder).run(restart=True, report=remove)


def test_damaged_metadata_is_refused_and_starting_over_cures_it(folder, expected):
    job(folder, triple).run()
    for content in (b"", b"[]", b"\xff", b'{"key": "12'):
        metadata(folder, "job.json").write_bytes(content)
        with pytest.raises(DamagedMetadataError, match=r"job\.json is damaged, .*: start over"):
            job(folder).run()
        with pytest.raises(DamagedMetadataError, match="another directory"):
            report_of(open_store(f"{folder}/out"))
    again = job(folder, triple).run()  # the job itself still has its identity
    assert again.resumed_parts == again.parts
    assert read_job(open_store(f"{folder}/out"))["parts"] == again.parts
    foreign = folder / "out" / "part-00007-01234567.parquet"  # no job wrote it
    foreign.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="1 files that no job wrote"):
        job(folder).run(restart=True)
    foreign.unlink()
    assert job(folder).run(restart=True).resumed_parts == 0
    assert_whole(folder, expected)


def test_an_interrupted_run_says_how_to_continue(folder, expected):
    def interrupt(done, total, summary):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        job(folder).run(report=interrupt)
    assert caught.value.__notes__ == [
        f"3 of 45 parts are written to {folder}/out: run the same job again to continue"
    ]
    assert job(folder).run().resumed_parts == 3
    assert_whole(folder, expected)


def test_parts_that_workers_end_after_an_interrupt_are_counted_again(folder):
    def run_until(most):
        def interrupt(done, total, summary):
            if done == most:
                raise KeyboardInterrupt

        job(folder).run(report=interrupt)

    with pytest.raises(KeyboardInterrupt) as caught, PartsNote.counted_again():
        try:
            run_until(1)
        finally:
            with pytest.raises(KeyboardInterrupt):
                run_until(4)
    assert caught.value.__notes__ == [
        f"4 of 45 parts are written to {folder}/out: run the same job again to continue"
    ]
    assert job(folder).run().resumed_parts == 4


@pytest.mark.parametrize("fault", [faults.run_on_full_disk, faults.run_without_permission])
def test_a_full_disk_and_lost_permission_end_cleanly_and_resume(folder, expected, fault):
    process = in_process(faults.run_job_until_link, folder, 12, True)
    process.join()
    published = len(list((folder / "out").glob("*.parquet")))
    answers = faults.PROCESSES.Queue()
    process = in_process(fault, folder, answers)
    message, notes = answers.get(timeout=240)
    process.join()
    if fault is faults.run_without_permission:  # before any part is begun
        assert message == f"[Errno 13] Permission denied: '{folder}/out'"
    else:
        assert "part-" in message
        assert notes[0].startswith("part part-")
        assert notes[1] == (
            f"{published} of 45 parts are written to {folder}/out: run the same job again to "
            "continue"
        )
        assert list(metadata(folder, "attempts").iterdir()) == []
    assert job(folder).run().resumed_parts == published
    assert_whole(folder, expected)

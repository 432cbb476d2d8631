"""Exactly once on an object store, although processes die; the oracle is a run on a disk."""

import functools
import json
import os
import random
import signal
import threading

import job_faults as faults
import pandas as pd
import pytest
from job_faults import in_process, slowly

from tests.hub_server import RefusalError
from tests.processes import local_client

pytestmark = pytest.mark.slow
STEPS = {"intent": "attempts/part-", "part": "/out/part-", "record": "records/part-"}
UNPUBLISHED = [("intent", False), ("intent", True), ("part", False)]


def job(prefix, stage=faults.double):
    return faults.job(prefix, stage, faults.STORE_PART_BYTES)


def rows(bucket, prefix):
    frames = [pd.read_parquet(bucket.open(path)) for path in parts(bucket, prefix)]
    return pd.concat(frames).sort_values("id", ignore_index=True)


def parts(bucket, prefix):
    return sorted(bucket.glob(f"{prefix}/out/part-*.parquet"))


def assert_whole(bucket, prefix, expected):
    """The output equals an undisturbed run's, its records agree, and nothing else is left."""
    pd.testing.assert_frame_equal(rows(bucket, prefix), expected)
    books = f"{prefix}/out/_gpuclassify"
    records = [json.loads(bucket.cat(path)) for path in sorted(bucket.ls(f"{books}/records"))]
    sizes = {path.rpartition("/")[2]: bucket.size(path) for path in parts(bucket, prefix)}
    assert {record["name"]: record["file_bytes"] for record in records} == sizes
    assert sum(record["rows_out"] for record in records) == len(expected)
    manifest = bucket.cat(f"{books}/manifest.jsonl").splitlines()
    assert [json.loads(line) for line in manifest] == records
    assert not bucket.exists(f"{books}/attempts")
    assert bucket.exists(f"{prefix}/out/_SUCCESS")


def killing(processes, is_done):
    """A fault: the processes die when a request arrives, before or after it is carried out."""

    def kill():
        for process in processes:
            os.kill(process, signal.SIGKILL)
        if not is_done:
            raise RefusalError(503)

    return kill


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_a_client_that_dies_in_publishing(store, bucket, prefix, expected, step, is_done):
    processes = []
    store.fail("PUT", f"{prefix[5:]}.*{STEPS[step]}", None, killing(processes, is_done))
    process = in_process(faults.run_job_at, prefix, faults.double, store.environment)
    processes.append(process.pid)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    published = len(parts(bucket, prefix))
    assert published == (1 if (step, is_done) in UNPUBLISHED else 2)
    assert job(prefix).run().resumed_parts == published
    assert_whole(bucket, prefix, expected)


def test_clients_that_are_killed_again_and_again(store, bucket, prefix, expected):
    chance = random.Random(5)
    for _ in range(4):
        processes, step = [], STEPS[chance.choice(sorted(STEPS))]
        store.fail("PUT", f"{prefix[5:]}.*{step}", *[None] * 2, killing(processes, True))
        process = in_process(faults.run_job_at, prefix, faults.double, store.environment)
        processes.append(process.pid)
        process.join()
        assert process.exitcode == -signal.SIGKILL
    done = len(parts(bucket, prefix))
    assert 8 <= done < 12
    assert job(prefix).run().resumed_parts == done
    assert_whole(bucket, prefix, expected)


def test_workers_that_die_while_they_publish(store, bucket, prefix, expected):
    with local_client(2, processes=True) as client:
        workers = set(client.run(os.getpid).values())
        for worker, step, count in zip(workers, ["part", "record"], [2, 5], strict=True):
            outcomes = [*[None] * count, killing([worker], True)]
            store.fail("PUT", f"{prefix[5:]}.*{STEPS[step]}", *outcomes)
        assert job(prefix, slowly).run(client).rows_written == len(expected)
        assert not workers & set(client.run(os.getpid).values())
    assert_whole(bucket, prefix, expected)


def test_a_client_of_a_cluster_that_dies_is_followed_by_another(store, bucket, prefix, expected):
    with local_client(2, processes=True) as client:
        processes = []
        store.fail("PUT", f"{prefix[5:]}.*/out/part-", *[None] * 4, killing(processes, True))
        process = in_process(
            faults.run_job_at, prefix, slowly, store.environment, client.cluster.scheduler_address
        )
        processes.append(process.pid)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert job(prefix, slowly).run(client).resumed_parts >= 4
    assert_whole(bucket, prefix, expected)


def test_of_racing_clients_every_row_counts_once(store, bucket, prefix, expected):
    stage = faults.with_process
    meeting = threading.Barrier(2)  # both write at the same time
    store.fail("PUT", f"{prefix[5:]}.*/out/part-", *[functools.partial(meeting.wait, 120)] * 2)
    processes = [in_process(faults.run_job_at, prefix, stage, store.environment) for _ in range(2)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    found = rows(bucket, prefix)
    assert set(found["process"]) <= {process.pid for process in processes}
    pd.testing.assert_frame_equal(found.drop(columns="process"), expected)
    assert job(prefix, stage).run().resumed_parts == 12
    assert_whole(bucket, prefix, found)

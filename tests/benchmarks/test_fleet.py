"""Predictions obey arithmetic and stay as they were written, and fleets are measured as said."""

import hashlib
import heapq
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import fineweb, fineweb_comparison
from benchmarks import fleet as fleets
from benchmarks.fleet import Job, Machine, operations_per_row, predict
from benchmarks.models import SHAPES
from benchmarks.names import RESULTS
from benchmarks.simulated import fleet
from benchmarks.texts import LENGTHS, Lengths
from benchmarks.work import forward_operations
from tests.processes import is_running, wait_until

JOB = Job(rows=1e6, rows_per_partition=1e4, bytes_per_row=1e3, operations_per_row=1e10)
MACHINE = Machine(
    rows_per_second=100,
    read_bytes_per_second=1e7,
    storage_bytes_per_second=1e9,
    partition_seconds=4,
    scheduler_seconds=0.01,
    start_seconds=60,
    losses_per_gpu_hour=0,
    straggler=1,
    price_per_gpu_hour=2,
)
PARTITION_SECONDS = 1e4 / 100 + 1e7 / 1e7 + 4


def jobs():
    rows = st.floats(1, 1e10)
    return st.builds(Job, rows, st.floats(1, 1e6), st.floats(1, 1e5), st.just(1e10))


def machines():
    return st.builds(
        Machine,
        rows_per_second=st.floats(0.1, 1e4),
        read_bytes_per_second=st.floats(1e6, 1e10),
        storage_bytes_per_second=st.floats(1e6, 1e13),
        partition_seconds=st.floats(0, 10),
        scheduler_seconds=st.floats(0, 0.1),
        start_seconds=st.floats(0, 1e3),
        losses_per_gpu_hour=st.just(0.0),
        straggler=st.floats(1, 5),
        price_per_gpu_hour=st.floats(0, 100),
    )


@given(jobs(), machines(), st.integers(1, 10_000), st.integers(1, 10_000))
def test_more_gpus_are_never_slower_and_work_costs_what_it_costs(job, machine, one, other):
    few, many = (predict(job, machine, gpus) for gpus in sorted((one, other)))
    assert many.hours <= few.hours * (1 + 1e-9)
    floor = job.rows / machine.rows_per_second / 3600
    for found in (few, many):
        assert found.gpu_hours >= floor * (1 - 1e-9)
        assert 0 < found.efficiency <= 1 + 1e-9
        assert found.cost == pytest.approx(found.gpu_hours * machine.price_per_gpu_hour)
        assert found.hours * 3600 >= machine.start_seconds
        assert found.hours * 3600 >= job.partitions * machine.scheduler_seconds
        assert found.hours * 3600 >= job.rows * job.bytes_per_row / machine.storage_bytes_per_second


def simulated_seconds(partitions, seconds, gpus):
    """When the last is done, if each GPU takes the next partition as soon as it is free."""
    free = [0.0] * gpus
    for _ in range(partitions):
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


@pytest.mark.parametrize("gpus", [1, 7, 99, 100, 101])
def test_workers_take_as_long_as_partitions_handed_out_one_by_one(gpus):
    found = predict(JOB, MACHINE, gpus)
    assert found.limit == "workers"
    assert found.hours * 3600 == pytest.approx(60 + simulated_seconds(100, PARTITION_SECONDS, gpus))


def test_what_is_shared_limits_a_large_fleet():
    slow = replace(MACHINE, scheduler_seconds=3)
    assert predict(JOB, slow, 1_000).limit == "scheduler"
    assert predict(JOB, slow, 1_000).hours * 3600 == pytest.approx(60 + 100 * 3)
    far = replace(MACHINE, storage_bytes_per_second=1e6)
    assert predict(JOB, far, 1_000).limit == "storage"
    assert predict(JOB, far, 1_000).hours * 3600 == pytest.approx(60 + 1_000)
    assert predict(JOB, far, 1).limit == "workers"


def test_lost_machines_and_slow_partitions_take_time():
    lost = predict(JOB, replace(MACHINE, losses_per_gpu_hour=6), 10)
    # Six times in an hour a start of 60 s and half a partition are lost.
    kept = 1 - 6 * (60 + PARTITION_SECONDS / 2) / 3600
    assert lost.hours * 3600 == pytest.approx(60 + 10 * PARTITION_SECONDS / kept)
    slow = predict(JOB, replace(MACHINE, straggler=3), 10)
    assert slow.hours * 3600 == pytest.approx(60 + 12 * PARTITION_SECONDS)
    with pytest.raises(ValueError, match="leave no time for work: make partitions smaller"):
        predict(JOB, replace(MACHINE, losses_per_gpu_hour=60), 10)


def test_operations_of_a_row_are_those_of_its_tokens():
    shape = SHAPES["bert"]
    found = operations_per_row(Lengths(300, 1e-9), shape)
    assert found == pytest.approx(forward_operations([300], shape))
    cut = operations_per_row(Lengths(5_000, 1e-9), shape)
    assert cut == pytest.approx(forward_operations([512], shape))


def test_a_measured_rate_takes_the_place_of_a_share_of_the_peak(tmp_path, capsys):
    corpus = {"variants": {"gpuclassify": {"real_tokens_per_second": 1_000.0}}}
    result = tmp_path / "throughput.json"
    result.write_text(json.dumps({"corpora": {"web": corpus}}))
    path = fleets.main(
        ["--rows", "1e6", "--gpus", "1,4", "--result", str(result), "--output", str(tmp_path)]
    )
    found = json.loads(path.read_text())
    mean = sum(min(length, 512) for length in LENGTHS["web"].sample(2_000)) / 2_000
    assert found["assumptions"]["rows_per_second"] == pytest.approx(1_000 / mean)
    assert [one["gpus"] for one in found["predictions"]] == [1, 4]
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert "rows/s a GPU" in capsys.readouterr().out


def committed(question):
    [path] = RESULTS.glob(f"{question}-*.json")
    return path


def test_the_prediction_stands_as_it_was_written(tmp_path):
    written = committed("fleet-prediction")
    again = json.loads(fineweb.main(["--output", str(tmp_path)]).read_text())
    before = json.loads(written.read_text())
    assert before.pop("finished") < again.pop("finished")
    assert same(before, again)
    comparison = json.loads(committed("fleet-comparison").read_text())
    assert comparison["prediction_sha256"] == hashlib.sha256(written.read_bytes()).hexdigest()
    assert comparison["prediction_finished"] < comparison["finished"]


def same(one, other):
    """Equal, numbers but for rounding."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return math.isclose(one, other, rel_tol=1e-9)
    return one == other


def test_the_comparison_shows_both(capsys, tmp_path):
    path = fineweb_comparison.main([str(committed("fleet-prediction")), "--output", str(tmp_path)])
    found = json.loads(path.read_text())
    ratio = found["predicted"]["hours"] / found["published"]["hours"]
    assert found["predicted_to_published"] == pytest.approx(ratio)
    low, high = found["predicted_hours_between"]
    assert low < found["predicted"]["hours"] < high
    assert f"published about {found['published']['hours']:g}" in capsys.readouterr().out


def test_a_fleet_is_gone_after_its_block():
    with fleet(2) as processes:
        others = processes.processes["scheduler and workers"]
        assert processes.address.startswith("tcp://127.0.0.1:")
    wait_until(lambda: not is_running(others.pid))


def test_a_smoke_run_of_scheduling_counts_every_partition(smoke_run):
    result, _, _ = smoke_run("scheduling")
    assert list(result["ways"]) == ["job", "lazy frame"]
    for found in result["ways"].values():
        assert found["partitions"] == result["settings"]["partitions"]
        per_partition = found["seconds"] / found["partitions"]
        assert found["seconds_per_partition"] == pytest.approx(per_partition)
        assert list(found["core_seconds_per_partition"]) == ["client", "scheduler and workers"]
        assert all(spent > 0 for spent in found["core_seconds_per_partition"].values())
        assert all(added >= 0 for added in found["resident_bytes_added"].values())


def test_a_smoke_run_of_workers_shares_the_cores_out(smoke_run):
    result, _, _ = smoke_run("workers")
    one, many = result["variants"].values()
    assert len(one["torch_threads_of_workers"]) == 1
    assert len(many["torch_threads_of_workers"]) == 2
    best = min(one["median_seconds"], many["median_seconds"])
    ratio = best / result["variants"][result["default"]]["median_seconds"]
    assert result["default_against_best"]["ratio_of_medians"] == pytest.approx(ratio)
    assert result["largest_difference"] < 1e-4
    assert len(one["core_seconds"]) == result["settings"]["repeats"]

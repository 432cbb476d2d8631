"""Memory and cores are those of the tightest control group above the process."""

import os
import sys
from unittest.mock import Mock

import psutil
import pytest

from gpuclassify.classifiers.fasttext.runner import compute_threads
from gpuclassify.cluster import preload
from gpuclassify.cluster.sizing import cpu_cluster_options
from gpuclassify.workers import machine
from gpuclassify.workers.device_errors import free_host_bytes

GB = 2**30
# Files of memory and of CPUs by the generation of control groups.
NAMES = {
    2: ("memory.max", "memory.current", "inactive_file", "cpu.max"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", None),
}


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def made(request, tmp_path, monkeypatch):
    """A process below two groups: a function that sets what a group's files say."""
    generation = request.param
    root = tmp_path / "mount"
    process = tmp_path / "process"
    process.mkdir()
    path = "/user.slice/job_7/step_0"
    (root / path[1:]).mkdir(parents=True)
    kind = "cgroup2 cgroup2 rw" if generation == 2 else "cgroup cgroup rw,{}"
    entries = ("",) if generation == 2 else ("memory", "cpu")
    (process / "cgroup").write_text(
        "".join(f"{n}:{name}:{path}\n" for n, name in enumerate(entries)) + "9:pids:/elsewhere\n"
    )
    (process / "mountinfo").write_text(
        "21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw\n"
        + "".join(f"30 21 0:26 / {root} rw - {kind.format(name)}\n" for name in entries)
    )
    monkeypatch.setattr(machine, "PROCESS", process)
    memory, used, reclaimable, _ = NAMES[generation]

    def limit(group, memory_bytes=None, used_bytes=0, file_bytes=0, cpus=None):
        folder = root / group
        if memory_bytes is not None:
            (folder / memory).write_text(f"{memory_bytes}\n")
            (folder / used).write_text(f"{used_bytes}\n")
            (folder / "memory.stat").write_text(f"anon 1\n{reclaimable} {file_bytes}\n")
        if cpus is not None and generation == 2:
            (folder / "cpu.max").write_text(f"{int(cpus * 100_000)} 100000\n")
        elif cpus is not None:
            (folder / "cpu.cfs_quota_us").write_text(f"{int(cpus * 100_000)}\n")
            (folder / "cpu.cfs_period_us").write_text("100000\n")

    return limit


@pytest.mark.parametrize("group", ["user.slice", "user.slice/job_7", "user.slice/job_7/step_0"])
def test_the_tightest_level_counts(made, group):
    made("user.slice", 5 * GB, cpus=64)
    made(group, 3 * GB, used_bytes=GB, file_bytes=GB // 2, cpus=0.5)
    assert machine.usable_memory() == 3 * GB
    assert machine.free_memory() == free_host_bytes() == 5 * GB // 2
    assert machine.usable_cores() == 1
    options, _ = cpu_cluster_options(n_workers=2)
    assert options["memory_limit"] == 3 * GB // 2
    asked = {"memory_limit": "1GB"}
    assert cpu_cluster_options(asked, n_workers=2)[0]["memory_limit"] == "1GB"


@pytest.mark.parametrize("no_limit", ["max", -1, 2**63 - 4096])
def test_groups_without_limits_leave_the_machine(made, no_limit):
    made("user.slice/job_7", no_limit)
    assert machine.usable_memory() == psutil.virtual_memory().total
    assert abs(machine.free_memory() - psutil.virtual_memory().available) < GB
    assert machine.usable_cores() == len(os.sched_getaffinity(0))
    assert "memory_limit" not in cpu_cluster_options(n_workers=2)[0]


def test_another_system_has_no_groups(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "PROCESS", tmp_path)
    assert machine.usable_memory() == psutil.virtual_memory().total


def test_the_load_is_the_time_of_other_processes_since_the_meter_began(monkeypatch):
    """Of a machine of four cores: ten seconds, of which others worked 15 core seconds."""
    times, user = type(psutil.cpu_times()), [100.0, 125.0]
    now, own, empty = [0.0, 10.0], [50.0, 60.0], dict.fromkeys(times._fields, 0.0)
    readings = iter(user)
    monkeypatch.setattr(
        psutil, "cpu_times", lambda: times(**{**empty, "user": next(readings), "idle": 7.0})
    )
    monkeypatch.setattr(machine, "own_core_seconds", iter(own).__next__)
    monkeypatch.setattr(machine.time, "perf_counter", iter(now).__next__)
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (3.0, 5.0, 9.0))
    load = machine.LoadMeter().read()
    assert load == machine.CpuLoad(4, 2, other_cores=1.5, load_average=5.0)
    assert (load.is_idle, load.idle_share, load.slowdown) == (False, 1.0, 1.75)


@pytest.mark.parametrize(
    ("value", "threads"),
    [("3", 3), ("4,2", 4), (" 4 , 2", 4), ("0", 0), ("", 0), ("x", 0), ("-1", 0), ("²", 0)],
)
def test_variables_without_a_number_of_threads_leave_the_default(monkeypatch, value, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert machine.threads_in("OMP_NUM_THREADS") == threads
    assert compute_threads() == (threads or machine.usable_cores())
    settings = Mock()
    monkeypatch.setattr(preload, "ProcessSettings", settings)
    preload.dask_setup(Mock())
    settings.assert_called_once_with(threads if threads > 1 else None)

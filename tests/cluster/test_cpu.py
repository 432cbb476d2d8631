"""How a CPU machine is cut into workers and torch threads."""

import dask.system
import pytest

from gpuclassify.cluster.cpu import cpu_cluster_options, usable_cores


@pytest.mark.parametrize(
    ("cores", "n_workers", "expected_workers", "expected_threads"),
    [
        (1, None, 1, 1),
        (2, None, 1, 2),
        (7, None, 1, 7),
        (8, None, 1, 8),
        (16, None, 2, 8),
        (20, None, 2, 10),
        (64, None, 8, 8),
        (16, 5, 5, 3),
        (2, 4, 4, 1),
    ],
)
def test_workers_times_torch_threads_stay_within_the_cores(
    cores, n_workers, expected_workers, expected_threads
):
    options, torch_threads = cpu_cluster_options(cores=cores, n_workers=n_workers)
    assert options == {"n_workers": expected_workers, "threads_per_worker": 1}
    assert torch_threads == expected_threads


def test_other_options_are_passed_on():
    options, _ = cpu_cluster_options({"memory_limit": "1GB"}, cores=4, threads_per_worker=3)
    assert options == {"n_workers": 1, "threads_per_worker": 3, "memory_limit": "1GB"}


def test_usable_cores_are_those_that_dask_counts():
    assert usable_cores() == dask.system.cpu_count()

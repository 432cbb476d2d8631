"""The benchmark of whole jobs, with a tiny model and few parts."""

import pytest

from benchmarks.jobs import FRAME, JOB


def test_the_benchmark_of_jobs_runs_and_its_table_reads(smoke_run):
    result, _, table = smoke_run("jobs")
    overhead, resume = result["overhead"], result["resume"]
    ratio = (
        overhead["variants"][JOB]["median_seconds"] / overhead["variants"][FRAME]["median_seconds"]
    )
    assert overhead["overhead"] == pytest.approx(ratio - 1)
    assert [found["parts"] for found in result["growth"]] == [4, 8]
    assert 0 < resume["computed_when_killed"] <= resume["parts"]
    assert resume["computed_again"] <= resume["workers"]
    assert f"{resume['computed_again']} computed again" in table

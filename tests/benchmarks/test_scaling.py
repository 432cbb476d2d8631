"""A smoke run of the scaling benchmark writes a complete result."""

import pytest

from tests.benchmarks.checks import check_times


def test_a_smoke_run_of_scaling_writes_a_complete_result(scaling_run):
    result, _, table = scaling_run
    settings, partitions, rows = result["settings"], result["partitions"], result["rows"]
    assert partitions["partitions"] == {"one partition": 1, "small partitions": 4}
    names = ["pipeline held", "sorted batches of 32", "Curator's stages, batch 32", "gpuclassify"]
    assert list(partitions["variants"]) == names
    for found in partitions["variants"].values():
        check_times(found["one partition"], settings)
        small = found["small partitions"]["median_seconds"]
        ratio = small / found["one partition"]["median_seconds"]
        assert found["time_ratio"] == pytest.approx(ratio)
    assert rows["documents"] == [3, 12]
    assert rows["token_ratio"] == rows["tokens"][1] / rows["tokens"][0] > 2
    assert list(rows["variants"]) == ["pipeline held", "gpuclassify"]
    for found in rows["variants"].values():
        few, many = (times["median_seconds"] for times in found["times"])
        assert found["time_ratio"] == pytest.approx(many / few)
    assert "12 documents in partitions of 3 rows instead of one" in table

"""A smoke run of the benchmark of heads writes a complete result."""

import pytest

from tests.benchmarks.checks import check_speed_up, check_times


def test_a_smoke_run_of_heads_writes_a_complete_result(smoke_run):
    result, _, shown = smoke_run("heads")
    settings, variants = result["settings"], result["variants"]
    assert list(variants) == ["one head", "several heads", "a pass for each"]
    for found in variants.values():
        check_times(found, settings)
    assert result["documents"] == settings["documents"]
    assert set(result["cost"]) == {"several heads", "a pass for each"}
    for name, cost in result["cost"].items():
        check_speed_up(cost, variants[name]["seconds"], variants["one head"]["seconds"])
        assert f"{cost['ratio_of_medians']:.3f} times" in shown
    share = result["heads_seconds"] / variants["one head"]["median_seconds"]
    assert share == pytest.approx(0, abs=0.2)

"""A smoke run of the benchmark of training writes a complete result."""

from tests.benchmarks.checks import check_times


def test_a_smoke_run_of_training_writes_a_complete_result(smoke_run):
    result, _, _ = smoke_run("training")
    variants = result["variants"]
    assert list(variants) == ["embedding, mean", "linear", "mlp", "embedding, cls", "pooler"]
    for found in variants.values():
        check_times(found, result["settings"])
    for kind, baseline in (("linear", "mean"), ("mlp", "mean"), ("pooler", "cls")):
        medians = [variants[name]["median_seconds"] for name in (kind, f"embedding, {baseline}")]
        assert result["times_embedding"][kind] == medians[0] / medians[1]

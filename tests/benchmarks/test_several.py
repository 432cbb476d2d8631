"""A smoke run of the benchmark of several classifiers writes a complete result."""

from tests.benchmarks.checks import check_speed_up, check_times


def test_a_smoke_run_of_several_writes_a_complete_result(smoke_run):
    result, _, _ = smoke_run("several")
    settings, variants = result["settings"], result["variants"]
    assert list(variants) == ["separate passes", "chained", "classify"]
    for found in variants.values():
        check_times(found, settings)
    texts = result["documents"]
    assert texts == settings["documents"]
    tokenized = [found["tokenized_texts"] for found in variants.values()]
    assert tokenized == [3 * texts, 3 * texts, texts]
    assert set(result["speed_up"]) == {"separate passes", "chained"}
    for name, speed_up in result["speed_up"].items():
        check_speed_up(speed_up, variants[name]["seconds"], variants["classify"]["seconds"])

"""Smoke runs of fastText's benchmarks, and what the one of scale makes of its samples."""

import pyarrow.parquet as pq
import pytest

from benchmarks import plots
from benchmarks.fasttext import FRAME, LIBRARY
from benchmarks.scale import find_pace, memory_growth, write_corpus
from tests.benchmarks.checks import check_speed_up, check_times
from tests.benchmarks.test_plots import is_drawn


def sample(rows, seconds, yardstick=1.0, client=100, workers=(10, 10), model=5):
    sizes = {"client_bytes": client, "workers_bytes": [*workers], "model_bytes": model}
    return {"rows": rows, "seconds": seconds, "yardstick_seconds": yardstick, **sizes}


def test_pace_is_the_seconds_of_each_further_thousand_rows():
    samples = [sample(500, 1.0), sample(1_000, 2.0), sample(2_000, 4.0), sample(3_000, 7.0)]
    pace = find_pace(samples, 1_000)
    assert pace["seconds"] == [2.0, 2.0, 3.0]
    assert pace["largest_deviation"] == pytest.approx(0.5)


def test_yardsticks_tell_a_slower_machine_from_a_slower_job():
    samples = [sample(1_000, 2.0), sample(1_500, 3.5, 1.4), sample(2_000, 5.0, 1.6)]
    pace = find_pace([*samples, sample(3_000, 7.0)], 1_000)
    assert pace["yardstick_seconds"] == pytest.approx([1.0, 1.5, 1.0])
    assert pace["largest_deviation"] == pytest.approx(0.5)
    assert pace["largest_deviation_in_yardsticks"] == pytest.approx(0.0)


def test_growth_is_between_the_second_and_the_last_tenth():
    samples = [sample(n, n, client=100 + n, workers=(n, 1)) for n in range(20)]
    assert memory_growth(samples) == {"client": 16, "workers": 16, "model": 0}


def test_documents_are_all_different_and_the_same_every_time(tmp_path):
    told = [write_corpus(tmp_path / name, 250, 100) for name in ("a", "b")]
    first, second = (pq.read_table(tmp_path / name) for name in ("a", "b"))
    assert first.equals(second)
    assert len(set(first["text"].to_pylist())) == told[0]["rows"] == 250
    assert 60 < told[0]["mean_text_bytes"] < 250
    assert len(list((tmp_path / "a").iterdir())) == 3


def test_a_smoke_run_of_scale_notes_time_and_memory_of_each_part(smoke_run, tmp_path):
    result, path, _ = smoke_run("scale")
    assert [one["rows"] for one in result["samples"]] == [*range(500, 6_500, 500)]
    assert len(result["pace"]["seconds"]) == len(result["pace"]["yardstick_seconds"]) == 6
    last = result["samples"][-1]
    assert last["seconds"] <= result["seconds"]
    assert min(last["client_bytes"], *last["workers_bytes"], last["model_bytes"]) > 2**20
    (picture,) = plots.main([str(path), "--output", str(tmp_path)])
    assert is_drawn(picture)


def test_a_smoke_run_of_fasttext_writes_a_complete_result(smoke_run):
    result, _, table = smoke_run("fasttext")
    times = result["variants"]
    assert list(times) == [LIBRARY, FRAME, "1 worker", "2 workers"]
    for found in times.values():
        check_times(found, result["settings"])
    check_speed_up(result["speed_up"][FRAME], times[LIBRARY]["seconds"], times[FRAME]["seconds"])
    assert result["largest_difference"] < 1e-6
    assert [found["workers"] for found in result["memory"]] == [1, 2]
    one, two = (found["model_bytes"] for found in result["memory"])
    assert two < 1.8 * one
    assert "of which the largest alone" in table

"""Time and tokens of a whole job go to what spends them."""

from types import SimpleNamespace

import dask
import dask.dataframe as dd
import pandas as pd
import pytest
from transformers import AutoTokenizer

from benchmarks import job
from benchmarks.job import CLASSIFY, READ, WRITE, Timeline, measure_job


def test_time_of_a_job_goes_to_the_phase_that_spends_it(monkeypatch, tmp_path):
    clock = SimpleNamespace(seconds=0.0)

    def now():
        clock.seconds += 0.001
        return clock.seconds

    def delay(partition):
        clock.seconds += 0.2
        return partition

    monkeypatch.setattr(job, "time", SimpleNamespace(perf_counter=now))
    dd.from_pandas(pd.DataFrame({"text": list("abcd")}), npartitions=2).to_parquet(tmp_path / "in")
    timeline = Timeline()
    with timeline, dask.config.set(scheduler="synchronous"):
        frame = dd.read_parquet(tmp_path / "in")
        for function, options in [
            (timeline.mark, {"phase": CLASSIFY}),
            (delay, {}),
            (timeline.mark, {"phase": WRITE}),
        ]:
            frame = frame.map_partitions(function, meta=frame._meta, **options)
        frame.to_parquet(tmp_path / "out")
        timeline.enter(WRITE)
    seconds = timeline.seconds
    assert seconds[CLASSIFY] == pytest.approx(0.4, abs=0.01)
    assert 0 < seconds[READ] < 0.05
    assert 0 < seconds[WRITE] < 0.05


def test_a_job_tells_what_its_tokens_and_its_time_went_to(tiny_model, some_texts):
    found = measure_job(some_texts, 2, tiny_model, "cpu")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    lengths = [min(len(ids), 512) for ids in tokenizer(some_texts)["input_ids"]]
    assert found["tokens"] == sum(lengths)
    assert found["padding"] == found["padded_tokens"] / found["tokens"] >= 1
    assert list(found["shares"]) == ["plan", "read", "wait_for_tokens", "model", "write", "rest"]
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert all(share > 0 for share in found["shares"].values())
    assert found["tokenize_seconds"] > 0

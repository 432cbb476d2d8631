"""What a run on a GPU tells of the GPU: how busy it was, and its memory against the plan."""

import time

import pandas as pd
import pytest
import torch

from benchmarks.device import WORKSPACE_BYTES
from gpuclassify import DistributedDataClassifier
from gpuclassify.workers.device_report import nvml_source, watched
from gpuclassify.workers.run_context import RunStats, collected_stats
from tests.replicas import sample_texts

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")


def test_a_run_tells_how_busy_the_gpu_was_and_keeps_to_its_plan(sequence_classifier):
    frame = pd.DataFrame({"text": sample_texts(3_000, seed=1, max_words=60)})
    classifier = DistributedDataClassifier(model=str(sequence_classifier()), device="cuda")
    with collected_stats() as runs:
        classifier(frame)
    (stats,) = runs
    assert 0 < stats.peak_torch_bytes <= stats.peak_planned_bytes + WORKSPACE_BYTES
    assert stats.peak_torch_bytes < stats.peak_device_bytes
    if stats.device_sampled_seconds is not None:  # else it is a slice
        assert 0 <= stats.device_busy_seconds <= stats.device_sampled_seconds


def test_a_gpu_that_multiplies_is_busy():
    stats = RunStats()
    if nvml_source(GPU)().busy_share is None:
        pytest.skip("a MIG slice does not tell how busy it is")
    matrix = torch.randn(4_096, 4_096, device=GPU)
    with watched(GPU, stats):
        until = time.monotonic() + 3
        while time.monotonic() < until:
            (matrix @ matrix).sum().item()
    assert stats.device_busy_seconds > 0.5 * stats.device_sampled_seconds


def test_memory_that_others_take_is_seen():
    torch.cuda.empty_cache()  # else torch may have so much from before
    before = nvml_source(GPU)().used_bytes
    taken = torch.empty(2**30, dtype=torch.uint8, device=GPU)
    assert nvml_source(GPU)().used_bytes >= before + 2**29
    del taken

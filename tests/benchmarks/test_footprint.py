"""Memory is what the system says, and a footprint that of a process of its own."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import throughput
from benchmarks.footprint import Request, measure_footprint
from benchmarks.models import SHAPES
from benchmarks.names import SUBJECT
from benchmarks.ways import Way, choose_ways
from tests.benchmarks.cpu_ways import asked

MEMORY = """
import numpy as np, psutil
from benchmarks.footprint import peak_resident_bytes, resident_bytes

before = resident_bytes()
assert abs(before / psutil.Process().memory_info().rss - 1) < 0.05
block = np.ones(25_000_000)
most = resident_bytes()
assert abs((most - before) / block.nbytes - 1) < 0.1
del block
assert resident_bytes() < 0.9 * most
assert peak_resident_bytes() > 0.99 * most  # the system counts pages in lots
"""


def test_memory_is_what_the_system_says():
    # In a process of its own: in this one other tests' memory comes and goes.
    folder = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", MEMORY], check=True, cwd=folder, timeout=280)


def test_a_footprint_is_that_of_a_process_of_its_own(tiny_model, some_texts):
    ways = choose_ways(asked(variants=[SUBJECT]), tiny_model)
    options = asked(footprint="main", partitions=2, threads=1)
    setting = throughput.Setting(options, SHAPES["bert"], tiny_model, "", ways)
    block = np.ones(50_000_000)  # 400 MB of this process have no part in it
    footprints = throughput._footprints(some_texts, ways.ways[1:], setting)
    assert list(footprints) == ["gpuclassify"]
    found = footprints["gpuclassify"]
    assert found["resident_bytes_before"] < found["peak_resident_bytes"]
    assert found["peak_resident_bytes"] - found["resident_bytes_before"] < block.nbytes
    assert found["first_documents"] == 8
    assert min(found["first_seconds"], found["first_run_seconds"]) > 0
    loading = found["first_seconds"] - found["first_run_seconds"]
    assert found["first_load_seconds"] == pytest.approx(loading)
    [line] = throughput._footprint_lines({"footprints": footprints})
    assert line.startswith("  gpuclassify in a new process:")


def test_the_last_words_of_a_failed_process_are_told(some_texts):
    way = Way("no way", scores=len)
    with pytest.raises(RuntimeError, match=r"'no way' ended with 1: (.|\n)*TypeError: len"):
        measure_footprint(Request(way, tuple(some_texts), 2, "", "cpu", 1))

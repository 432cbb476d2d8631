"""A process sees the limit of a real control group above its own, as Slurm and systemd set it."""

import os
import subprocess
import sys

import pytest

from gpuclassify.workers.machine import _groups
from tests.processes import search_path

pytestmark = pytest.mark.system
GB = 2**30
LIMITS = ("memory.limit_in_bytes", "memory.max")
CODE = """
import os, sys
with open(sys.argv[1], "w") as file:
    file.write(str(os.getpid()))
from gpuclassify.workers.machine import free_memory, usable_memory
print(usable_memory(), free_memory())
"""


def test_the_limit_of_a_group_above_counts():
    limited = [(group, name) for group in _groups("memory") for name in LIMITS]
    group, name = next((group, name) for group, name in limited if (group / name).exists())
    if not os.access(group, os.W_OK):
        pytest.skip(f"{group} cannot be written to here")
    job = group / "gpuclassify-test"
    step = job / "step"
    step.mkdir(parents=True)
    try:
        (job / name).write_text(str(3 * GB))
        done = subprocess.run(
            [sys.executable, "-c", CODE, step / "cgroup.procs"],
            env=os.environ | {"PYTHONPATH": search_path()},
            capture_output=True,
            text=True,
            check=True,
        )
        usable, free = map(int, done.stdout.split())
        assert usable == 3 * GB
        assert 2 * GB < free <= 3 * GB
    finally:
        step.rmdir()
        job.rmdir()

"""Whatever fails while a command writes, the same command ends as if nothing had.

A point is a change of the file system or a damaged file. It is healed if the same command then
gives the rows and files of an undisturbed run and nothing else, or refused if it names a cure that
does. `tests.faults.harness` tells how points are made.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.cases import CASES
from tests.faults.harness import DAMAGE, END, ERROR, FULL, MODES

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
# Of these, which write hundreds of files in a run, points are spread over all but one mode's.
LONG = {"dedup-fuzzy", "dedup-rounds", "dedup-semantic"}
MOST_OF_LONG = 120
SHARE_OF_LONG = 4  # of fewer points that are asked for


def tried(*words):
    """What the harness, in a process of its own, prints of cases and modes."""
    done = subprocess.run(
        [sys.executable, str(HERE), *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_all_held(outcomes):
    failures = [
        f"{outcome['case']}: {failure}" for outcome in outcomes for failure in outcome["failures"]
    ]
    assert not failures, "\n".join(failures)
    assert all(outcome["points"] for outcome in outcomes)
    assert not any(outcome["leftovers"] for outcome in outcomes)


@pytest.mark.parametrize(
    ("cases", "most"),
    [
        (
            (
                "classify-jsonl",
                "classify-quarantine",
                "buckets",
                "decontaminate",
                "sample",
                "thresholds",
                "clusters",
                "train",
                "convert",
                "upload",
            ),
            3,
        ),
        (("annotate", "select", "mix"), 6),
        (("dedup-exact", "dedup-rounds"), 2),
    ],
    ids=["jobs", "annotations", "steps"],
)
def test_some_points_of_each_command(cases, most):
    assert_all_held(tried(*cases, "--most", most, "--modes", END, FULL, ERROR, DAMAGE))


@pytest.mark.faults
@pytest.mark.timeout(8 * 3600)
@pytest.mark.parametrize("case", CASES)
def test_every_point(case, record_property, request):
    most = request.config.getoption("fault_points")
    if case not in LONG:
        outcomes = tried(case, *(("--most", most) if most else ()))
    elif most:
        outcomes = tried(case, "--most", max(1, most // SHARE_OF_LONG))
    else:
        others = [mode for mode in MODES if mode != END]
        outcomes = tried(case, "--modes", END)
        outcomes += tried(case, "--modes", *others, "--most", MOST_OF_LONG)
    for outcome in outcomes:
        told = {
            name: value for name, value in outcome.items() if name not in ("failures", "seconds")
        }
        record_property("outcome", told | {"failed": len(outcome["failures"])})
    assert_all_held(outcomes)

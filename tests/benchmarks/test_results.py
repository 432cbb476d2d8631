"""What is committed and shown was measured on a quiet machine."""

import json
import re

import pytest

from benchmarks import RESULTS
from benchmarks.harness import noise

ROOT = RESULTS.parents[1]
COMMITTED = sorted(RESULTS.glob("*.json"))
DOCS = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")]
PAGES = ["README.md", "benchmarks/README.md", *sorted(DOCS)]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_no_committed_result_is_noisy(path):
    report = json.loads(path.read_text())
    steps = report.get("steps", [{"results": [report]}])  # a run on a GPU has several
    for result in (result for step in steps for result in step["results"]):
        if "cores" in result.get("machine", ()):  # others are arithmetic
            assert noise(result) == []
        assert not result.get("noisy")


def test_every_picture_shows_a_committed_result():
    stems = [path.stem for path in COMMITTED]
    pictures = [path.stem for path in RESULTS.glob("*.png")]
    assert all(picture.startswith(tuple(stems)) for picture in pictures)


@pytest.mark.parametrize("page", PAGES)
def test_every_result_that_a_page_names_is_committed(page):
    named = set(re.findall(r"\bresults/([\w.*-]+\.(?:json|png))", (ROOT / page).read_text()))
    assert {name for name in named if not list(RESULTS.glob(name))} == set()

"""Measurements of gpuclassify: one file for each question. See README.md."""

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

# Names in results, for those who only read them: nothing heavy is imported here.
RESULTS = Path(__file__).with_name("results")
BASELINE = "pipeline held"
SUBJECT = "gpuclassify"


def new_path(folder: Path, stem: str) -> Path:
    """Create an empty JSON file, numbered if its name is taken in the folder; return its path.

    The folder is created if missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = folder / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
        with contextlib.suppress(FileExistsError):
            path.touch(exist_ok=False)
            return path
    raise AssertionError("a count does not end")


def write_json(path: Path, tree: Any) -> None:
    """Replace a JSON file atomically: ending this process leaves the old or the new one."""
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    draft.replace(path)

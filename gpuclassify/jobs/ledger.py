"""What a job of deduplication knows of itself: the steps that are done, and its counts."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from gpuclassify.jobs.storage import Directory

FOLDER = "_dedup"  # in the output; readers of datasets pass over it
LEDGER = f"{FOLDER}/summary.json"


def read_ledger(directory: Directory, key: str) -> dict[str, Any] | None:
    """The ledger of the job with this key, if its output has one that can be read."""
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
        ledger = json.loads(directory.read(LEDGER))
        return ledger if ledger["key"] == key else None
    return None


def write_ledger(directory: Directory, ledger: dict[str, Any]) -> None:
    """Write the ledger in place of an earlier one."""
    directory.make(FOLDER)
    directory.replace(LEDGER, json.dumps(ledger, indent=1, ensure_ascii=False).encode())

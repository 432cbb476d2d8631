"""What a job of deduplication knows of itself: the steps that are done, and its counts."""

from __future__ import annotations

import contextlib
import hashlib
import json
from typing import Any

from gpuclassify.jobs.storage import Directory

FOLDER = "_dedup"  # in the output; readers of datasets pass over it
LEDGER = f"{FOLDER}/summary.json"


def read_ledger(directory: Directory, key: str) -> dict[str, Any] | None:
    """The ledger of the job with this key, if its output has one that is as it was written."""
    with contextlib.suppress(FileNotFoundError, ValueError, AttributeError):
        ledger = json.loads(directory.read(LEDGER))
        noted = ledger.pop("sha256", None)
        return ledger if (ledger.get("key"), noted) == (key, _digest(ledger)) else None
    return None


def write_ledger(directory: Directory, ledger: dict[str, Any]) -> None:
    """Write the ledger in place of an earlier one."""
    directory.make(FOLDER)
    content = {**ledger, "sha256": _digest(ledger)}
    directory.replace(LEDGER, json.dumps(content, indent=1, ensure_ascii=False).encode())


def _digest(ledger: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(ledger, sort_keys=True).encode()).hexdigest()

"""Memory, and time to the first answers, of a way to classify in a process of its own.

``python -m benchmarks.footprint FILE`` is that process; `measure_footprint` starts it.
"""

import json
import pickle
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import pandas as pd
import torch
import transformers

from benchmarks.ways import Way

FIRST_DOCUMENTS = 8
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Request:
    """Way, texts and options that a new process runs with `threads` threads of torch."""

    way: Way
    texts: tuple[str, ...]
    partitions: int
    directory: str
    device: str
    threads: int


def measure_footprint(request: Request) -> dict[str, Any]:
    """Run `request` in a process that does nothing else, and return the findings.

    Returns
    -------
    dict
        ``first_documents`` and the ``first_seconds`` from the first call to their answers;
        ``first_run_seconds``, which the same call took again, and ``first_load_seconds``, the
        difference: loading, and all that is found out once. ``resident_bytes_before`` the first
        call and ``peak_resident_bytes`` after all texts, both with the libraries; on a GPU
        ``peak_device_bytes``, which torch had reserved there.

    Raises
    ------
    RuntimeError
        The process failed; the message has its last words.
    """
    with tempfile.NamedTemporaryFile(suffix=".pickle") as file:
        file.write(pickle.dumps(request))
        file.flush()
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.footprint", file.name],
            cwd=_ROOT,
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise RuntimeError(
            f"the process of {request.way.name!r} ended with {done.returncode}: "
            f"{done.stderr.strip()[-2_000:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str]) -> None:
    """Run the request in the file, and print the findings."""
    request: Request = pickle.loads(Path(arguments[0]).read_bytes())
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(request.threads)
    print(json.dumps(_run(request)))


def _run(request: Request) -> dict[str, Any]:
    texts = pd.DataFrame({"text": list(request.texts)})
    first = dd.from_pandas(texts.head(FIRST_DOCUMENTS), npartitions=1)
    before = resident_bytes()
    first_seconds, again_seconds = (_seconds(request, first) for _ in range(2))
    _seconds(request, dd.from_pandas(texts, npartitions=request.partitions))
    findings = {
        "first_documents": min(FIRST_DOCUMENTS, len(texts)),
        "first_seconds": first_seconds,
        "first_load_seconds": first_seconds - again_seconds,
        "first_run_seconds": again_seconds,
        "resident_bytes_before": before,
        "peak_resident_bytes": peak_resident_bytes(),
    }
    if torch.device(request.device).type == "cuda":
        findings["peak_device_bytes"] = torch.cuda.max_memory_reserved(request.device)
    return findings


def _seconds(request: Request, frame: dd.DataFrame) -> float:
    started = time.perf_counter()
    request.way.scores(frame, request.directory, request.device)
    return time.perf_counter() - started


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    status = Path("/proc/self/status")
    if status.is_file():
        # getrusage would tell the peak of the parent, which a new program inherits.
        return int(re.findall(rf"{field}:\s+(\d+) kB", status.read_text())[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


if __name__ == "__main__":
    main(sys.argv[1:])

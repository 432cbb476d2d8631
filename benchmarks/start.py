"""Where the seconds of a new process go until the second batch has run.

``python -m benchmarks.start DIRECTORY DEVICE`` is that process; `measure_start` starts it twice.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
TEXTS = ["A market report.", "Flour, water and an oven."] * 4


def measure_start(directory: str, device: str) -> dict[str, dict[str, float]]:
    """Time the steps of two processes after each other, which share saved measurements.

    Returns
    -------
    dict of dict of float
        Seconds by step, of the ``first`` process and of a ``later`` one: ``import`` of the package,
        torch and transformers; the device's ``context``; ``load`` of the model, and of it the
        ``trial`` of attention kernels; the ``packing`` trial; the ``first_batch`` of eight short
        texts, and the ``second_batch`` of the same. With cudf on a GPU, ``import_cudf``, and
        ``first_cudf`` and ``second_cudf``, the batches on a cudf frame.
    """
    with tempfile.TemporaryDirectory() as cache:
        return {name: _run(directory, device, cache) for name in ("first", "later")}


def _run(directory: str, device: str, cache: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.start", directory, device],
        cwd=_ROOT,
        env={**os.environ, "XDG_CACHE_HOME": cache},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"the process ended with {done.returncode}: {done.stderr[-2_000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str]) -> None:
    """Run the steps, and print their seconds."""
    directory, device = arguments
    seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(step: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        seconds[step] = seconds.get(step, 0.0) + time.perf_counter() - started

    with timed("import"):
        import pandas as pd
        import torch

        from gpuclassify import DistributedDataClassifier
        from gpuclassify.inference.packed import fused_attention
    with timed("context"):
        float(torch.zeros(1, device=device).sum())
    frame = pd.DataFrame({"text": TEXTS})
    classifier = DistributedDataClassifier(model=directory, device=device, label_field="label")
    choose_attention: Any = fused_attention._fastest_attention

    def timed_choice(encoder: object) -> object:
        with timed("trial"):
            return choose_attention(encoder)

    fused_attention._fastest_attention = timed_choice
    with contextlib.ExitStack() as kept:
        with timed("load"):
            where = classifier.runner.device_and_dtype()
            model = kept.enter_context(classifier.runner.lease(*where))
        with timed("packing"):
            _ = model.is_packable
    for step in ("first_batch", "second_batch"):
        with timed(step):
            classifier(frame)
    if torch.device(device).type == "cuda":
        _time_cudf(frame, classifier, timed)
    print(json.dumps(seconds))


def _time_cudf(frame: Any, classifier: Any, timed: Callable[[str], Any]) -> None:
    """Time the package's import and two batches on a cudf frame, if there is cudf."""
    with timed("import_cudf"):
        try:
            import cudf
        except ImportError:
            return
    frame = cudf.from_pandas(frame)
    for step in ("first_cudf", "second_cudf"):
        with timed(step):
            classifier(frame)


if __name__ == "__main__":
    main(sys.argv[1:])

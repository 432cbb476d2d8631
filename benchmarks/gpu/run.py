"""Probe a GPU, test gpuclassify on it and measure its speed, with one command and from a checkout.

``python -m benchmarks.gpu.run --output FOLDER`` needs neither ``make`` nor gpuclassify installed,
and downloads nothing. Each step is a process of its own with a limit; one that fails or is late
stops no other. ``gpu-<date>.log`` has all that they print and ``gpu-<date>.json`` what became of
each, with its results; both are there after every step. README.md says what the parts are.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from benchmarks import RESULTS
from benchmarks.gpu.kit import python_of

ROOT = Path(__file__).parents[2]
ENVIRONMENT = Path(tempfile.gettempdir(), "gpuclassify-gpu")
PARTS = ("probe", "tests", "speed", "cudf")
LEAST_SECONDS = 10  # below that a step is not begun
SHOWN_LINES = 25  # of what a step prints; the log has all
DONE = "done"
WITHOUT_CUDF = (
    "tests/inference",
    "tests/questions",
    "tests/workers",
    "tests/gpu/test_device_use.py",
)
FIRST_CUDF = ("tests/gpu", "tests/frames", "tests/test_contract.py", "tests/mapping")
A_SERIES = "import cudf; print(cudf.__version__, cudf.Series(['a', None]).to_arrow())"


class Step(NamedTuple):
    """A process.

    Attributes
    ----------
    arguments : tuple of str
        For the interpreter.
    limit_seconds : float
        After which it is ended.
    writes : bool
        Whether it takes ``--output``, a folder for its results.
    """

    arguments: tuple[str, ...]
    limit_seconds: float
    writes: bool = False


def main(arguments: Sequence[str] | None = None) -> Path:
    """Run the parts that are asked for, and return the path of the JSON file.

    Raises
    ------
    SystemExit
        Some step was not done; after everything is written and printed.
    """
    options = parse_options(arguments)
    steps = [step for part in options.parts for step in steps_of(part, options)]
    if options.kit is not None:
        kits = ["base", "cudf"] if "cudf" in options.parts else ["base"]
        steps = [*(_install(options, kit) for kit in kits), *steps]
    json_path, log_path = _new_paths(options.output)
    deadline = time.monotonic() + options.limit_seconds
    outcomes: list[dict[str, Any]] = []
    _write(json_path, options, outcomes)
    for number, step in enumerate(steps, 1):
        print(f"[{number}/{len(steps)}] {' '.join(step.arguments)}", flush=True)
        outcomes.append(attempt(step, _interpreter(step, options), log_path, deadline))
        _show(outcomes[-1])
        _write(json_path, options, outcomes)
    for outcome in outcomes:
        print(f"{outcome['seconds']:7.1f} s  {outcome['status']}: {outcome['command']}")
    print(f"written to {log_path}\nwritten to {json_path}")
    if any(outcome["status"] != DONE for outcome in outcomes):
        raise SystemExit(1)
    return json_path


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.run", description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the two files")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(all)")
    parser.add_argument("--limit-seconds", type=float, default=540.0, help="for all (540)")
    parser.add_argument("--kit", type=Path, help="folder of kit.py's parts, installed first")
    parser.add_argument(
        "--environment", type=Path, default=ENVIRONMENT, help=f"where to ({ENVIRONMENT})"
    )
    parser.add_argument(
        "--device", default="cuda", help="cpu: tiny models, and tests are only collected"
    )
    return parser.parse_args(arguments)


def steps_of(part: str, options: argparse.Namespace) -> list[Step]:
    """The steps of a part, the most important first.

    Documents are counted for one H100: 35 TFLOP/s in float32, where the recipe also runs 1.5 times
    the tokens, and 250 in 16 bits. A web document has 339 tokens after the cut, and a token takes
    0.185 GFLOP, of DeBERTa 0.203. 8,000 documents are 0.50 PFLOP: 22 s for the recipe, 2 s for
    gpuclassify, 3 to 10 s for ways that the host holds up. CrossFit's curve of memory is 2.3 PFLOP
    in float32. With loading, searches and peaks the runs for speed take 170, 40, 70 and 120 s.
    """
    on = ("--device", options.device)
    pytest = ("-m", "pytest", "-m", "gpu", "--continue-on-collection-errors")
    pytest += ("--collect-only", "-q") if options.device == "cpu" else ("-v",)
    device = ("-m", "benchmarks.device", *on, *["--smoke"] * (options.device == "cpu"))
    many = (*device, "--documents", "8000", "--parts")
    speed = ("--repeats", "1", "--parts", "speed")
    steps = {
        "probe": [
            Step(("-m", "gpuclassify", "doctor"), 60),
            Step(("-m", "benchmarks.gpu.probe", *on), 240, writes=True),
        ],
        "tests": [Step((*pytest, "-k", "not cudf", path), 150) for path in WITHOUT_CUDF],
        "speed": [
            Step((*many, "speed", "--repeats", "2"), 240, writes=True),
            Step((*many, "tokens", "idle"), 120, writes=True),
            Step((*device, "--model", "deberta", "--documents", "1000", *speed), 160, writes=True),
            Step((*device, "--original", "--documents", "2000", *speed), 200, writes=True),
        ],
        "cudf": [
            Step(("-c", A_SERIES), 60),
            *(Step((*pytest, path), 150) for path in FIRST_CUDF),
            Step((*many, "memory"), 120, writes=True),
            Step((*many, "speed", "tokens", "--repeats", "2"), 240, writes=True),
            Step((*pytest, *(f"--ignore={path}" for path in FIRST_CUDF)), 300),
        ],
    }
    return steps[part]


def _install(options: argparse.Namespace, kit: str) -> Step:
    folders = (str(options.kit), kit, str(options.environment))
    return Step(("-m", "benchmarks.gpu.kit", "install", *folders), 120)


def _interpreter(step: Step, options: argparse.Namespace) -> str:
    """The environment's, if there is one and the step does not make it."""
    made = python_of(options.environment)
    is_installing = "benchmarks.gpu.kit" in step.arguments
    return str(made) if options.kit and made.exists() and not is_installing else sys.executable


def attempt(step: Step, python: str, log_path: Path, deadline: float) -> dict[str, Any]:
    """What became of a step: command, status, exit code, seconds, results and its last lines.

    Parameters
    ----------
    step : Step
    python : str
        The interpreter.
    log_path : Path
        All that it prints is added to this file.
    deadline : float
        By `time.monotonic`, for all steps.
    """
    started = time.monotonic()
    outcome: dict[str, Any] = {
        "command": " ".join(step.arguments),
        "exit_code": None,
        "seconds": 0.0,
    }
    limit_seconds = min(step.limit_seconds, deadline - started)
    if limit_seconds < LEAST_SECONDS:
        return outcome | {"status": "not begun: no time was left", "results": [], "last_lines": []}
    with tempfile.TemporaryDirectory() as folder, log_path.open("a+", encoding="utf-8") as log:
        writes = ("--output", folder) if step.writes else ()
        log.write(f"\n$ {python} {' '.join(step.arguments)}\n")
        log.flush()
        begun_at = log.tell()
        code = _run([python, *step.arguments, *writes], limit_seconds, log)
        outcome |= {"exit_code": code, "seconds": time.monotonic() - started}
        log.seek(begun_at)
        outcome["last_lines"] = log.read().splitlines()[-SHOWN_LINES:]
        paths = sorted(Path(folder).rglob("*.json"))
        outcome["results"] = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    if code is None:
        return outcome | {"status": f"ended after its {limit_seconds:.0f} s"}
    return outcome | {"status": f"failed with {code}" if code else DONE}


def _run(command: Sequence[str], limit_seconds: float, log: TextIO) -> int | None:
    """The exit code; None if it was ended, with all processes that it had started."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment |= {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
    )
    try:
        return process.wait(limit_seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):  # workers that outlive it, too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _show(outcome: dict[str, Any]) -> None:
    for line in outcome["last_lines"]:
        print(f"    {line}")
    print(f"  {outcome['status']}, {outcome['seconds']:.1f} s", flush=True)


def _new_paths(folder: Path) -> tuple[Path, Path]:
    """Files of this run, beside those of earlier ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        tail = "" if number == 1 else f"-{number}"
        path = folder.resolve() / f"gpu-{datetime.now(UTC):%Y-%m-%d}{tail}.json"
        with contextlib.suppress(FileExistsError), path.open("x"):
            return path, path.with_suffix(".log")
    raise AssertionError("a count does not end")


def _write(path: Path, options: argparse.Namespace, outcomes: list[dict[str, Any]]) -> None:
    results = [result for outcome in outcomes for result in outcome["results"]]
    report = {
        "question": "gpu",
        "finished": datetime.now(UTC).isoformat(),
        "device": options.device,
        "noisy": any(result.get("noisy") for result in results),
        "steps": outcomes,
    }
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

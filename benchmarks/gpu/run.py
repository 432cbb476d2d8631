"""Probe a GPU, test gpuclassify on it and measure its speed, with one command and from a checkout.

``python -m benchmarks.gpu.run --output FOLDER`` needs neither ``make`` nor gpuclassify installed,
and downloads nothing. Each step is a process of its own with a limit; one that fails or is late
stops no other. ``gpu-<date>.log`` has all that they print and ``gpu-<date>.json`` what became of
each, with its results so far. The same command once more goes on where this one stopped: steps that
were done within a day, beside the same GPU, are kept, and those not begun yet come first. README.md
says what the parts are.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from benchmarks import RESULTS, new_path, write_json
from benchmarks.gpu.kit import python_of

ROOT = Path(__file__).parents[2]
ENVIRONMENT = Path(tempfile.gettempdir(), "gpuclassify-gpu")
PARTS = ("probe", "tests", "speed", "cudf")
LEAST_SHARE = 0.5  # of its limit that a step must have before it is begun
LOOK_SECONDS = 5.0  # between looks at what a step has written
TEST_SECONDS = 100  # for one test, where pytest-timeout is installed
KEPT = timedelta(days=1)
SHOWN_LINES = 25  # of what a step prints; the log has all
DONE = "done"
NOT_BEGUN, CUT_OFF = "not begun: too little time was left", "ended with the time for all"
WITHOUT_CUDF = ("inference", "classifiers/questions", "workers", "gpu/test_device_use.py")
FIRST_CUDF = ("frames", "test_contract.py", "mapping")
A_SERIES = "import cudf; print(cudf.__version__, cudf.Series(['a', None]).to_arrow())"


class Step(NamedTuple):
    """A process: its part, arguments for the interpreter, and the seconds after which it is ended.

    `writes` if it takes ``--output``, a folder for its results; `advises` if exit code 1 says that
    it has found something to be told, and not that it failed.
    """

    part: str
    arguments: tuple[str, ...]
    limit_seconds: float
    writes: bool = False
    advises: bool = False

    @property
    def command(self) -> str:
        """The command as reports show it."""
        return " ".join(self.arguments)


def main(arguments: Sequence[str] | None = None) -> Path:
    """Run the parts that are asked for, and return the path of the JSON file.

    Raises
    ------
    SystemExit
        Some step was not done; after everything is written and printed.
    """
    options = parse_options(arguments)
    deadline = time.monotonic() + options.limit_seconds
    head = {"question": "gpu", "device": options.device, "gpus": name_gpus()}
    steps = [step for step in all_steps(options.device) if step.part in options.parts]
    earlier = {} if options.again else read_earlier(options.output, head)
    outcomes = [earlier[step.command] for step in steps if step.command in earlier]
    outcomes = [outcome for outcome in outcomes if outcome["status"] == DONE]
    kept = {outcome["command"] for outcome in outcomes}
    steps = [step for step in steps if step.command not in kept]
    steps = list(_with_kits(sorted(steps, key=lambda step: step.command in earlier), options))
    json_path = new_path(options.output.resolve(), f"gpu-{datetime.now(UTC):%Y-%m-%d}")
    log_path = json_path.with_suffix(".log")

    def tell(*running: dict[str, Any]) -> None:
        all_outcomes = [*outcomes, *running]
        results = [result for outcome in all_outcomes for result in outcome["results"]]
        noisy = any(result.get("noisy") for result in results)
        write_json(json_path, head | {"finished": _now(), "noisy": noisy, "steps": all_outcomes})

    tell()
    for number, step in enumerate(steps, 1):
        print(f"[{number}/{len(steps)}] {step.command}", flush=True)
        outcomes.append(attempt(step, _interpreter(step, options), log_path, deadline, tell))
        _show(outcomes[-1])
        tell()
    for outcome in outcomes:
        was_kept = f", at {outcome['finished']}" * (outcome["command"] in kept)
        print(f"{outcome['seconds']:7.1f} s  {outcome['status']}{was_kept}: {outcome['command']}")
    print(f"written to {log_path}\nwritten to {json_path}")
    if any(outcome["status"] in (NOT_BEGUN, CUT_OFF) for outcome in outcomes):
        print("the same command once more goes on")
    if any(outcome["status"] != DONE for outcome in outcomes):
        raise SystemExit(1)
    return json_path


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.run", description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the two files")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(all)")
    parser.add_argument("--limit-seconds", type=float, default=540.0, help="for all (540)")
    parser.add_argument("--again", action="store_true", help="also what was done within a day")
    parser.add_argument("--kit", type=Path, help="folder of kit.py's parts, installed first")
    parser.add_argument(
        "--environment", type=Path, default=ENVIRONMENT, help=f"where to ({ENVIRONMENT})"
    )
    parser.add_argument(
        "--device", default="cuda", help="cpu: tiny models, and tests are only collected"
    )
    return parser.parse_args(arguments)


def all_steps(device: str) -> list[Step]:
    """Return the steps of all parts, the most important first.

    Documents are counted for one H200, on which a round of all ways took 22 s for 3,000 documents
    with BERT, and 14 s for 1,000 with DeBERTa. Three rounds are the fewest that have a median.
    CrossFit's curve of memory is 2.3 PFLOP in float32. Loading, searches and peaks take as long as
    two rounds.
    """
    on = ("--device", device)
    measure = ("-m", "benchmarks.device", *on, *["--smoke"] * (device == "cpu"))
    many = (*measure, "--documents", "3000", "--parts")
    once = ("--repeats", "1", "--parts", "speed")
    deberta = (*measure, "--model", "deberta", "--documents", "1000", "--parts")
    questions = ("-m", "benchmarks.questions", *on, *["--smoke"] * (device == "cpu"))
    questions += ("--model", "qwen3-0.6b")
    if device != "cpu":
        questions += ("--layers", "28", "--documents", "128", "--batch-size", "32")
    web = ("--documents", "1500")
    sentences = ("--lengths", "sentences", "--documents", "20000")
    long = ("--model", "modernbert", "--lengths", "long", "--documents", "200")
    minilm = ("--model", "minilm", "--documents", "10000", "--parts", "embeddings", "idle")
    trunks = ("-m", "benchmarks.trunks", *on, *["--smoke"] * (device == "cpu"))
    if device != "cpu":
        trunks += ("--trunks", "bert", "--documents", "2000", "--lengths", "web")
    # In place of what a pytest without pytest-timeout refuses to start with.
    pytest = ("-m", "pytest", "-o", "addopts=-ra --import-mode=importlib")
    pytest += ("-p", "benchmarks.gpu.failures")
    pytest += ("-o", f"timeout={TEST_SECONDS}", "--continue-on-collection-errors", "-m", "gpu")
    pytest += ("--collect-only", "-q") if device == "cpu" else ("-v",)

    def tests(*names: str) -> tuple[str, ...]:
        return (*pytest, *(f"tests/{name}" for name in names))

    rest = ("tests", "--ignore=tests/gpu", *(f"--ignore=tests/{name}" for name in FIRST_CUDF[:-1]))
    return [
        Step("probe", ("-m", "gpuclassify", "doctor"), 60, advises=True),
        Step("probe", ("-m", "benchmarks.gpu.probe", *on), 240, writes=True),
        Step("tests", tests("gpu/test_kernels.py"), 150),
        Step("tests", tests("gpu/test_context.py"), 120),
        Step("speed", (*many, "speed", "start"), 240, writes=True),
        Step("speed", (*deberta, "speed", "start"), 240, writes=True),
        Step("cudf", ("-c", A_SERIES), 60),
        Step("cudf", tests("gpu/test_cudf_frames.py"), 150),
        Step("speed", (*many, "tokens", "idle"), 120, writes=True),
        Step("speed", (*questions, "--parts", "choice", "answer", "criteria"), 240, writes=True),
        *(
            Step("speed", (*measure, "--model", model, *web, "--parts", "speed"), 200, writes=True)
            for model in ("modernbert", "xlm-roberta")
        ),
        Step("speed", (*measure, *sentences, "--parts", "speed", "idle"), 200, writes=True),
        Step("speed", (*measure, *long, "--parts", "speed", "idle"), 200, writes=True),
        Step("speed", trunks, 150, writes=True),
        *(Step("tests", (*tests(name), "-k", "not cudf"), 150) for name in WITHOUT_CUDF),
        *(Step("cudf", tests(name), 150) for name in FIRST_CUDF),
        Step("cudf", (*measure, *minilm), 150, writes=True),
        Step("cudf", (*many, "memory"), 120, writes=True),
        Step("cudf", (*many, "speed", "tokens"), 240, writes=True),
        Step("speed", (*measure, "--original", "--documents", "2000", *once), 200, writes=True),
        Step("cudf", (*pytest, *rest), 300),
    ]


def name_gpus() -> str:
    """Return the names of the GPUs and their drivers; empty where there are none."""
    command = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return done.stdout.strip()
    return ""


def read_earlier(folder: Path, head: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Read the outcomes of commands that had their time, from a folder's reports of this head.

    Of several outcomes the last one that was done counts, else the last one.
    """
    found: dict[str, dict[str, Any]] = {}
    since = (datetime.now(UTC) - KEPT).isoformat()
    for path in sorted(folder.glob("gpu-*.json"), key=lambda path: path.stat().st_mtime):
        report = _read(path)
        for outcome in report["steps"] if head.items() <= report.items() else ():
            before = found.get(outcome["command"], outcome)
            is_kept = outcome["status"] == DONE or before["status"] != DONE
            had_time = outcome["status"] not in (NOT_BEGUN, CUT_OFF)
            if is_kept and had_time and outcome["finished"] > since:
                found[outcome["command"]] = outcome
    return found


def _with_kits(steps: Sequence[Step], options: argparse.Namespace) -> Iterator[Step]:
    """Yield the steps, and the installation of each kit before the first step that needs it.

    RAPIDS comes late, so that nothing of it is in what is measured without.
    """
    installed: set[str] = set()
    for step in steps:
        for kit in ("base", *["cudf"] * (step.part == "cudf")) if options.kit else ():
            if kit not in installed:
                installed.add(kit)
                folders = (str(options.kit), kit, str(options.environment))
                yield Step("kit", ("-m", "benchmarks.gpu.kit", "install", *folders), 120)
        yield step


def _interpreter(step: Step, options: argparse.Namespace) -> str:
    """Return the environment's interpreter, if there is one and the step does not make it."""
    made = python_of(options.environment)
    return str(made) if options.kit and made.exists() and step.part != "kit" else sys.executable


def attempt(
    step: Step,
    python: str,
    log_path: Path,
    deadline: float,
    tell: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Run a step; return its command, status, exit code, seconds, results and last lines.

    All that it prints is added to the file `log_path`. The `deadline`, by `time.monotonic`, is that
    of all steps. `tell` takes the outcome so far whenever a result has changed.
    """
    started = time.monotonic()
    outcome: dict[str, Any] = {"command": step.command, "exit_code": None, "seconds": 0.0}
    outcome |= {"status": NOT_BEGUN, "results": [], "last_lines": [], "finished": _now()}
    limit_seconds = min(step.limit_seconds, deadline - started)
    if limit_seconds < LEAST_SHARE * step.limit_seconds:
        return outcome
    with tempfile.TemporaryDirectory() as folder, log_path.open("a+", encoding="utf-8") as log:
        writes = ("--output", folder) if step.writes else ()
        log.write(f"\n$ {python} {step.command}\n")
        log.flush()
        begun_at = log.tell()

        def look() -> None:
            before = outcome["results"]
            outcome["results"] = [_read(path) for path in sorted(Path(folder).rglob("*.json"))]
            outcome.update(seconds=time.monotonic() - started, finished=_now())
            if outcome["results"] != before:
                tell(outcome | {"status": "running"})

        code = _run([python, *step.arguments, *writes], limit_seconds, log, look)
        log.seek(begun_at)
        outcome["last_lines"] = log.read().splitlines()[-SHOWN_LINES:]
    outcome["exit_code"] = code
    is_cut = [result for result in outcome["results"] if "unreadable" in result]
    if code is None:
        is_late = limit_seconds == step.limit_seconds
        status = f"ended after its {limit_seconds:.0f} s" if is_late else CUT_OFF
    elif code not in (0, int(step.advises)):
        status = f"failed with {code}"
    elif step.writes and (is_cut or not outcome["results"]):
        status = "failed: it has not written its result"
    else:
        status = DONE
    return outcome | {"status": status}


def _run(
    command: Sequence[str], limit_seconds: float, log: TextIO, look: Callable[[], None]
) -> int | None:
    """Run a command and return its exit code; None if it was ended, with all processes it started.

    Meanwhile `look` is called every few seconds, and once at the end.
    """
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": search, "HF_HUB_OFFLINE": "1"}
    environment |= {"PYTHONUNBUFFERED": "1"}
    end = time.monotonic() + limit_seconds
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
    )
    try:
        while process.returncode is None and (left := end - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(LOOK_SECONDS, left))
            look()
        return process.returncode
    finally:
        with contextlib.suppress(ProcessLookupError):  # workers that outlive it, too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(path: Path) -> dict[str, Any]:
    """Read a result; of one that is cut off, return why it cannot be read."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as err:
        return {"unreadable": f"{path.name}: {err}"}
    return tree if isinstance(tree, dict) else {"unreadable": f"{path.name}: {type(tree)}"}


def _show(outcome: dict[str, Any]) -> None:
    for line in outcome["last_lines"]:
        print(f"    {line}")
    print(f"  {outcome['status']}, {outcome['seconds']:.1f} s", flush=True)


def _now() -> str:
    return datetime.now(UTC).isoformat()


if __name__ == "__main__":
    main()

"""Benchmarks one after the other within a time limit: one that fails or is late stops no other."""

import argparse
import contextlib
import itertools
import json
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.names import SUBJECT
from gpuclassify.workers.nvml import survey_gpus

ROOT = Path(__file__).parents[1]
LEAST_SECONDS = 20  # below that a benchmark is not begun
DONE = "done"
PACKAGES = (
    *("gpuclassify", "torch", "transformers", "dask", "pandas", "crossfit"),
    *("cudf", "dask-cudf", "rmm", "dask-cuda"),
)


class Command(NamedTuple):
    """A benchmark.

    Attributes
    ----------
    question : str
    options : tuple of str
    limit_seconds : float
        After which it is ended.
    """

    question: str
    options: tuple[str, ...]
    limit_seconds: float = 3_600.0


def run(
    commands: Sequence[Command], options: argparse.Namespace, common: Sequence[str]
) -> list[Path]:
    """Run what there is time for, write one more result that sums it up, and print its table.

    Parameters
    ----------
    commands : sequence of Command
        The most important first.
    options : argparse.Namespace
        ``limit_seconds`` for all together, and ``output``, a folder.
    common : sequence of str
        Options that every command gets.

    Returns
    -------
    list of Path
        Of the results, the sum last.

    Raises
    ------
    SystemExit
        Some benchmark was not done; after everything is written and printed.
    """
    deadline = time.monotonic() + options.limit_seconds
    outcomes = []
    for number, command in enumerate(commands, 1):
        print(f"[{number}/{len(commands)}] {_shown(command)}", flush=True)
        outcomes.append(_attempt(command, common, deadline))
    path = _write(outcomes, options.output)
    print(table(json.loads(path.read_text(encoding="utf-8"))))
    print(f"written to {path}")
    if any(outcome["status"] != DONE for outcome in outcomes):
        raise SystemExit(1)
    return [*(Path(outcome["path"]) for outcome in outcomes), path]


def _shown(command: Command) -> str:
    return " ".join([command.question, *command.options])


def _attempt(command: Command, common: Sequence[str], deadline: float) -> dict[str, Any]:
    """What became of a benchmark, in a process of its own."""
    started = time.monotonic()
    limit_seconds = min(command.limit_seconds, deadline - started)
    if limit_seconds < LEAST_SECONDS:
        return {"command": _shown(command), "status": "not begun: no time was left", "seconds": 0.0}
    status, printed = _module(command, common, limit_seconds)
    print(printed, flush=True)
    outcome: dict[str, Any] = {"command": _shown(command), "status": status}
    outcome["seconds"] = time.monotonic() - started
    if status == DONE:
        outcome["path"] = printed.splitlines()[-1].removeprefix("written to ")
    return outcome


def _module(command: Command, common: Sequence[str], limit_seconds: float) -> tuple[str, str]:
    """How a benchmark's module ended, and what it printed."""
    arguments = [sys.executable, "-m", f"benchmarks.{command.question}", *command.options, *common]
    try:
        done = subprocess.run(
            arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=limit_seconds
        )
    except subprocess.TimeoutExpired as err:
        printed = err.stdout or ""
        shown = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
        return f"ended after its {limit_seconds:.0f} s", shown
    return f"failed with {done.returncode}" if done.returncode else DONE, done.stdout


def _write(outcomes: list[dict[str, Any]], folder: Path) -> Path:
    """One file with the GPU, its driver and versions, all outcomes and all results."""
    gpu = describe_gpu()
    paths = [Path(outcome["path"]) for outcome in outcomes if "path" in outcome]
    results = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    shown = [
        outcome | ({"path": Path(outcome["path"]).name} if "path" in outcome else {})
        for outcome in outcomes
    ]
    now = datetime.now(UTC)
    report = {"question": "gpu", "finished": now.isoformat(), "gpu": gpu, "outcomes": shown}
    report |= {"noisy": any(result["noisy"] for result in results), "results": results}
    text = json.dumps(report, indent=2)
    folder.mkdir(parents=True, exist_ok=True)
    slug = re.sub("[^a-z0-9]+", "-", (gpu["name"] or "no GPU").lower()).strip("-")
    for number in itertools.count(1):
        tail = "" if number == 1 else f"-{number}"
        path = folder / f"gpu-{now:%Y-%m-%d}-{slug}{tail}.json"
        with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
            file.write(text + "\n")
            break
    return path


def describe_gpu() -> dict[str, Any]:
    """The first visible GPU, its driver, and the versions of what runs on it."""
    survey = survey_gpus()
    first = survey.gpus[0] if survey.gpus else None
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "name": first and first.name,
        "memory_bytes": first and first.memory_bytes,
        "driver": survey.driver_version,
        "driver_cuda": survey.cuda_version and ".".join(map(str, survey.cuda_version)),
        "python": platform.python_version(),
        "versions": {name: version for name, version in versions.items() if version},
    }


def _version(name: str) -> str | None:
    """Of a package, or of its wheel for one of the CUDA versions."""
    for wheel in (name, f"{name}-cu13", f"{name}-cu12"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(wheel)
    return None


def table(report: dict[str, Any]) -> str:
    """A line for each way and each finding, and for whatever was not done."""
    gpu = report["gpu"]
    versions = ", ".join(f"{name} {version}" for name, version in gpu["versions"].items())
    lines = [f"{gpu['name'] or 'no GPU'}, driver {gpu['driver']}; {versions}"]
    for result in report["results"]:
        lines += _speed_lines(result)
        lines += rest_lines(result)
        lines += ["  NOISY, not to be quoted: see its own table"] * result["noisy"]
    for outcome in report["outcomes"]:
        if outcome["status"] != DONE:
            lines.append(f"{outcome['status'].upper()}: {outcome['command']}")
    return "\n".join(lines)


def _speed_lines(result: dict[str, Any]) -> list[str]:
    lines = []
    for kind, corpus in result.get("corpora", {}).items():
        title = f"{result['settings']['model']} {kind}, {corpus['documents']} documents"
        lines.append(f"{title:38}{'docs/s':>10}{'tokens/s':>12}{'of peak':>9}{SUBJECT:>12}")
        for name, found in corpus["variants"].items():
            ratio = corpus["speed_up"].get(name, {"ratio_of_medians": 1.0})["ratio_of_medians"]
            lines.append(
                f"  {name:36}{found['documents_per_second']:10,.0f}"
                f"{found['real_tokens_per_second']:12,.0f}{found['share_of_peak']:9.0%}{ratio:11.2f}x"
            )
    return lines


def rest_lines(result: dict[str, Any]) -> list[str]:
    """What was found beside speed."""
    lines = []
    for where, tokens in result.get("tokens", {}).items():
        lines.append(
            f"  the {where} tokenizes {tokens['documents_per_second']:,.0f} documents, "
            f"{tokens['tokens_per_second']:,.0f} tokens a second at most"
        )
    if idle := result.get("idle"):
        whole, between, sampled = (
            "unknown" if idle[name] is None else f"{idle[name]:.1%}"
            for name in ("idle_share", "idle_share_between", "sampled_idle_share")
        )
        lines.append(
            f"  idle after warm-up: {whole} of the call, {between} between first and last "
            f"operation, {sampled} by NVML"
        )
    if memory := result.get("memory"):
        stats = memory["stats"]
        lines.append(
            f"  beside {memory['ballast_bytes'] / 2**30:.1f} GiB of cudf: torch "
            f"{stats['peak_torch_bytes'] / 2**30:.1f} GiB at most, planned "
            f"{stats['peak_planned_bytes'] / 2**30:.1f}"
            f"{'' if memory['is_within_plan'] else ' (EXCEEDED)'}; "
            f"{stats['out_of_memory']} out-of-memory"
        )
    return lines

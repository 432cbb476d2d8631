"""Several benchmarks one after the other, pictures of what they found, and a short table.

``python -m benchmarks.suite short`` is ``make bench``; README.md says what each form runs.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import BASELINE, RESULTS, SUBJECT

_ROOT = Path(__file__).parents[1]
_SEARCHED = ("Curator's stages, best batch", "crossfit-original")
_PEERS = ("sorted batches of 32", *_SEARCHED, "loader=crossfit")


Command = tuple[str, ...]  # a benchmark's module and its options


def _throughput(model: str, lengths: str, documents: int, *more: str) -> Command:
    options = ("--model", model, "--lengths", lengths, "--documents", str(documents))
    return ("throughput", *options, *more)


# Counted for two quiet cores of 200 GFLOP/s and 0.18 GFLOP for a token of BERT-base: 1 ms a token
# without padding, 2 ms in the pipeline's web batches and 4 ms in its short ones, 7 ms in those of
# DeBERTa. That makes 8 minutes for the short form and two hours for the full one.
FORMS: dict[str, tuple[Command, ...]] = {
    "short": (
        _throughput("bert", "web", 20, "--repeats", "2", "--peers", "--variants", *_SEARCHED),
        _throughput(
            *("bert", "short", 48, "--repeats", "2", "--footprint", "none"),
            *("--peers", "--variants", *_SEARCHED),
        ),
        _throughput(
            *("deberta", "web", 10, "--repeats", "2", "--footprint", "none"),
            *("--variants", BASELINE),
        ),
    ),
    "full": (
        _throughput("bert", "web", 120, "--peers", "--footprint", "all"),
        _throughput("bert", "short", 240, "--peers"),
        _throughput("deberta", "web", 40, "--peers", "--variants", *_PEERS),
    ),
}


def main(arguments: Sequence[str] | None = None) -> list[Path]:
    """Run a form, and return the paths of the results."""
    options = parse_options(arguments)
    common = ["--output", str(options.output.resolve())] + ["--smoke"] * options.smoke
    paths = []
    for number, command in enumerate(FORMS[options.form], 1):
        print(f"[{number}/{len(FORMS[options.form])}] {' '.join(command)}", flush=True)
        paths.append(_run([*command, *common]))
    _module("plots", *map(str, paths))
    print(summary([json.loads(path.read_text(encoding="utf-8")) for path in paths]))
    return paths


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suite", description=__doc__)
    parser.add_argument("form", choices=tuple(FORMS))
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--smoke", action="store_true", help="tiny models and few texts")
    return parser.parse_args(arguments)


def _run(command: Sequence[str]) -> Path:
    """Run a benchmark in a process of its own, and return the path that it writes to."""
    return Path(_module(*command).splitlines()[-1].removeprefix("written to "))


def _module(name: str, *arguments: str) -> str:
    """Run a benchmark's module, and return its output, which is printed here too."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    print(done.stdout, flush=True)
    return done.stdout


def summary(results: Sequence[dict[str, Any]]) -> str:
    """Return a line for each finding that people ask for first."""
    lines = [
        f"{SUBJECT:32}{'median s':>10}{'of peak':>9}{'pipeline':>10}{'fastest':>9} other way",
    ]
    for result in results:
        lines += _throughput_lines(result)
    return "\n".join(lines)


def _throughput_lines(result: dict[str, Any]) -> list[str]:
    lines = []
    for kind, corpus in result["corpora"].items():
        found = corpus["variants"][SUBJECT]
        ratios = {name: some["ratio_of_medians"] for name, some in corpus["speed_up"].items()}
        fastest = min(ratios, key=ratios.__getitem__)
        name = f"{result['settings']['model']} {kind}, {corpus['documents']} documents"
        lines.append(
            f"  {name:30}{found['median_seconds']:10.2f}{found['share_of_peak']:9.0%}"
            f"{ratios[BASELINE]:9.2f}x{ratios[fastest]:8.2f}x {fastest}"
        )
    return lines


if __name__ == "__main__":
    main()

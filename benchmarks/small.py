"""How long do commands take on some megabytes of text, beside plain scripts and their own work?

``python -m benchmarks.small --help`` lists the options; README.md says what is measured.
"""

import argparse
import contextlib
import functools
import gzip
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
from transformers import PreTrainedTokenizerFast

from benchmarks import SUBJECT
from benchmarks.fasttext import host_processes, real_model
from benchmarks.harness import Variant, begin, finish, new_parser, parse, run_interleaved
from benchmarks.tokens import train

QUESTION = "small"
SCRIPT = "plain script"
ANSWER = "answer"  # column of numbers that both ways must agree on
FOLDERS = (Path("/usr/share/man"), Path("/usr/share/doc"), Path(sysconfig.get_paths()["purelib"]))
LINES = (40, 80, 160, 320)  # lines per document
PIECES = 4  # maximum documents of a file
DUPLICATES = 0.18  # share of documents that repeat another one's text
HOST_SECONDS = 0.1  # time between two looks at the processes that hold models
TOLERANCE = 1e-6  # of a probability
LINE_END = "</s>"  # word at which the library ends a text, and gpuclassify does not

READ = """
import glob, gzip, json, sys
import pandas as pd

source, target, model = sys.argv[1:]

def rows():
    for path in sorted(glob.glob(source)):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            yield from map(json.loads, file)
"""
SCRIPTS = {
    "language": """
import fasttext
model = fasttext.load_model(model)
found = [(row["id"], *model.predict(row["text"].replace("\\n", " "))) for row in rows()]
table = [(n, labels[0].removeprefix("__label__"), scores[0]) for n, labels, scores in found]
pd.DataFrame(table, columns=["id", "language", "answer"]).to_parquet(target)
""",
    "tokens": """
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
encode = tokenizer.encode
table = [(row["id"], len(encode(row["text"], add_special_tokens=False))) for row in rows()]
pd.DataFrame(table, columns=["id", "answer"]).to_parquet(target)
""",
    "duplicates": """
pd.DataFrame(rows()).drop_duplicates("text").to_parquet(target)
""",
}
COMMANDS = {
    "language": ("annotate", "--classifier", "language", "--model"),
    "tokens": ("annotate", "--classifier", "tokens", "--model"),
    "duplicates": ("dedup", "--method", "exact"),
}
COLUMNS = {"language": "language_confidence", "tokens": "tokens"}


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    options = parse_options(arguments)
    head = begin(options)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        texts = documents(options.documents)
        sizes = write_corpus(home / "in", texts, options.files)
        models = {"language": str(real_model()), "tokens": write_tokenizer(home, texts, options)}
        cases = {
            work: compare(home, work, models.get(work, ""), len(texts), options)
            for work in COMMANDS
        }
    return finish(QUESTION, head | sizes | {"cases": cases}, options, table)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--documents", type=int, default=14_640, help="in all (14,640)")
    parser.add_argument("--files", type=int, default=28, help=".jsonl.gz files (28)")
    return parse(parser, arguments, documents=60, files=3)


def documents(count: int) -> list[str]:
    """Return texts of manual pages, documentation and Python files here; some are repeated."""
    draw, distinct = random.Random(0), count - int(DUPLICATES * count)
    found: dict[str, None] = {}
    for text in files_here(draw):
        lines, size = text.splitlines(), draw.choice(LINES)
        starts = range(0, min(len(lines), PIECES * size), size)
        pieces = ("\n".join(lines[start : start + size]) for start in starts)
        found |= dict.fromkeys(filter(None, pieces))  # `dedup` takes no empty texts as copies
        if len(found) >= distinct:
            break
    texts = [*found][:distinct]
    texts += draw.choices(texts, k=count - len(texts))
    draw.shuffle(texts)
    return texts


def files_here(draw: random.Random) -> Iterator[str]:
    """Yield the contents of text files in random order."""
    paths = [*FOLDERS[0].rglob("*.gz"), *FOLDERS[1].rglob("*.gz"), *FOLDERS[2].rglob("*.py")]
    paths.sort()
    draw.shuffle(paths)
    for path in paths:
        try:
            content = path.read_bytes()
            text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
            if LINE_END not in text:
                yield text
        except (OSError, ValueError, EOFError):  # a broken link, or another encoding
            continue


def write_corpus(folder: Path, texts: Sequence[str], files: int) -> dict[str, int]:
    """Write compressed JSON lines; return the number of files, and their bytes."""
    folder.mkdir()
    for number, rows in enumerate(np.array_split(np.arange(len(texts)), files)):
        lines = [json.dumps({"id": int(row), "text": texts[row]}) + "\n" for row in rows]
        (folder / f"{number:03}.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode(), 6))
    stored = sum(path.stat().st_size for path in folder.iterdir())
    return {"documents": len(texts), "files": files, "compressed_bytes": stored}


def write_tokenizer(home: Path, texts: list[str], options: argparse.Namespace) -> str:
    """Write a byte-pair encoding with the pattern of Llama 3; return its folder."""
    *_, (_, backend) = train(texts[::10], 500 if options.smoke else 8_000)
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(home / "tokenizer")
    return str(home / "tokenizer")


def compare(
    home: Path, work: str, model: str, count: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Time the script and the command in turns, each in a new process."""
    spent: dict[str, list[dict[str, float]]] = {SCRIPT: [], SUBJECT: []}
    run_both = {SCRIPT: run_script, SUBJECT: run_command}

    def timed(name: str) -> np.ndarray:
        before = child_seconds()
        with watched_hosts() as seconds:
            answers, figures = run_both[name](home, work, model, count)
        by_host = sum(seconds.values())
        used = {"cpu_seconds": child_seconds() - before + by_host, "host_seconds": by_host}
        spent[name].append(used | figures)
        return answers

    ways = {name: functools.partial(timed, name) for name in spent}
    variants = [Variant(name, way, way) for name, way in ways.items()]
    run = run_interleaved(variants, options.repeats, TOLERANCE)
    found = {name: run.times(name) | medians(rounds[1:]) for name, rounds in spent.items()}
    for name, times in found.items():  # other programs, without the model's host
        rounds = zip(times["other_cores"], spent[name][1:], times["seconds"], strict=True)
        times["other_cores"] = [
            max(0.0, cores - own["host_seconds"] / seconds) for cores, own, seconds in rounds
        ]
    ours = found[SUBJECT]
    return {
        "variants": found,
        "speed_up": {SUBJECT: run.speed_up(SUBJECT, SCRIPT)},
        "times_of_work": ours["median_seconds"] / ours["working_seconds"],
        "largest_difference": run.largest_difference,
    }


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def child_seconds() -> float:
    """Return the core seconds of processes that this one has started and waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@contextlib.contextmanager
def watched_hosts() -> Iterator[dict[int, float]]:
    """Count core seconds by process that holds fastText models; these end before they are asked."""
    seconds: dict[int, float] = {}
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(HOST_SECONDS):
            for process in host_processes():  # a copy of the process works on each part of texts
                with contextlib.suppress(psutil.NoSuchProcess):
                    seconds[process.pid] = sum(process.cpu_times()[:2])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seconds
    finally:
        is_over.set()
        thread.join()


def run_script(
    home: Path, work: str, model: str, count: int
) -> tuple[np.ndarray, dict[str, float]]:
    """Run the plain script of this work."""
    target = home / "plain.parquet"
    call("-c", READ + SCRIPTS[work], home / "in/*.gz", target, model)
    return answers_of(pd.read_parquet(target), ANSWER, count), {}


def run_command(
    home: Path, work: str, model: str, count: int
) -> tuple[np.ndarray, dict[str, float]]:
    """Run the command; return its answers and the working time that it reports."""
    out = home / "out"
    shutil.rmtree(out, ignore_errors=True)
    command, *rest = COMMANDS[work]
    words = [*rest, *([model] if model else [])]
    said = call("-m", "gpuclassify", command, home / "in/*.gz", out, *words, "--json")
    summary = json.loads(said)
    last = summary.get("removal", summary)
    seconds = last["elapsed_seconds"]
    seconds += sum(step["seconds"] for step in summary.get("steps", {}).values())
    parts = [pd.read_parquet(path) for path in sorted(out.glob("*.parquet"))]
    found = pd.concat(parts, ignore_index=True)
    if work in COLUMNS:  # annotations are in the order of the rows
        found["id"] = np.arange(len(found))
    return answers_of(found, COLUMNS.get(work, ANSWER), count), {"working_seconds": seconds}


def call(*words: object) -> str:
    """Run Python as a user does, with compiled modules kept; return its output."""
    environment = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{words[:3]} ended with {done.returncode}: {done.stderr[-2_000:]}")
    return done.stdout


def answers_of(found: pd.DataFrame, column: str, count: int) -> np.ndarray:
    """Return a number for each document, float (documents, 1); without the column, 1 if kept."""
    answers = np.zeros((count, 1))
    answers[found["id"], 0] = found.get(column, 1)
    return answers


def table(result: dict[str, Any]) -> str:
    """Return the result as a short table for people to read."""
    lines = [
        f"{result['documents']:,} documents in {result['files']} files, "
        f"{result['compressed_bytes'] / 1e6:.1f} MB compressed",
        f"{'':14}{SCRIPT:>14}{SUBJECT:>14}{'working':>10}{'of work':>9}{'cpu s':>14}",
    ]
    for work, case in result["cases"].items():
        plain, ours = case["variants"][SCRIPT], case["variants"][SUBJECT]
        lines.append(
            f"  {work:12}{plain['median_seconds']:12.2f} s{ours['median_seconds']:12.2f} s"
            f"{ours['working_seconds']:8.2f} s{case['times_of_work']:8.2f}x"
            f"{plain['cpu_seconds']:7.1f}{ours['cpu_seconds']:7.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""A tiny model with its texts, and smoke runs that several tests look at."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks.models import SHAPES, TINY_SIZES, write_model
from benchmarks.texts import Lengths, texts_of_lengths


def pytest_collection_modifyitems(items):
    """Whichever test is the first to look at a smoke run waits for it."""
    for item in items:
        if "smoke_result" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The directory of a tiny BERT."""
    shape = replace(SHAPES["bert"], **TINY_SIZES)
    return str(write_model(tmp_path_factory.mktemp("tiny") / "model", shape))


@pytest.fixture(scope="session")
def some_texts(tiny_model):
    """Forty texts of very different lengths, some of them too long for the model."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    return texts_of_lengths(Lengths(60, 1.2).sample(40), tokenizer)


@pytest.fixture(scope="session")
def smoke_result(tmp_path_factory):
    """What a benchmark's smoke run writes, and where."""

    def run(question, *options):
        folder = tmp_path_factory.mktemp(question)
        command = [sys.executable, "-m", f"benchmarks.{question}", "--smoke", *options]
        done = subprocess.run(
            [*command, "--output", str(folder)],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=560,
        )
        assert done.returncode == 0, done.stderr
        [path] = folder.iterdir()
        *table, last = done.stdout.splitlines()
        assert last == f"written to {path}"
        result = json.loads(path.read_text())
        assert result["question"] == question
        assert {"processor", "cores", "torch_threads", "short_name"} <= set(result["machine"])
        assert {"gpuclassify", "torch", "transformers"} <= set(result["versions"])
        assert result["settings"]["dtype"] == "float32"
        assert result["settings"]["repeats"] == 2
        return result, path, "\n".join(table)

    return run


@pytest.fixture(scope="session")
def throughput_run(smoke_result):
    return smoke_result("throughput", "--peers", "--lengths", "short", "--footprint", "none")


@pytest.fixture(scope="session")
def scaling_run(smoke_result):
    return smoke_result("scaling")

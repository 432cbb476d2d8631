"""A tiny model with its texts, and smoke runs that several tests look at."""

import contextlib
import functools
import importlib
import io
import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer
from transformers.utils import logging

from benchmarks.inputs import SHAPES, TINY_SIZES, Lengths, texts_of_lengths, write_model


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
def smoke_run(tmp_path_factory):
    """What a benchmark's smoke run in this process writes, where, and what it prints."""

    @functools.cache
    def run(question, *options):
        folder = tmp_path_factory.mktemp(question)
        benchmark = importlib.import_module(f"benchmarks.{question}")
        threads, verbosity = torch.get_num_threads(), logging.get_verbosity()
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                path = benchmark.main(["--smoke", *options, "--output", str(folder)])
        finally:
            torch.set_num_threads(threads)
            logging.set_verbosity(verbosity)
        assert list(folder.iterdir()) == [path]
        result = json.loads(path.read_text())
        assert result["question"] == question
        assert isinstance(result["noisy"], bool)
        assert {"processor", "cores", "torch_threads", "short_name"} <= set(result["machine"])
        assert {"gpuclassify", "torch", "transformers"} <= set(result["versions"])
        assert result["settings"]["repeats"] <= 2
        table = printed.getvalue()
        assert table.startswith(f"{benchmark.table(result)}\n")
        assert table.endswith(f"\nwritten to {path}\n")
        return result, path, table

    return run

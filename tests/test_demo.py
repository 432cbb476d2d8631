"""The demonstration: its documents, its cached model, and the job that it runs."""

import functools
import io
import json
import shlex
import subprocess
import sys

import pandas as pd
import pytest
from rich.console import Console

from examples.demo import run, training
from examples.demo.__main__ import next_steps
from examples.demo.training import Settings

pytestmark = pytest.mark.slow


def test_the_whole_demo_runs_the_main_job_and_counts_honestly(tmp_path, monkeypatch):
    quick = functools.partial(
        training.cached_model, cache_dir=tmp_path / "cache", settings=Settings(steps=20)
    )
    monkeypatch.setattr(run, "cached_model", quick)
    monkeypatch.setattr(run, "is_cached", lambda max_documents: False)
    console = Console(file=io.StringIO())
    monkeypatch.chdir(tmp_path)
    result = run.run_demo("demo-output", console, max_documents=600)
    held_out = pd.concat(
        pd.read_json(file, lines=True)
        for file in sorted((tmp_path / "demo-output/input").iterdir())
    )
    labelled = pd.read_parquet(result.output)
    assert labelled["text"].tolist() == held_out["text"].tolist()
    assert result.accuracy == (labelled["area"] == labelled["domain_pred"]).mean()
    assert result.majority_share == held_out["area"].value_counts(normalize=True).max()
    assert result.job.rows_read == result.job.rows_written == len(held_out)
    first, *rest = console.file.getvalue().splitlines()
    assert first.strip() == "collecting docstrings"
    assert any(line.startswith("training on") for line in rest)
    json.dumps(result.as_dict())

    # What is printed last runs as it stands, in any folder.
    lines = next_steps("demo-output", result.model).splitlines()
    command = next(line for line in lines if " classify " in line)
    script = "\n".join(lines[lines.index("import gpuclassify, pandas as pd") :])
    assert command.endswith(f"--model {tmp_path / 'demo'}")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for words in (shlex.split(command), [sys.executable, "-c", script]):
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        assert "Warning" not in done.stderr
    by_command = pd.read_parquet("labelled")["preds"].tolist()
    assert by_command == pd.read_parquet("labelled.parquet")["preds"].tolist()

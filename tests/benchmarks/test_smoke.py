"""Benchmarks start, write results of the documented form, and committed results are sound."""

import importlib
import json
import re
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks import RESULTS, throughput
from benchmarks.device import choose, parse_options
from benchmarks.gpu.run import all_steps
from benchmarks.harness import noise

ROOT = RESULTS.parents[1]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "benchmarks").rglob("*.py"))
    if not path.stem.startswith("__")
]
# Programs that benchmarks start with paths for arguments.
CHILDREN = {"benchmarks.deduplicators", "benchmarks.footprint", "benchmarks.start"}
COMMITTED = sorted(RESULTS.glob("*.json"))
PAGES = [ROOT / "README.md", ROOT / "benchmarks/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Known flaws of results from a borrowed GPU without time for another run.
TOLD = {
    "device-2026-11-26-nvidia-h200-bert": {"unfinished"},  # all ways were timed, idle time was not
    "device-2026-11-26-nvidia-h200-deberta": {"failures"},  # one peer's float16 differs by 0.07
}


def test_every_benchmark_imports_and_prints_its_help(capsys):
    for name in MODULES:
        module = importlib.import_module(name)
        if hasattr(module, "main") and name not in CHILDREN:
            with pytest.raises(SystemExit) as ended:
                module.main(["--help"])
            assert ended.value.code == 0
            assert "usage:" in capsys.readouterr().out


def test_files_that_the_run_on_a_gpu_names_exist():
    for step in all_steps("cuda"):
        names = [name.removeprefix("--ignore=") for name in step.arguments if "tests/" in name]
        assert all((ROOT / name).exists() for name in names)


def test_a_smoke_run_writes_a_complete_result(tmp_path, capsys):
    benchmark = importlib.import_module("benchmarks.thresholds")
    path = benchmark.main(["--smoke", "--output", str(tmp_path)])
    assert list(tmp_path.iterdir()) == [path]
    result = json.loads(path.read_text())
    assert result["question"] == "thresholds"
    assert result["noisy"] == bool(noise(result))
    assert {"processor", "cores", "torch_threads", "short_name"} <= set(result["machine"])
    assert {"gpuclassify", "torch", "transformers"} <= set(result["versions"])
    assert capsys.readouterr().out.startswith(f"{benchmark.table(result)}\n")
    for times in result["variants"].values():
        assert len(times["seconds"]) == len(times["other_cores"]) == result["settings"]["repeats"]
        assert times["median_seconds"] == pytest.approx(np.median(times["seconds"]))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_no_committed_result_is_noisy(path):
    report = json.loads(path.read_text())
    steps = report.get("steps", [{"results": [report]}])  # a run on a GPU has several
    for result in (result for step in steps for result in step["results"]):
        if "cores" in result.get("machine", ()):  # others are arithmetic
            assert noise(result) == []
        wrong = ("noisy", "failures", "unfinished", "unreadable")
        assert {key for key in wrong if result.get(key)} == TOLD.get(path.stem, set())


def test_pages_name_and_pictures_show_committed_results():
    pattern = re.compile(r"\bresults/([\w.*-]+\.(?:json|png))")
    named = {name for page in PAGES for name in pattern.findall(page.read_text("utf-8"))}
    assert named and not {name for name in named if not list(RESULTS.glob(name))}
    stems = tuple(path.stem for path in COMMITTED)
    assert all(picture.stem.startswith(stems) for picture in RESULTS.glob("*.png"))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_on_a_gpu_the_rivals_of_a_model_run_or_are_said_to_be_missing(
    sequence_classifier, monkeypatch, capability
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr("gpuclassify.inference.device.pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for architecture in ("bert", "deberta-v2"):
        options = parse_options(["--device", "cuda"])
        choice = choose(options, str(sequence_classifier(architecture)))
        names = [way.name for way in choice.ways]
        assert names[-1] == "gpuclassify" and choice.ways[-1].dtype == "float16"
        assert {"gpuclassify, bfloat16", "sorted batches, float16, best batch"} < set(names)
        assert "gpuclassify, layers of transformers" in names
        assert ("gpuclassify, float8" in names) == (capability == (9, 0))
        assert ("gpuclassify, float8" in choice.left_out) == (capability == (8, 0))
        setting = SimpleNamespace(shape=None, options=options)
        with mock.patch.object(throughput, "matmul_peaks", lambda _, __, dtype: str(dtype)):
            peaks = throughput._peaks(choice.ways, setting)
        assert peaks == {name: f"torch.{name}" for name in ("float32", "float16", "bfloat16")}
        rivals = {name for name in choice.left_out if "flash" in name}
        assert len(rivals) == (2 if architecture == "deberta-v2" else 0)
        assert all("pip install" in choice.left_out[name] for name in rivals)

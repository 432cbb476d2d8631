"""Modules that lie in the working directory, such as a downloaded data set's, never run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import search_path

# Imported by Python's own start of processes, by Dask's, and by ours.
NAMES = ("struct", "pickle", "signal", "torch", "numpy", "psutil", "distributed", "multiprocessing")
PLANTED = """
import os
with open(os.path.join(os.path.dirname(__file__), "ran"), "a") as file:
    file.write(__name__)
raise SystemExit(3)
"""
SCRIPT = """
import os, time
import beside  # the script's own folder stays

from gpuclassify.cluster import get_client

def seen():
    import beside
    return beside.VALUE, os.environ.get("PYTHONSAFEPATH")

if __name__ == "__main__":
    with get_client("cpu", n_workers=2) as client:
        assert client.submit(seen).result() == (3, None)
        client.cluster.scale(3)
        while len(client.scheduler_info()["workers"]) < 3:
            time.sleep(0.1)
    assert "PYTHONSAFEPATH" not in os.environ
"""


@pytest.fixture
def planted(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(PLANTED)
    (folder / "a.jsonl").write_text('{"text": "a river"}\n{"text": "a market"}\n')
    yield folder
    assert not (folder / "ran").exists()


def run(folder, *command, **environment):
    known = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=known | {"PYTHONPATH": search_path()} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_workers_of_a_script_import_from_its_folder_and_not_from_where_it_runs(planted, tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 3")
    (tmp_path / "script.py").write_text(SCRIPT)
    run(planted, sys.executable, str(tmp_path / "script.py"))


@pytest.mark.parametrize("command", ["gpuclassify", "python -m gpuclassify"])
def test_the_command_imports_nothing_from_where_it_runs(planted, checkpoint, command):
    console = str(Path(sys.executable).with_name("gpuclassify"))
    start = [console] if command == "gpuclassify" else [sys.executable, "-m", "gpuclassify"]
    if command != "gpuclassify":  # before any of our code runs, Python looks there for its own
        for name in ("struct", "pickle", "signal", "multiprocessing"):
            (planted / f"{name}.py").unlink(missing_ok=True)
    doctor = run(planted, *start, "doctor", "--json", HF_HUB_OFFLINE="1")
    assert "exit code 3" not in doctor
    model = ("--classifier", "domain", "--model", checkpoint("domain"), "--workers", "2")
    run(planted, *start, "classify", "a.jsonl", "out", *map(str, model))


def test_the_process_that_holds_a_fasttext_model_imports_nothing_from_where_it_runs(
    planted, tmp_path
):
    pytest.importorskip("fasttext")
    from tests.fasttext_models import train_fasttext

    path = train_fasttext(tmp_path, "softmax")
    script = (
        "import gpuclassify; classifier = gpuclassify.FastTextClassifier("
        f"model={str(path)!r}); print(classifier(['a river']).shape)"
    )
    (tmp_path / "script.py").write_text(script)
    run(planted, sys.executable, str(tmp_path / "script.py"), TMPDIR=str(tmp_path))

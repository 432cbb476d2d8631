"""What the index would give: a source distribution that is whole, and a wheel that works alone."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pandas as pd
import pytest
import yaml

import gpuclassify
from tests.replicas import sample_texts, write_checkpoint

ROOT = Path(__file__).parents[1]
# Of the repository alone.
NOT_RELEASED = (".ci/", ".github/", ".gitignore", ".pre-commit-config.yaml")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(*command, cwd):
    command = list(map(str, command))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd, env=environment
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


def tracked_files():
    return run("git", "ls-files", cwd=ROOT).splitlines()


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A wheel that was built from the source distribution, and that distribution."""
    folder = tmp_path_factory.mktemp("release")
    for name in tracked_files():
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--outdir", folder / "dist", folder / "source", cwd=folder)
    return folder / "dist"


def test_the_source_distribution_has_every_file(dist):
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        released = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in tracked_files() if name not in released]
    assert [name for name in missing if not name.startswith(NOT_RELEASED)] == []


def test_the_wheel_has_every_file_of_the_package(dist):
    with ZipFile(next(dist.glob("*.whl"))) as archive:
        released = set(archive.namelist())
    assert {name for name in tracked_files() if name.startswith("gpuclassify/")} <= released
    elsewhere = ("benchmarks", "docs", "examples", "tests")
    assert not [name for name in released if name.startswith(elsewhere)]


def test_the_wheel_works_in_a_fresh_environment(dist, tmp_path):
    home = tmp_path / "environment"
    run(sys.executable, "-m", "venv", home, cwd=tmp_path)
    install = [home / "bin" / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
    run(*install, "torch", cwd=tmp_path)  # first, so that its pinned build is chosen
    run(*install, next(dist.glob("*.whl")), cwd=tmp_path)
    run(home / "bin" / "pip", "check", cwd=tmp_path)

    texts = sample_texts(20)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "in.jsonl").write_text(lines, encoding="utf-8")
    write_checkpoint(tmp_path / "model")
    command = home / "bin" / "gpuclassify"
    assert gpuclassify.__version__ in run(command, "--version", cwd=tmp_path)
    model = ["--classifier", "checkpoint", "--model", "model"]
    run(command, "classify", "in.jsonl", "out", *model, cwd=tmp_path)
    report = (tmp_path / "out" / "_report" / "report.html").read_text(encoding="utf-8")
    assert "</html>" in report
    assert len(pd.read_parquet(tmp_path / "out")) == len(texts)
    show = "import gpuclassify; print(gpuclassify.__file__)"
    place = run(home / "bin" / "python", "-c", show, cwd=tmp_path)
    assert Path(place.strip()).is_relative_to(home)


def test_the_citation_names_no_version_of_its_own():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["title"].startswith("gpuclassify")
    assert "version" not in citation  # the one place is gpuclassify/_version.py
    assert citation["license"] == "Apache-2.0"

"""What the index would give: a source distribution that is whole, and a wheel that works alone."""

import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pandas as pd
import pytest
import yaml

import gpuclassify
from tests import environment as make_environment
from tests.hub_server import File, HubServer
from tests.replicas import sample_texts, write_checkpoint

ROOT = Path(__file__).parents[1]
# Of the repository alone.
NOT_RELEASED = (".ci/", ".github/", ".gitignore", ".pre-commit-config.yaml")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(*command, cwd, code=0):
    command = list(map(str, command))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd, env=environment
    )
    assert ended.returncode == code, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout if code == 0 else ended.stdout + ended.stderr


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


@pytest.fixture
def run_script(dist, tmp_path, monkeypatch):
    """Runs a script of examples/uv by its address on a Hub, with uv's own environment for it.

    The environment gets this checkout's wheel, and the wheels in folders that pip is told of, such
    as a small torch; they are an index that uv asks first. Other packages are from its usual one.
    """
    uv = shutil.which("uv") or shutil.which("uv", path=Path(sys.executable).parent)
    if uv is None:
        pytest.fail("this test needs uv, of the extra [dev]: pip install uv", pytrace=False)
    scripts = {path.name: path.read_bytes() for path in (ROOT / "examples/uv").glob("*.py")}
    assert scripts.keys() == {"annotate.py", "classify.py", "decontaminate.py"}
    for folder in (dist, *os.environ.get("PIP_FIND_LINKS", "").split()):
        for wheel in Path(folder).glob("*.whl"):
            page = tmp_path / "index" / wheel.name.partition("-")[0] / "index.html"
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(f'<a href="{wheel.as_uri()}">{wheel.name}</a>')
    with HubServer(["hf_secret"], "datasets") as hub:
        hub.add("acme/scripts", scripts)
        variables = {
            **{"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_secret", "HF_HUB_DISABLE_XET": "1"},
            **{"HF_HOME": str(tmp_path / "hf-home"), "UV_INDEX": (tmp_path / "index").as_uri()},
            **{"UV_PYTHON": sys.executable, "UV_PYTHON_DOWNLOADS": "never"},
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

        def run_script(name, *words):
            address = f"{hub.url}/datasets/acme/scripts/resolve/main/{name}.py"
            run(uv, "run", address, *words, cwd=tmp_path)

        yield run_script, hub


def read_dataset(repo):
    """The rows of a dataset's Parquet files, and its card."""
    tree = repo.tree()
    files = [io.BytesIO(file.data) for path, file in tree.items() if path.endswith(".parquet")]
    return pd.concat(map(pd.read_parquet, files)), tree["README.md"].data.decode()


def test_one_file_scripts_write_datasets_with_cards(run_script, tmp_path):
    run_script, hub = run_script
    items = [f"Which of these {n} long rivers crosses the most borders of states?" for n in (7, 9)]
    frame = pd.DataFrame({"text": [*sample_texts(20), f"Quiz: {items[0]} Nobody knows."]})
    hub.add("acme/raw", {"data/0.parquet": File(frame.to_parquet(), is_large=True)})
    hub.add(
        "acme/evals", {"quiz.jsonl": "".join(f'{{"question": "{x}"}}\n' for x in items).encode()}
    )
    write_checkpoint(tmp_path / "model")
    model = ["--classifier", "checkpoint", "--model", "model"]
    raw, against = "hf://datasets/acme/raw", ["--against", "hf://datasets/acme/evals/quiz.jsonl"]
    found = ["contaminated", "contamination", "contaminated_by"]
    columns = {
        "classify": (["text", "preds"], 21, model),
        "annotate": (["_file", "_place", "_left_out", "preds"], 21, model),
        "decontaminate": (["text", *found], 20, against),
    }
    for name, (wanted, count, words) in columns.items():
        run_script(name, raw, f"hf://datasets/acme/{name}", *words)
        rows, card = read_dataset(hub.repos[f"acme/{name}"])
        assert (list(rows), len(rows)) == (wanted, count)
        assert card.startswith("---\ntags:\n- gpuclassify\n---\n")
        assert all(f"| `{column}` |" in card for column in wanted)
        assert f"[acme/raw]({hub.url}/datasets/acme/raw)" in card
        assert ("| `DistributedDataClassifier` | a directory |" in card) == (words is model)
        if "text" in wanted:
            assert rows["text"].tolist() == frame["text"].tolist()[:count]
    folders = {path.name for path in tmp_path.iterdir()} - {"model", "hf-home", "index"}
    assert folders == {f"staging-datasets-acme-{name}" for name in columns}


@pytest.fixture
def environment(tmp_path):
    """A fresh environment that sees this one's packages, but not its editable installation."""

    class Environment:
        home, packages = tmp_path / "environment", None

        def run(self, name, *words, **options):
            return run(self.home / "bin" / name, *words, cwd=tmp_path, **options)

        def pip(self, *words):
            """Run pip while it does not see the packages of another environment."""
            others = self.packages / "others.pth"
            others.unlink(missing_ok=True)
            self.run("python", "-m", "pip", "--disable-pip-version-check", *words)
            others.write_text(sysconfig.get_path("purelib") + "\n")

    made = Environment()
    run(sys.executable, "-m", "venv", made.home, cwd=tmp_path)
    (made.packages,) = made.home.glob("lib/python*/site-packages")
    return made


def test_an_installation_leaves_nothing_behind(dist, environment, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    lines = [json.dumps({"text": text}) for text in sample_texts(20) * 2]
    (tmp_path / "in.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (wheel,), left = dist.glob("*.whl"), environment.packages / "gpuclassify"
    for out in ("out", "again"):
        environment.pip("install", "--no-deps", "--no-index", wheel)
        environment.run("gpuclassify", "dedup", "in.jsonl", out, "--method", "fuzzy")
        assert len(pd.read_parquet(tmp_path / out)) == 20
        written = [path for path in left.rglob("*") if path.suffix in (".nbi", ".nbc")]
        assert written == [] and [*tmp_path.glob("cache/gpuclassify/numba/*/*.nbi")]
        environment.pip("uninstall", "--yes", "gpuclassify")
        assert not left.exists()
        said = environment.run("python", "-c", "import gpuclassify", code=1)
        assert said.splitlines()[-1] == "ModuleNotFoundError: No module named 'gpuclassify'"
    (left / "corpus/__pycache__").mkdir(parents=True)  # as earlier versions left it
    said = run(environment.home / "bin/python", "-m", "gpuclassify", "doctor", cwd=ROOT, code=1)
    assert "leftover folder" in said and "rm -r" in said


def make_packages(folder, **versions):
    """Write a wheel of each package and version, without content."""
    for name, known in versions.items():
        for version in known:
            with ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
                about = f"{name}-{version}.dist-info"
                wheel.writestr(f"{about}/METADATA", f"Name: {name}\nVersion: {version}\n")
                wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
                wheel.writestr(f"{about}/RECORD", "")


def test_make_changes_no_version_that_others_have_installed(environment, tmp_path, monkeypatch):
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    (source / "tests").mkdir(parents=True)
    wheels.mkdir()
    shutil.copy(ROOT / "tests/environment.py", source / "tests")
    make_packages(wheels, numba=["1.0", "2.0", "3.0"], sphinx=["1.0", "2.0"], mypy=["1.0", "2.0"])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))

    def make(*words, pins):
        lines = "\n".join(f"{name}=={version}" for name, version in pins.items())
        (source / "constraints.txt").write_text(lines + "\n")
        environment.run("python", source / "tests/environment.py", *words)
        listed = json.loads(environment.run("pip", "list", "--format", "json"))
        return {one["name"]: one["version"] for one in listed if one["name"] in pins}

    pins = {"numba": "2.0", "sphinx": "1.0", "mypy": "1.0"}
    assert make("sphinx", pins=pins) == {"sphinx": "1.0"}
    environment.run("pip", "install", "--quiet", "numba==3.0")
    found = make("numba", "mypy", pins=pins)
    assert found == {"numba": "3.0", "sphinx": "1.0", "mypy": "1.0"}
    environment.run("pip", "install", "--quiet", "numba==1.0", "sphinx==2.0")
    found = make("numba", "sphinx", "mypy", pins={**pins, "mypy": "2.0"})
    # What make has installed itself, it updates.
    assert found == {"numba": "1.0", "sphinx": "2.0", "mypy": "2.0"}


def test_make_leaves_a_copy_that_others_have_installed(monkeypatch):
    words = [".[docs]", "--no-deps"]
    monkeypatch.setattr(make_environment, "has_copy", lambda: True)
    first, *others, last = make_environment.arguments(words)
    assert first.startswith("click") and any(one.startswith("sphinx") for one in others)
    assert last == "--no-deps" and "--editable" not in others
    monkeypatch.setattr(make_environment, "has_copy", lambda: False)
    assert [*make_environment.arguments(words)] == ["--editable", f"{ROOT}[docs]", "--no-deps"]


def test_the_citation_names_no_version_of_its_own():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["title"].startswith("gpuclassify")
    assert "version" not in citation  # the one place is gpuclassify/_version.py
    assert citation["license"] == "Apache-2.0"

"""Imports of the package run one way, and the checker that says so finds what does not."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.layers import PACKAGE, problems

ROOT = Path(__file__).parents[1]


def test_imports_of_the_package_run_one_way():
    found = problems(ROOT / PACKAGE)
    assert not found, "\n".join(found)


@pytest.fixture
def found_in(tmp_path):
    """Problems of a made-up package, given as file names with their text."""

    def check(**files):
        for name, text in files.items():
            path = tmp_path / PACKAGE / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            (path.parent / "__init__.py").touch()
        (tmp_path / PACKAGE / "__init__.py").write_text("from gpuclassify.commands.cli import main")
        return problems(tmp_path / PACKAGE)

    return check


def test_arrows_down_and_inside_a_room_are_fine(found_in):
    assert not found_in(
        cli="import gpuclassify.jobs.job as job\nimport torch, os.path",
        jobs__job="from gpuclassify import hub\nfrom gpuclassify.jobs.parts import Part",
        jobs__parts="from gpuclassify.hub import files\nfrom gpuclassify.hub.files import read",
        hub__files="",
    )


LAZY = "def load():\n    from gpuclassify.jobs.job import Job"
TYPES = "if TYPE_CHECKING:\n    from gpuclassify.jobs.job import Job"
BY_NAME = "job =\\\n  importlib.import_module('gpuclassify.jobs.job').Job"


@pytest.mark.parametrize("text", ["\nimport gpuclassify.jobs.job", LAZY, TYPES, BY_NAME])
def test_an_arrow_to_a_higher_layer_is_found_wherever_it_stands(found_in, text):
    [line] = found_in(hub__files=text, jobs__job="")
    assert line.startswith("gpuclassify/hub/files.py:2: hub imports jobs.job")
    assert line.endswith("which is in a higher layer")


def test_names_of_a_room_and_modules_in_it_are_told_apart(found_in):
    name, module = found_in(
        hub__files="from gpuclassify.jobs import Job, job", jobs__job="class Job: ..."
    )
    assert "hub imports jobs.Job" in name
    assert "hub imports jobs.job" in module


def test_an_arrow_down_may_be_forbidden(found_in):
    [line] = found_in(inference__engine="import gpuclassify.frames.pandas", frames__pandas="")
    assert line == "gpuclassify/inference/engine.py:1: inference must not import frames.pandas"


def test_a_circle_is_found_whatever_closes_it(found_in):
    [line] = found_in(
        hub__a="from gpuclassify.hub.b import B",
        hub__b="from gpuclassify.hub import c",
        hub__c="def late():\n    import gpuclassify.hub.a",
    )
    assert "hub.a -> hub.b -> hub.c -> hub.a" in line * 2
    assert "gpuclassify/hub/c.py:2 imports hub.a" in line


def test_every_circle_is_told(found_in):
    circles = found_in(
        hub__a="import gpuclassify.hub.b, gpuclassify.hub.c",
        hub__b="import gpuclassify.hub.a",
        hub__c="import gpuclassify.hub.a",
    )
    assert len(circles) == 2


@pytest.mark.parametrize("text", ["from gpuclassify import Pipeline", "import gpuclassify"])
def test_an_import_from_the_face_is_found(found_in, text):
    [line] = found_in(cli=text)
    assert line.startswith("gpuclassify/commands/cli.py:1: imports ")
    assert line.endswith("from the face")


def test_a_file_in_no_layer_is_found(found_in):
    [line] = found_in(attic="")
    assert line.startswith("attic: in no layer")


def test_the_script_tells_problems_and_figures():
    done = subprocess.run([sys.executable, "tests/layers.py"], cwd=ROOT, capture_output=True)
    assert done.returncode == bool(problems(ROOT / PACKAGE))
    assert b" arrows, " in done.stdout

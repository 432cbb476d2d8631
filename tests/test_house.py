"""Imports of the package run one way, CONTRIBUTING's map is that of today, and both can fail."""

import re

import pytest

from tests.house import HOUSE, LAYERS, MAP, PACKAGE, ROOMS, ROOT, map_of_the_house, problems


def test_imports_of_the_package_run_one_way():
    assert not problems(HOUSE)


def test_the_map_has_every_room_and_is_that_of_today():
    (drawn,) = MAP.findall((ROOT / "CONTRIBUTING.md").read_text())
    now, cure = map_of_the_house(), "python tests/house.py write"
    assert re.sub(r"\d+", "", drawn) == re.sub(r"\d+", "", now), cure
    counts = zip(*(map(int, re.findall(r"\d+", text)) for text in (drawn, now)), strict=True)
    assert all(abs(then - count) <= 100 + count / 5 for then, count in counts), cure
    rooms = {place.name for place in HOUSE.iterdir() if (place / "__init__.py").exists()}
    assert rooms == set(ROOMS) == set().union(*LAYERS) - {"_version", "__main__"}


@pytest.mark.parametrize(
    "text",
    [
        "\nimport gpuclassify.jobs.job",
        "def load():\n    from gpuclassify.jobs.job import Job",
        "if TYPE_CHECKING:\n    from gpuclassify.jobs import job",
        "job =\\\n  importlib.import_module('gpuclassify.jobs.job').Job",
    ],
)
def test_an_arrow_to_a_higher_layer_is_told_wherever_it_stands(tmp_path, text):
    (line,) = problems(package(tmp_path, hub__files=text, jobs__job=""))
    assert line.startswith("gpuclassify/hub/files.py:2: hub imports jobs.")


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"hub__files": "import gpuclassify"}, "from the face"),
        ({"attic__box": ""}, "attic: in no layer"),
        ({"inference__engine": "import gpuclassify.frames.pandas"}, "must not import frames"),
        ({"hub__files": "Path('x').exists()"}, "a missing permission"),
        ({"hub__files": "class A:\n    '''Return what it is.'''"}, "1 of 1 docstrings"),
        ({"hub__files": "x = 1  # of a part, at least"}, "1 of 1 comments"),
        ({"jobs__job": "x = 'decontamination'"}, "jobs knows a recipe by its name"),
        (
            {
                "corpus__x__job": "\n".join(
                    f"from gpuclassify.jobs.job import a{i}" for i in range(16)
                ),
                "jobs__job": "",
            },
            "recipes import 16 names",
        ),
        ({"hub__a": "import gpuclassify.hub.b", "hub__b": "import gpuclassify.hub.a"}, "circle"),
    ],
)
def test_what_breaks_a_rule_is_told(tmp_path, files, told):
    assert any(told in line for line in problems(package(tmp_path, frames__pandas="", **files)))


def package(folder, **files):
    """A made-up package of files, whose names have ``__`` for a slash."""
    for name, text in files.items():
        path = folder / PACKAGE / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        (path.parent / "__init__.py").touch()
    (folder / PACKAGE / "__init__.py").touch()
    return folder / PACKAGE

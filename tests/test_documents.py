"""What README and notebooks show runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import gpuclassify
from gpuclassify.classifiers import FAMILIES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize(
    "notebook", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.name
)
def test_notebooks_run(notebook, tmp_path):
    content = nbformat.read(notebook, as_version=4)
    NotebookClient(content, timeout=120, resources={"metadata": {"path": tmp_path}}).execute()


def test_the_readme_example_with_a_model_of_its_own_runs(tmp_path):
    (block,) = [block for block in BLOCKS if "gpuclassify.testing" in block]
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "['ham', 'spam']" in done.stdout


def test_the_readme_filters_are_constructor_calls_that_exist():
    (block,) = [block for block in BLOCKS if "keep_field=" in block]
    exec(block, {name: getattr(gpuclassify, name) for name in gpuclassify.__all__})


def test_the_readme_table_names_each_classifier_with_its_model_and_licence():
    for family in FAMILIES.values():
        (row,) = [
            line for line in README.splitlines() if line.startswith(f"| `{family.__qualname__}`")
        ]
        assert family.licence in row or "model's" in row
        assert family.defaults.get("model", "model=") in row
        columns = [v for k, v in family.defaults.items() if k.endswith("label_field")]
        assert all(column.removesuffix("-score-label") in row for column in columns)

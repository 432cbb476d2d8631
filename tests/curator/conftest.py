"""Runs NeMo Curator's scripts with other imports, and small models under the published names."""

import hashlib
import importlib.util
import json
import re

import pandas as pd
import pytest
import torch

from gpuclassify.classifiers import FAMILIES
from tests.replicas import safety_template, sample_texts

TEXTS = [*sample_texts(120, seed=11, max_words=40), "", "天気がいい 🙂"]
FRAME = pd.DataFrame({"text": pd.array(TEXTS, "str"), "id": range(len(TEXTS))})
SMALL_MODELS = (
    *("domain", "multilingual-domain", "quality", "content-type", "prompt-task-complexity"),
    *("fineweb-edu", "fineweb-mixtral-edu", "fineweb-nemotron-edu"),
)
# What a machine without the library or the device has in its place.
ELSEWHERE = {
    '"cudf"': '"cudf"' if importlib.util.find_spec("cudf") else '"pandas"',
    '"gpu"': '"gpu"' if torch.cuda.is_available() else '"cpu"',
    "import cudf": "import cudf" if importlib.util.find_spec("cudf") else "import pandas",
    '"cuda"': '"cuda"' if torch.cuda.is_available() else '"cpu"',
}
IMPORTS = (
    (r"from (nemo_curator\.classifiers\.base|crossfit[\w.]*) import", "curator.crossfit"),
    (r"from nemo_curator[\w.]* import", "curator"),
    (r"import nemo_curator", "curator"),
)


@pytest.fixture
def run_script(tmp_path, monkeypatch):
    """Runs a script with changed imports in a folder with its input; returns its names.

    `edits` are strings to replace: names of models by directories.
    """
    monkeypatch.chdir(tmp_path)

    def run(script, edits=None, **names):
        for folder in re.findall(r'"(\w+)/\*\.jsonl"', script):
            write_input(tmp_path / folder)
        for pattern, module in IMPORTS:
            whole = "import gpuclassify.curator as nemo_curator"
            lines = whole if pattern.startswith("import") else f"from gpuclassify.{module} import"
            script = re.sub(pattern, lines, script)
        for old, new in (ELSEWHERE | (edits or {})).items():
            script = script.replace(old, str(new))
        scope = {"__name__": "__main__", **names}
        exec(compile(script, "script.py", "exec"), scope)
        return scope

    return run


def write_input(folder):
    """Two files of JSON lines with the rows of FRAME."""
    folder.mkdir(exist_ok=True)
    rows = [json.dumps(row) + "\n" for row in FRAME.to_dict("records")]
    (folder / "a.jsonl").write_text("".join(rows[:50]))
    (folder / "b.jsonl").write_text("".join(rows[50:]))


def read_output(folder):
    """The rows of a folder of JSON lines, by id."""
    parts = [pd.read_json(path, lines=True) for path in sorted(folder.glob("*.jsonl"))]
    return pd.concat(parts).sort_values("id", ignore_index=True)


@pytest.fixture
def small_models(monkeypatch, checkpoint, safety_models):
    """Classifiers whose default models are small copies, and the prompt that those know."""
    for name in SMALL_MODELS:
        monkeypatch.setitem(FAMILIES[name].defaults, "model", str(checkpoint(name)))
    monkeypatch.setitem(FAMILIES["aegis"].defaults, "model", str(safety_models.defensive))
    guard = FAMILIES["instruction-data-guard"].defaults
    monkeypatch.setitem(guard, "model", str(safety_models.guard))
    monkeypatch.setitem(guard, "adapter", str(safety_models.defensive))
    monkeypatch.setitem(guard, "base_model", str(safety_models.base))
    digest = hashlib.sha256(safety_template().encode()).hexdigest()
    monkeypatch.setitem(FAMILIES["aegis"].defaults, "template_digest", digest)
    monkeypatch.setitem(FAMILIES["aegis"].defaults, "base_model", str(safety_models.base))

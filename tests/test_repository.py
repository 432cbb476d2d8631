"""What a repository is expected to have, beside the package: examples, hooks and hosted checks."""

import json
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pandas as pd
import pytest
import yaml

from gpuclassify import Mix
from tests.fasttext_models import published_model
from tests.processes import search_path
from tests.replicas import sample_texts

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
RULE = re.compile(r"^([\w.-]+):", re.MULTILINE)


@pytest.fixture
def source(tmp_path):
    frame = pd.DataFrame({"text": [*sample_texts(12), None], "id": range(13)})
    (tmp_path / "in").mkdir()
    for start in (0, 6):
        frame[start : start + 7 if start else 6].to_json(
            tmp_path / f"in/{start}.jsonl", orient="records", lines=True
        )
    return tmp_path / "in"


def run_example(name, *arguments):
    command = [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={"PATH": "", "PYTHONPATH": search_path()}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_of_a_frame(checkpoint):
    printed = run_example("frame.py", checkpoint("domain"))
    head, *rows = printed.splitlines()
    assert head.split() == ["id", "domain_pred", "confidence"]
    assert [row.split()[1] for row in rows] == ["0", "1", "2"]


def test_the_example_of_a_job(source, tmp_path, checkpoint):
    arguments = (source, tmp_path / "out", checkpoint("quality"))
    printed = run_example("job.py", *arguments)
    kept = pd.read_parquet(tmp_path / "out")
    assert printed == f"13 rows read, {len(kept)} kept\n"
    assert set(kept["quality_pred"]) <= {"High", "Medium"}
    assert run_example("job.py", *arguments) == printed


def test_the_example_of_a_cluster(source, tmp_path, checkpoint):
    models = (checkpoint("quality"), checkpoint("domain"))
    assert run_example("cluster.py", source, tmp_path / "out", *models) == "13 rows read\n"
    labelled = pd.read_parquet(tmp_path / "out").sort_values("id")
    assert labelled["id"].tolist() == list(range(13))
    assert labelled[["quality_pred", "domain_pred"]].notna().sum().tolist() == [12, 12]


def test_the_example_of_a_corpus(tmp_path, checkpoint):
    texts = [*sample_texts(130, min_words=60, max_words=90), "too short", None]
    texts += [texts[3], f"{texts[4]} More.", texts[5].upper()]
    rows = pd.DataFrame({"text": texts, "id": range(len(texts)), "source": "made"})
    (tmp_path / "crawl").mkdir()
    path = tmp_path / "crawl/0.jsonl"
    path.write_text(rows.to_json(orient="records", lines=True) + '{"text": "cut')
    item = " ".join(texts[7].split()[10:40])
    (tmp_path / "evals.jsonl").write_text(json.dumps({"question": item}) + "\n")
    models = {"language": published_model(), "tokenizer": checkpoint("quality"), "tokens": "4000"}
    models |= {"quality": checkpoint("quality"), "education": checkpoint("fineweb-edu")}
    arguments = [tmp_path / "crawl", tmp_path / "evals.jsonl", tmp_path / "out"]
    arguments += [f"{name}={value}" for name, value in models.items()]

    printed = run_example("corpus.py", *arguments)

    drawn = pd.read_json(tmp_path / "out/drawn.jsonl", lines=True)
    assert printed.startswith(f"{len(drawn)} documents to label: ")
    labelled = drawn.assign(is_good=drawn["fineweb-edu-score-float"] > -100)
    labelled.loc[labelled["fineweb-edu-score-float"].idxmin(), "is_good"] = False
    labelled.to_json(tmp_path / "out/labelled.jsonl", orient="records", lines=True)

    printed = run_example("corpus.py", *arguments)

    assert "The training set: " in printed
    corpus = pd.read_parquet(tmp_path / "out/corpus")
    expected = set(rows["id"]) - {7, 130, 131} - {132}  # contaminated, short, null, equal text
    assert set(corpus["id"]) <= expected and len(corpus) > 20
    assert set(corpus["quality_pred"]) <= {"High", "Medium"}
    mix = Mix.load(tmp_path / "out/mix.json")
    assert sum(cell.tokens for cell in mix.cells.values()) == corpus["tokens"].sum()


# What may stand in a workflow, a job and a step; another key is a mistake that no run of it tells.
KEYS = (
    {"name", "on", "permissions", "concurrency", "env", "defaults", "jobs"},
    {"name", "needs", "if", "permissions", "environment", "concurrency", "env", "strategy"}
    | {"runs-on", "timeout-minutes", "steps"},
    {"id", "name", "if", "uses", "with", "run", "env", "shell", "working-directory"}
    | {"timeout-minutes", "continue-on-error"},
)


@pytest.mark.skipif(not WORKFLOWS, reason="a source distribution has no hosted checks")
def test_hosted_checks_are_workflows_of_rules_that_exist_on_the_pythons_that_are_named():
    rules = set(RULE.findall((ROOT / "Makefile").read_text(encoding="utf-8")))
    called, pythons, systems = set(), set(), set()
    for path in WORKFLOWS:
        workflow = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)  # "on" is no True
        jobs = workflow["jobs"]
        assert workflow["on"] and workflow.keys() <= KEYS[0]
        for job in jobs.values():
            assert {"runs-on", "steps"} <= job.keys() <= KEYS[1]
            assert {*filter(None, [job.get("needs")])} <= jobs.keys()
            matrix = job.get("strategy", {}).get("matrix", {})
            rows = [matrix, *matrix.get("include", ())]
            for name in re.findall(r"matrix\.(\w+)", str(job)):
                assert name in matrix
            pythons |= {*matrix.get("python", ())}
            systems |= {*matrix.get("os", ())} | {row["os"] for row in rows[1:]}
            for step in job["steps"]:
                assert step.keys() <= KEYS[2] and ("uses" in step) != ("run" in step)
                assert re.fullmatch(r"[\w./-]+@[\w./-]+", step.get("uses", "a@b"))
                called |= set(re.findall(r"\bmake ([\w-]+)", step.get("run", "")))
    assert {"lint", "docs", "demo", "test", "test-all"} <= called <= rules
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg", encoding="utf-8")
    named = re.findall(r"Python :: (3\.\d+)", settings["metadata"]["classifiers"])
    assert pythons == {*named}
    assert systems == {"ubuntu-latest", "macos-latest"}


def test_the_security_page_names_tests_that_there_are():
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    held = re.findall(r"`(tests/[^`]+)`", page)
    assert len(held) > 20 and not [path for path in held if not (ROOT / path).exists()]
    assert "private advisory" in page


def test_each_decision_has_a_page_in_the_index_and_each_example_a_test():
    folder = ROOT / "docs/decisions"
    pages = {path.stem for path in folder.glob("*.md")} - {"index"}
    assert len(pages) >= 6
    assert all(page in (folder / "index.md").read_text(encoding="utf-8") for page in pages)
    tested = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{path.name}"' in tested for path in (ROOT / "examples").glob("*.py"))

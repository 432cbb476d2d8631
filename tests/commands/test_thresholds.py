"""`gpuclassify thresholds` and `select --thresholds`: labels decide which rows are kept."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from gpuclassify import AnnotationWriter, ApplyThresholds, Pipeline, Thresholds, read_files
from gpuclassify.commands.cli import main
from gpuclassify.jobs.input.readers import FileReader

pytest.importorskip("sklearn")


def run(*arguments):
    return CliRunner().invoke(main, [*map(str, arguments)])


def with_scores(frame):
    rng = np.random.default_rng(5)
    every = pd.DataFrame(
        {
            "score": rng.uniform(size=900).astype(np.float32),
            "language": pd.Series(rng.choice(["de", "en"], 900), dtype="str"),
        }
    ).iloc[frame["id"]]
    return frame.assign(score=every["score"].array, language=every["language"].array)


@pytest.fixture
def crawl(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frame = pd.DataFrame({"id": range(900), "text": [f"text {n}" for n in range(900)]})
    (tmp_path / "crawl").mkdir()
    for number in range(3):
        some = frame[300 * number : 300 * (number + 1)]
        some.to_parquet(f"crawl/{number}.parquet", index=False, row_group_size=50)
    Pipeline([FileReader("crawl"), with_scores, AnnotationWriter("notes")]).run(
        report=lambda *_: None
    )
    labelled = with_scores(frame)
    chance = np.random.default_rng(6).uniform(size=900)
    labelled["good"] = chance < labelled["score"]
    labelled.drop(columns="text").to_json("labelled.jsonl", orient="records", lines=True)
    return labelled


def test_rows_are_selected_by_thresholds_that_labels_gave(crawl):
    options = ("--score", "score", "--label", "good", "--by", "language", "--precision", 0.7)
    done = run("thresholds", "labelled.jsonl", "found.json", *options, "--page", "page.html",
               "--calibration", "sigmoid")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "Thresholds: found.json" in done.output and "for precision 0.7" in done.output
    found = Thresholds.load("found.json")
    assert done.output.startswith(str(found))
    assert Path("page.html").read_text(encoding="utf-8").count("<i style") == 40
    done = run("thresholds", "labelled.jsonl", "found.json", *options, "--json")
    assert json.loads(done.stdout)["target"] == "precision"

    where = "id >= 100"
    done = run("select", "crawl", "out", "--annotations", "notes", "--thresholds", "found.json",
               "--where", where, "--field", "id", "--workers", 1)  # fmt: skip
    assert done.exit_code == 0, done.output
    least = crawl["language"].map({name: each.threshold for name, each in found.groups.items()})
    expected = crawl[(crawl["score"] >= least.astype(np.float32)) & (crawl["id"] >= 100)]
    assert read_files("out").compute()["id"].tolist() == expected["id"].tolist()
    funnel = json.loads(Path("out/_report/report.json").read_text())["funnel"]
    assert [step["rows"] for step in funnel] == [900, 800, len(expected)]


def test_decisions_are_written_beside_the_input(crawl):
    found = Thresholds.fit(crawl, score="score", label="good", recall=0.8, calibration="isotonic")
    stage = ApplyThresholds(found, keep_field="is_good", probability_field="p")
    Pipeline(
        [
            FileReader("crawl", annotations="notes", part_bytes=2_000),
            stage,
            AnnotationWriter("kept"),
        ]
    ).run(report=lambda *_: None)
    dropping = [FileReader("crawl", annotations="notes"), ApplyThresholds(found)]
    with pytest.raises(ValueError, match="annotations drop no row, and ApplyThresholds would"):
        Pipeline([*dropping, AnnotationWriter("never")]).prepare()
    whole = read_files("crawl", annotations=["notes", "kept"]).compute()
    least = np.float32(found.groups[None].threshold)
    assert whole["is_good"].tolist() == (crawl["score"] >= least).tolist()
    assert whole["p"].between(0, 1).all()
    assert set(pq.read_table("kept").column_names) >= {"is_good", "p"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["labelled.jsonl", "t.json", "--score", "score", "--label", "good"], "--precision"),
        (["labelled.jsonl", "labelled.jsonl/t.json", "--score", "score", "--label", "good",
          "--recall", 0.5], "labelled.jsonl"),
        (["labelled.jsonl", "t.json", "--score", "scor", "--label", "good", "--recall", 0.5],
         "Did you mean 'score'"),
        (["nothing.jsonl", "t.json", "--score", "score", "--label", "good", "--recall", 0.5],
         "nothing.jsonl"),
        (["labelled.jsonl", "t.json", "--score", "score", "--label", "language", "--recall", 0.5,
          "--positive", "fr"], "'de', 'en'"),
    ],
)  # fmt: skip
def test_wrong_calls_are_refused(crawl, arguments, message):
    done = run("thresholds", *arguments)
    assert done.exit_code == 2 and message in done.output
    done = run("select", "crawl", "out", "--thresholds", "nothing.json")
    assert done.exit_code == 2 and "nothing.json" in done.output

"""The recipe in CONTRIBUTING.md: its settings, steps, report and command come from one place."""

import importlib.util
import inspect
import json
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from click.testing import CliRunner

from gpuclassify import (
    AnnotationWriter,
    Decontaminate,
    DecontaminateFiles,
    JsonlReader,
    JsonlWriter,
    ParquetReader,
    ParquetWriter,
    Pipeline,
)
from gpuclassify.commands.cli import main

pytestmark = pytest.mark.contract
PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
ROWS = pd.DataFrame(
    {"id": range(200), "text": [f"text {i}" for i in range(200)], "tokens": np.arange(200) % 37}
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Import the module that the page shows."""
    section = PAGE.read_text().partition("## A complete recipe")[2]
    (code,) = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    path = tmp_path_factory.mktemp("recipe") / "recipe_of_the_page.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[path.stem]


def expected(share):
    limit = np.quantile(ROWS["tokens"], share, method="inverted_cdf")
    return ROWS[ROWS["tokens"] >= limit].reset_index(drop=True)


def write(folder, parts=4):
    for number, rows in enumerate(np.array_split(np.arange(len(ROWS)), parts)):
        ROWS.iloc[rows].to_parquet(folder / f"in-{number}.parquet", index=False)


def read(folder):
    files = sorted(folder.glob("*.parquet"))
    return pd.concat(map(pd.read_parquet, files), ignore_index=True)


def test_documents_are_those_that_numpy_and_pandas_keep(recipe, tmp_path):
    write(tmp_path)
    stages = [ParquetReader(str(tmp_path / "in-*")), ParquetWriter(str(tmp_path / "out"))]
    job = recipe.DropShortest(stages, share=0.4)
    summary = job.run()
    kept = read(tmp_path / "out")
    assert [*kept["id"]] == [*expected(0.4)["id"]]
    assert job.numbers(summary) == [f"{len(kept)} of 200 documents are long enough"]
    report = json.loads((tmp_path / "out/_report/report.json").read_text())
    assert report["shortest"] == np.quantile(ROWS["tokens"], 0.4, method="inverted_cdf")
    page = (tmp_path / "out/_report/report.html").read_text()
    assert f"Documents shorter than {report['shortest']:g} are dropped." in page
    assert "Long texts" in page
    assert report["settings"]["DropShortest"] == {"share": 0.4, "length_field": "tokens"}
    assert "share=0.4" in report["code"] and "import DropShortest" in report["code"]


def test_a_job_that_was_cut_off_takes_no_step_twice(recipe, tmp_path, monkeypatch):
    write(tmp_path)
    stages = [ParquetReader(str(tmp_path / "in-*")), ParquetWriter(str(tmp_path / "out"))]
    job = recipe.DropShortest(stages)

    def stop(step, done, of, summary):
        if step == "documents":
            raise RuntimeError("cut off")

    with pytest.raises(RuntimeError, match="cut off"):
        job.run(report=stop)
    steps = []
    job.run(report=lambda step, done, of, summary: steps.append(step))
    assert {*steps} == {"documents"}
    assert [*read(tmp_path / "out")["id"]] == [*expected(0.1)["id"]]
    with pytest.raises(ValueError, match="share"):  # another job
        recipe.DropShortest(stages, share=0.5).run()


def test_a_setting_is_in_the_signature_the_repr_the_help_and_the_settings_file(recipe, tmp_path):
    assert "share" in inspect.signature(recipe.DropShortest).parameters
    stages = [JsonlReader("in.jsonl"), JsonlWriter(str(tmp_path / "out"))]
    assert "share=0.3" in repr(recipe.DropShortest(stages, share=0.3))
    with pytest.raises(ValueError, match=r"share=3\.0 is not from 0 to 1"):
        recipe.DropShortest(stages, share=3.0)
    main.add_command(recipe.drop_shortest)
    try:
        run = CliRunner().invoke
        shown = run(main, ["drop_shortest", "--help"]).output
        assert re.search(r"--share FLOAT +Share of the documents to drop, 0 to 1", shown)
        assert "Default: 0.1" in shown and "--length-field COLUMN" in shown
        ROWS.to_json(tmp_path / "in.jsonl", orient="records", lines=True)
        words = ["drop_shortest", str(tmp_path / "in.jsonl"), str(tmp_path / "out")]
        config = str(tmp_path / "config.yaml")
        done = run(main, [*words, "--share", "0.3", "--dump-config", config])
        assert done.exit_code == 0, done.output
        assert yaml.safe_load(Path(config).read_text())["share"] == 0.3
        done = run(main, ["drop_shortest", "--config", config])
        assert done.exit_code == 0, done.output
        assert f"{len(expected(0.3))} of 200 documents are long enough" in done.output
        wrong = run(main, [*words, "--share", "3"])
        assert wrong.exit_code == 2 and "--share" in wrong.output
    finally:
        del main.commands["drop_shortest"]
    assert [*read(tmp_path / "out")["id"]] == [*expected(0.3)["id"]]


@pytest.mark.parametrize(
    ("command", "settings", "message"),
    [
        ("dedup", {"method": "job"}, "method='job' is not one of 'exact', 'fuzzy', 'semantic'"),
        ("dedup", {"method": "exact", "where": "id > 3"}, "no setting 'where'"),
        ("decontaminate", {"classifiers": [{"classifier": "domain"}]}, "no setting 'classifiers'"),
        ("buckets", {"scores": ["tokens"], "limit": 3}, "no setting 'limit'"),
    ],
)
def test_a_settings_file_names_nothing_that_a_command_ignores(tmp_path, command, settings, message):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    ROWS.to_json(tmp_path / "in.jsonl", orient="records", lines=True)
    words = [str(tmp_path / "in.jsonl"), str(tmp_path / "out")]
    done = CliRunner().invoke(main, [command, *words, "--config", str(tmp_path / "config.yaml")])
    assert done.exit_code == 2 and message in " ".join(done.output.split())


def test_an_earlier_corpus_in_a_settings_file_is_one_path(tmp_path):
    ROWS.to_json(tmp_path / "in.jsonl", orient="records", lines=True)
    settings = {"method": "exact", "against": str(tmp_path / "in.jsonl")}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    words = [str(tmp_path / "in.jsonl"), str(tmp_path / "out")]
    done = CliRunner().invoke(main, ["dedup", *words, "--config", str(tmp_path / "config.yaml")])
    assert "200 duplicates removed" in done.output, done.output


def test_a_job_of_rows_removes_no_folder_that_only_looks_like_a_set(tmp_path):
    write(tmp_path)
    reader = ParquetReader(str(tmp_path / "in-*"))
    other = tmp_path / "out/more-00001"
    Pipeline([reader, ParquetWriter(str(other))]).run()
    job = Pipeline([reader, ParquetWriter(str(tmp_path / "out"))])
    job.run()
    job.run(restart=True)
    assert len(read(other)) == 200


def test_a_decontamination_beside_the_input_writes_its_decision(tmp_path):
    write(tmp_path)
    items = tmp_path / "items.jsonl"
    items.write_text(json.dumps({"question": "one two three four five six seven eight nine"}))
    stages = [
        ParquetReader(str(tmp_path / "in-*")),
        Decontaminate(against=str(items), filter_by=False),
        AnnotationWriter(str(tmp_path / "notes")),
    ]
    DecontaminateFiles(stages).run()
    notes = read(tmp_path / "notes")
    assert len(notes) == 200 and notes["keep"].all() and not notes["contaminated"].any()

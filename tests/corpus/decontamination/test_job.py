"""DecontaminateFiles and its command: rows, index, boilerplate, report, and going on."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from distributed import LocalCluster

from gpuclassify import (
    Decontaminate,
    DecontaminateFiles,
    JsonlReader,
    ParquetReader,
    ParquetWriter,
    Pipeline,
    ToBackend,
    read_files,
)
from gpuclassify.commands.cli import main
from gpuclassify.corpus.decontamination.report import ContaminationReport, appendix
from gpuclassify.jobs.ledger.records import JobChangedError, sealed, unsealed
from gpuclassify.jobs.report.report import write_report
from gpuclassify.jobs.stores.opening import open_store

HOSTILE = "<script>alert('x')</script> & 'quoted' one two three four five six seven eight nine"


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Documents, of which 0, 7, 14, 21 and 28 hold an item, and 40 a text that is boilerplate."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    known = [f"w{number}" for number in range(3000)]
    texts = [" ".join(draw.choice(known, 60)) for _ in range(60)]
    items = [" ".join(draw.choice(known, 30)) for _ in range(20)]
    for number in range(5):
        texts[7 * number] += f"\n{items[number].upper()}."
    dull = " ".join(draw.choice(known, 20))
    texts[:40] = [f"{text} {dull}" for text in texts[:40]]
    texts[59] = f"seen: {HOSTILE}"
    frame = pd.DataFrame({"id": range(60), "text": texts})
    (tmp_path / "in").mkdir()
    frame[:30].to_parquet("in/0.parquet")
    frame[30:].to_parquet("in/1.parquet")
    (tmp_path / "evals").mkdir()
    lines = [{"question": text} for text in [*items, f"now {dull}", "too short"]]
    (tmp_path / "evals/a.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    pd.DataFrame({"question": [items[0], HOSTILE]}).to_parquet("evals/b.parquet")
    return frame


AGAINST = ["evals/*.jsonl", "evals/*.parquet"]
HELD = [0, 7, 14, 21, 28, 59]


def job(*, mapper=None, **options):
    mapper = mapper or Decontaminate(against=AGAINST, filter_by=False)
    return DecontaminateFiles([ParquetReader("in"), mapper, ParquetWriter("out")], **options)


def ids(folder="out"):
    return pd.read_parquet(folder)["id"].tolist()


def test_rows_report_and_index_of_a_job(corpus, tmp_path):
    summary = job().run()
    assert ids() == [number for number in range(60) if number not in HELD]
    assert summary.rows_written == 54
    report = json.loads((tmp_path / "out/_report/report.json").read_text())["contamination"]
    assert (report["rows"], report["documents"]) == (60, 6)
    benchmarks = report["benchmarks"]
    assert benchmarks["a.jsonl"] == {
        **{"items": 22, "distinct": 21, "too_short": 1, "found": 5, "documents": 5},
        "most": [[str(number), 1] for number in range(5)],
    }
    assert (benchmarks["b.parquet"]["found"], benchmarks["b.parquet"]["documents"]) == (2, 2)
    assert report["falls"][""] == [6] * 21
    ((reason, dull),) = report["boilerplate"].items()
    assert reason == "in 1.00% or more of 60 documents of the corpus"
    assert dull["ngrams"] == 8

    page = (tmp_path / "out/_report/report.html").read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;alert(" in page
    assert "seen: " not in page  # which stands before the passage
    assert "n-grams of 13 words" in page
    assert "6 of 60 documents (10.0000%)" in re.sub(r"\s+", " ", page)
    assert "<h1>Decontaminated texts</h1>" in page
    assert CliRunner().invoke(main, ["report", "out"]).exit_code == 0
    assert (tmp_path / "out/_report/report.html").read_text() == page


def test_without_a_sample_there_is_no_boilerplate_of_the_corpus(corpus):
    job(sample_rows=0).run()
    assert ids() == list(range(40, 59))


def test_the_index_serves_another_corpus_and_pipelines(corpus, tmp_path):
    job().run()
    saved = Decontaminate(against="out/_decontamination/index", filter_by=False)
    Pipeline([ParquetReader("in"), saved, ParquetWriter("next")]).run()
    assert ids("next") == ids()
    other = [read_files("in"), ToBackend("pandas"), saved, ParquetWriter("again")]
    DecontaminateFiles(other, sample_rows=0).run()
    assert ids("again") == ids()
    lazy = saved(read_files("in"))
    assert lazy["id"].compute().tolist() == ids()


def test_a_finished_job_is_left_and_a_broken_index_is_built_again(corpus, tmp_path, caplog):
    job().run()
    index = tmp_path / "out/_decontamination/index"
    content = {path.name: path.read_bytes() for path in index.iterdir()}
    (index / "keys.npy").write_bytes(b"broken")
    (next((tmp_path / "out").glob("part-*"))).unlink()
    job().run()
    assert "built again" in caplog.text
    assert {path.name: path.read_bytes() for path in index.iterdir()} == content
    assert len(ids()) == 54
    before = (index / "index.json").stat().st_mtime_ns
    job().run()
    assert (index / "index.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "change",
    [
        {"sources": []},
        {"sources": {"a.jsonl": []}},
        {"sources": {"a.jsonl": {"items": "many", "distinct": 1, "too_short": 1}}},
        {"sources": {"a.jsonl": {"items": float("inf"), "distinct": 1, "too_short": 1}}},
        {"boilerplate": "<script>"},
        {"boilerplate": {"in ignore=": {"ngrams": None, "such_as": 3}}},
    ],
)
def test_a_report_leaves_out_counts_of_an_index_that_are_none(corpus, tmp_path, change):
    job().run()
    path = tmp_path / "out/_decontamination/index/index.json"
    about = unsealed(path.read_bytes()) | change
    path.write_bytes(sealed(about))
    parts = (ContaminationReport(),)
    contamination = write_report(open_store(str(tmp_path / "out")), parts)["contamination"]
    assert (contamination["documents"], contamination["boilerplate"]) == (6, {})


@pytest.mark.parametrize("change", ["items", "settings", "sample"])
def test_a_job_that_differs_is_refused(corpus, tmp_path, change):
    job().run()
    if change == "items":
        with (tmp_path / "evals/a.jsonl").open("a") as file:
            file.write('{"question": "more"}\n')
    settings = {"threshold": 0.5} if change == "settings" else {}
    mapper = Decontaminate(against=AGAINST, filter_by=False, **settings)
    options = {"max_share": 0.5} if change == "sample" else {}
    with pytest.raises(JobChangedError):
        job(mapper=mapper, **options).run()
    job(mapper=mapper, **options).run(restart=True)


@pytest.mark.parametrize("count", [0, 2])
def test_one_stage_must_be_a_decontaminate(corpus, count):
    mappers = [Decontaminate(against=AGAINST)] * count
    with pytest.raises(TypeError, match=f"got {count} Decontaminate among its stages"):
        DecontaminateFiles([ParquetReader("in"), *mappers, ParquetWriter("out")]).run()


def test_the_text_must_be_in_the_input(corpus):
    with pytest.raises(ValueError, match="no text column 'body'"):
        job(mapper=Decontaminate(against=AGAINST, text_field="body")).run()


@pytest.fixture(scope="module")
def address():
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False}
    with LocalCluster(**options, dashboard_address=None) as cluster:
        yield cluster.scheduler_address


@pytest.fixture
def run(corpus, address):
    def run(*words):
        paths = ["decontaminate", "in", "out"]
        against = [word for path in AGAINST for word in ("--against", path)]
        return CliRunner().invoke(main, [*paths, *against, *words, "--scheduler", address])

    return run


def test_the_command_removes_contaminated_documents(run):
    done = run()
    assert done.exit_code == 0, done.output
    assert ids() == [number for number in range(60) if number not in HELD]
    assert "60 rows read, 6 contaminated (10.00%), 54 rows written" in done.stdout
    assert "a.jsonl: 5 items found" in done.stdout
    assert run().exit_code == 0
    assert json.loads(run("--json").stdout)["rows_written"] == 54


def test_options_are_settings(run, corpus):
    done = run(
        "--keep-contaminated", "--threshold", "0.9", "--ngram", "5", "--min-words", "2",
        "--item-field", "held", "--passages-field", "where", "--items-field", "all",
        "--max-items", "3", "--sample-rows", "0", "--format", "jsonl", "--ignore", HOSTILE,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    paths = sorted(corpus_paths("out/part-*.jsonl"))
    found = pd.concat([pd.read_json(path, lines=True) for path in paths], ignore_index=True)
    expected = Decontaminate(
        against=AGAINST, threshold=0.9, ngram=5, min_words=2, item_field="held", max_items=3,
        passages_field="where", items_field="all", ignore=HOSTILE,
    )(corpus)  # fmt: skip
    for name in ("id", "text", "contaminated", "where", "all"):
        assert [*map(str, found[name])] == [*map(str, expected[name])], name
    assert not found["contaminated"][59]


def corpus_paths(pattern):
    from glob import glob

    return glob(pattern)  # noqa: PTH207


def test_cut_keeps_documents_without_the_passages(run, corpus):
    assert run("--cut", "--cut-margin", "0").exit_code == 0
    found = pd.read_parquet("out")
    assert found["id"].tolist() == list(range(60))
    assert found["contaminated"].sum() == 6
    assert found["text"][59].split("\n") == ["seen: <"]
    same = [number for number in range(60) if number not in HELD]
    assert found["text"][same].tolist() == corpus["text"][same].tolist()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--threshold", "3"], "--threshold"),
        (["--against-field", "quest"], "Did you mean 'question'"),
        (["--text-field", "body"], "no text column 'body'"),
    ],
)
def test_wrong_calls_say_what_to_do(run, words, message):
    done = run(*words)
    assert done.exit_code in (1, 2)
    assert message in done.output


def test_files_without_rows_are_no_corpus_and_no_items(corpus, tmp_path):
    (tmp_path / "none.jsonl").touch()
    mapper = Decontaminate(against="none.jsonl")
    with pytest.raises(ValueError, match=r"none|no items|columns"):
        job(mapper=mapper).run()
    reader = JsonlReader("evals/a.jsonl")
    clean = Decontaminate(against=AGAINST, text_field="question")
    assert DecontaminateFiles([reader, clean, ParquetWriter("out")]).run().rows_read == 22


@pytest.mark.parametrize(
    ("least", "said"),
    [
        (5, "Items of 5 to 7 words had to occur as a whole"),
        (8, "Items of fewer words were left out"),
    ],
)
def test_the_appendix_says_which_items_are_compared_as_a_whole(least, said):
    settings = {"ngram": 8, "min_words": least, "max_items": 10, "threshold": 0.125}
    found = {"settings": settings, "benchmarks": {}, "documents": 1, "rows": 8}
    text = appendix(found)
    assert said in text and "at least 12.5% of the n-grams" in text

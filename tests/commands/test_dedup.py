"""The command `gpuclassify dedup`: what options mean, exit codes, and going on."""

import json

import pandas as pd
import pytest
from click.testing import CliRunner
from distributed import LocalCluster

from gpuclassify.commands.cli import main
from gpuclassify.corpus.dedup.fuzzy import FuzzyDuplicates


@pytest.fixture(scope="module")
def address():
    options = {"n_workers": 1, "threads_per_worker": 1, "processes": False}
    with LocalCluster(**options, dashboard_address=None) as cluster:
        yield cluster.scheduler_address


@pytest.fixture(scope="module")
def documents():
    texts = [" ".join(f"w{row % 30}x{place}" for place in range(12)) for row in range(90)]
    texts[40:50] = ["<b>We use cookies</b> to make this site better for all of you"] * 10
    sources = ["web", "books", "web"] * 30
    return pd.DataFrame({"url": [f"u{row}" for row in range(90)], "text": texts, "source": sources})


@pytest.fixture
def run(tmp_path, monkeypatch, documents, address):
    """Runs the command in a directory with the files in.jsonl and earlier.parquet."""
    monkeypatch.chdir(tmp_path)
    documents.to_json("in.jsonl", orient="records", lines=True)
    documents[40:41].to_parquet("earlier.parquet")
    (tmp_path / "empty.jsonl").touch()

    def run(*arguments):
        return CliRunner().invoke(main, ["dedup", *map(str, arguments), "--scheduler", address])

    return run


def test_a_column_called_length_ranks_whatever_columns_are_kept(run, tmp_path):
    """Else the length of the text would rank, without a word."""
    rows = {"url": ["short", "long"], "text": ["same words", "same words"], "length": [9, 1]}
    pd.DataFrame(rows).to_json("in.jsonl", orient="records", lines=True)
    kept = []
    for number, fields in enumerate([[], ["--field", "url"]]):
        out = f"out{number}"
        done = run(
            "in.jsonl",
            out,
            "--method",
            "exact",
            "--id-field",
            "url",
            "--keep-by",
            "length",
            *fields,
        )
        assert done.exit_code == 0, done.output
        kept.append(pd.read_parquet(tmp_path / out)["url"].tolist())
    assert kept[0] == kept[1] != []


def test_options_are_settings(run, tmp_path, documents):
    done = run(
        "in.jsonl", "out", "--method", "fuzzy", "--id-field", "url", "--keep-by", "length",
        "--keep-by", "url", "--source-field", "source", "--threshold", 0.9, "--max-group-size", 40,
        "--set", "char-ngrams=10", "--set", "measure=containment", "--part-size", "2kB",
        "--format", "jsonl", "--compression", "gzip", "--field", "source",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    settings = FuzzyDuplicates(
        id_field="url", keep_by=["length", "url"], threshold=0.9, char_ngrams=10,
        measure="containment",
    )  # fmt: skip
    kept = pd.concat([pd.read_json(p, lines=True) for p in sorted(tmp_path.glob("out/*.jsonl.gz"))])
    assert kept["url"].tolist() == settings.remove(documents)["url"].tolist()
    gone = 90 - len(kept)
    assert f"90 rows read, {gone} duplicates removed ({gone / 90:.1%})" in done.stdout
    report = json.loads((tmp_path / "out/_report/report.json").read_text())
    assert report["command"].startswith("gpuclassify dedup in.jsonl out --method fuzzy --id-field")
    assert "10 documents: <b>We use cookies</b> to make" in done.stdout
    assert f"Report: {tmp_path}/out/_report/report.html" in done.stdout


def test_texts_are_compared_by_the_names_that_are_given(run, tmp_path):
    texts = ["A text.", "a text", "A  text.", "another"]
    pd.DataFrame({"url": [*"abcd"], "text": texts}).to_parquet("in.parquet")
    call = ["in.parquet", "out", "--method", "exact", "--id-field", "url"]
    for names, stays in [(["basic"], [0, 1, 3]), (["case", "punctuation", "white_space"], [0, 3])]:
        options = [word for name in names for word in ("--normalize", name)]
        done = run(*call, *options, "--restart")
        assert done.exit_code == 0, done.output
        kept = pd.read_parquet("out")["text"].tolist()
        assert kept == [texts[row] for row in stays]
    assert run(*call, "--normalize", "basic").exit_code == 2  # another job


def test_blank_texts_are_no_group_to_look_at_but_count(run, tmp_path, documents):
    blank = [" ", "\n\n", " " * 300, "\u3000"] * 12 + ["\t" * 250 + "Seen"] * 8
    extra = pd.DataFrame({"url": [f"v{row}" for row in range(len(blank))], "text": blank})
    both = pd.concat([documents, extra.assign(source="web")])
    both.to_json(tmp_path / "in.jsonl", orient="records", lines=True)
    done = run("in.jsonl", "out", "--method", "exact")
    assert done.exit_code == 0, done.output
    place = done.stdout.index("    10 documents: <b>We use cookies")
    assert done.stdout[place:].split("\n    ")[1].startswith("8 documents: Seen")
    assert done.stdout.count("documents of white space alone") == 1
    assert "    48 documents of white space alone" in done.stdout
    assert "48 documents are of white space" in (tmp_path / "out/_report/report.html").read_text()
    found = json.loads((tmp_path / "out/_report/report.json").read_text())["deduplication"]
    assert found["duplicates"]["blank"] == 48
    refused = run("in.jsonl", "new", "--method", "exact", "--max-group-size", 11)
    assert "12 documents, more than" in refused.output


def test_each_pass_has_a_line_that_says_what_it_does(run):
    done = run("in.jsonl", "out", "--method", "exact", "--id-field", "url")
    lines = done.stderr.splitlines()
    shown = [line.split(": 100% ")[0] for line in lines if ": 100% " in line]
    assert shown == [
        "Checking that ids tell documents apart",
        "Computing signatures of texts",
        "Joining documents that may be duplicates",
        "Comparing them, and deciding which are duplicates",
        "Counting",
        "Listing duplicates",
        "Listing rows to remove",
        "Writing documents",
    ]


def test_json_and_going_on(run):
    call = ["in.jsonl", "out", "--method", "exact", "--id-field", "url", "--json"]
    first = json.loads(run(*call).stdout)
    assert first["duplicates"]["duplicates"] == 90 - 31
    assert first["removal"]["rows_written"] == 31
    again = json.loads(run(*call).stdout)
    assert again["removal"]["resumed_parts"] == len(again["removal"]["files"])
    other = run(*call[:-3], "--by", "source")
    assert other.exit_code == 2
    assert "--restart" in other.output
    assert run(*call[:-3], "--by", "source", "--restart").exit_code == 0


def test_an_earlier_corpus(run, tmp_path):
    done = run("in.jsonl", "out", "--method", "exact", "--against", "earlier.parquet")
    assert done.exit_code == 0, done.output
    assert not pd.read_parquet(tmp_path / "out")["text"].str.contains("cookies").any()


def test_what_cannot_be_read_is_left_out_and_told(run, tmp_path):
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write("{broken\n")
    assert run("in.jsonl", "out", "--method", "exact").exit_code == 1
    done = run("in.jsonl", "new", "--method", "exact", "--on-error", "quarantine")
    assert done.exit_code == 3
    assert "Left out: 1 line" in done.stdout


def test_alarms_fail_with_the_largest_groups_on_the_page(run, tmp_path):
    done = run("in.jsonl", "out", "--method", "exact", "--max-group-size", 5)
    assert done.exit_code == 1
    page = (tmp_path / "out/_report/report.html").read_text()
    assert "Largest groups" in page
    assert "&lt;b&gt;We use cookies&lt;/b&gt;" in page
    assert "<b>We" not in page
    made = json.loads(CliRunner().invoke(main, ["report", "out", "--json"]).stdout)
    assert made["deduplication"]["duplicates"]["groups"] == 31


def test_the_page_shows_similarities_and_sources(run, tmp_path):
    options = ["--id-field", "url", "--by", "source", "--set", "char_ngrams=10"]
    assert run("in.jsonl", "out", "--method", "fuzzy", *options).exit_code == 0
    page = (tmp_path / "out/_report/report.html").read_text()
    for shown in ("Similarity of duplicates", "Duplicates by source", "signatures", "documents"):
        assert shown in page
    assert "similarity to the document that is kept" in page  # the axis
    assert "<h1>Deduplicated texts</h1>" in page
    assert CliRunner().invoke(main, ["report", "out"]).exit_code == 0
    assert (tmp_path / "out/_report/report.html").read_text() == page


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["in.jsonl", "--method", "exact"], "name the input, and then the output"),
        (["--method", "exact"], "INPUT... OUTPUT"),
        (["nothing", "out", "--method", "exact"], "no such input"),
        (["", "out", "--method", "exact"], "path='' is not a path"),
        (["in.jsonl", "", "--method", "exact"], "path='' is not a path"),
        (["-", "out", "--method", "exact"], "which needs files"),
        (["in.jsonl", "-", "--method", "exact"], "which needs files"),
        (["empty.jsonl", "out", "--method", "exact"], "neither rows nor columns"),
        (["in.jsonl", ".", "--method", "exact"], "outside the input"),
    ],
)
def test_wrong_paths_are_told_before_anything_starts(run, tmp_path, words, says):
    done = run(*words)
    assert (done.exit_code, says in done.output) == (2, True), done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "exact,"),
        (["--method", "exact", "--threshold", 1], "no setting 'threshold'"),
        (["--method", "fuzzy", "--set", "sed=1"], "Did you mean 'seed'?"),
        (["--method", "exact", "--id-field", "id"], "no column 'id'"),
        (["--method", "exact", "--max-removed-share", 3], "not from 0 to 1"),
        (["--method", "exact", "--against", ""], "path='' is not a path"),
        (["--method", "exact", "--normalize", "lower"], "'lower' is not one of 'basic'"),
        (["--method", "semantic", "--normalize", "basic"], "has no setting 'normalize'"),
        (["--method", "exact", "--part-size", "0"], "--part-size '0' is below 1 byte"),
    ],
)
def test_wrong_options_are_told_before_anything_starts(run, tmp_path, options, says):
    done = run("in.jsonl", "out", *options)
    assert (done.exit_code, says in done.output) == (2, True), done.output
    assert not (tmp_path / "out").exists()

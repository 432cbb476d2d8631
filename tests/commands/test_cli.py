"""The command line, driven as its users do."""

import gzip
import hashlib
import io
import json
import subprocess
import sys

import pandas as pd
import pytest
from rich.console import Console

from gpuclassify.commands.console import print_summary
from gpuclassify.jobs.report.summary import JobSummary
from tests.replicas import safety_template, sample_texts, write_checkpoint


def run(*arguments, cwd=None, timeout=120):
    return subprocess.run(
        [sys.executable, "-m", "gpuclassify", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=timeout,
        check=False,
    )


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    write_checkpoint(folder / "model", "domain")
    texts = [*sample_texts(60), None, ""]
    pd.DataFrame({"text": texts, "id": range(62)}).to_json(
        folder / "in.jsonl", orient="records", lines=True
    )
    return folder


def test_classify_writes_parquet_and_a_summary(job):
    done = run(
        "classify", "in.jsonl", "out", "--classifier", "domain", "--model", "model",
        "--score-field", "scores", "--confidence-field", "confidence", "--cluster", "cpu",
        cwd=job,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "62 rows in, 62 rows out" in done.stdout
    assert "Starting 1 worker(s)" in done.stderr  # a second one would have nothing to do
    assert "100% 1/1 parts, 62 rows" in done.stderr
    assert "distributed" not in done.stderr
    read = pd.read_parquet(job / "out")
    assert read["id"].tolist() == list(range(62))
    assert read["domain_pred"].isna().sum() == 1
    assert len(read["scores"][0]) == 26


def test_filters_json_summary_and_jsonl_output(job):
    base = ["classify", "in.jsonl", "--classifier", "domain", "--model", "model", "--json"]
    everything = json.loads(run(*base[:2], "all", *base[2:], cwd=job).stdout)
    top = next(iter(everything["labels"]))
    done = run(*base[:2], "top", *base[2:], "--filter-by", top, "--format", "jsonl", cwd=job)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["labels"] == {top: everything["labels"][top]}
    assert summary["rows_in"] == 62
    kept = pd.concat(pd.read_json(file, lines=True) for file in summary["files"])
    assert set(kept["domain_pred"]) == {top}
    assert len(kept) == summary["rows_out"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--classifier", "domian", "--model", "model"], "Did you mean 'domain'?"),
        (
            ["--classifier", "domain", "--model", "model", "--text-field", "txt"],
            "Pass --text-field to",
        ),
        (["--classifier", "domain", "--model", "model", "--max-chars", "0"], "--max-chars 0 must"),
        (
            ["--classifier", "domain", "--model", "model", "--label-field", "id"],
            "pass --overwrite to",
        ),
        (["--classifier", "domain", "--model", "model", "--filter-by", "Sport"], "'Sports'"),
        (["--classifier", "domain", "--model", "./nowhere"], "nowhere"),
        (["--classifier", "checkpoint"], "needs --model: a Hub name"),
        (["--classifier", "domain", "--model", "model", "--min-score", "x"], "--min-score"),
        (["--classifier", "domain", "--model", "model", "--part-size", "big"], "--part-size"),
        (["--classifier", "domain", "--model", "model", "--workers", "0"], "n_workers=0"),
        (["--classifier", "domain", "--model", "model", "--scheduler", "no.json"], "no.json"),
        (
            ["--classifier", "domain", "--model", "model", "--scheduler", "h:1", "--workers", "2"],
            "--workers and --cluster start a new one",
        ),
    ],
)
def test_a_wrong_call_leaves_with_2_names_the_cure_and_writes_nothing(job, arguments, words):
    done = run("classify", "in.jsonl", "wrong", *arguments, cwd=job)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (job / "wrong").exists()


def test_missing_input_and_occupied_output(job):
    options = ["--classifier", "domain", "--model", "model"]
    done = run("classify", "nothing.jsonl", "out2", *options, cwd=job)
    assert (done.returncode, "no such input: nothing.jsonl" in done.stderr) == (2, True)
    (job / "taken").mkdir()
    (job / "taken" / "part-00000.parquet").write_bytes(b"")
    done = run("classify", "in.jsonl", "taken", *options, cwd=job)
    assert (done.returncode, "that no job wrote" in done.stderr) == (2, True)


def test_earlier_results_stay_when_no_cluster_is_reached(job, monkeypatch):
    options = ["--classifier", "domain", "--model", "model"]
    command = ["classify", "in.jsonl", "earlier", *options]
    assert run(*command, "--cluster", "cpu", cwd=job).returncode == 0
    before = sorted(path.name for path in (job / "earlier").iterdir())
    monkeypatch.setenv("DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT", "2s")
    done = run(*command, "--restart", "--scheduler", "tcp://127.0.0.1:1", cwd=job)
    assert (done.returncode, "no Dask scheduler answers" in done.stderr) == (1, True)
    assert "leave --scheduler out" in done.stderr
    assert "get_client" not in done.stderr
    assert sorted(path.name for path in (job / "earlier").iterdir()) == before


def test_labels_that_look_like_markup_are_shown():
    console = Console(record=True, file=io.StringIO(), width=80)
    print_summary(JobSummary(rows_out=1, labels={"[/red]": 1}), console)
    assert "[/red]" in console.export_text()


def test_work_that_fails_leaves_with_1_and_says_why(job):
    # Of a compressed file only the beginning tells columns, which ends before the broken line.
    with gzip.open(job / "broken.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": "x" * 1_000}) + "\n" for _ in range(1_200))
        file.write('{"text": 5}\n')
    words = ("broken.jsonl.gz", "failed", "--classifier", "domain", "--model", "model")
    done = run("classify", *words, cwd=job)
    assert done.returncode == 1, done.stderr
    assert "broken.jsonl.gz, from byte" in done.stderr
    assert 'To go on without it: --on-error "quarantine".' in done.stderr
    assert "Traceback" not in done.stderr


def test_models_lists_every_family_with_licence_and_columns():
    listed = json.loads(run("models", "--json").stdout)
    by_family = {row["family"]: row for row in listed}
    assert by_family["domain"]["licence"] == "Apache-2.0"
    assert by_family["domain"]["columns"] == {"domain_pred": "string"}
    assert by_family["fineweb-edu"]["columns"]["fineweb-edu-score-int"] == "int64"
    table = run("models").stdout
    assert all(family in table for family in by_family)


def test_doctor_reports_and_its_exit_code_is_that_of_its_report():
    done = run("doctor", "--json")
    report = json.loads(done.stdout)
    assert {"python", "torch"} <= {check["name"].lower() for check in report["checks"]}
    has_problems = any(check["status"] == "problem" for check in report["checks"])
    assert done.returncode == int(has_problems)
    assert "torch" in run("doctor").stdout


def test_help_and_version_need_no_framework():
    probe = (
        "import sys; from click.testing import CliRunner; "
        "from gpuclassify.commands.cli import main; "
        "result = CliRunner().invoke(main, ['--help']); assert result.exit_code == 0; "
        "assert not {'torch', 'transformers', 'distributed', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", probe], check=True)
    assert run("--version").stdout.startswith("gpuclassify, version")


def test_any_argument_of_a_classifier_can_be_set(job, safety_models):
    (job / "prompt.txt").write_text(safety_template())
    done = run(
        "classify", "in.jsonl", "judged", "--classifier", "aegis", "--json", "--cluster", "cpu",
        "--model", safety_models.defensive, "--base-model", safety_models.base,
        "--set", "template=prompt.txt", "--set", "categories-field=categories",
        "--set", f"template_digest={hashlib.sha256(safety_template().encode()).hexdigest()}",
        "--filter-by", "O3", "--filter-by", "safe", "--set", "keep_raw=true",
        cwd=job,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    read = pd.read_parquet(job / "judged")
    assert set(read["aegis_pred"]) <= {"O3", "safe"}
    assert {"categories", "_aegis_raw_pred"} <= set(read.columns)
    assert json.loads(done.stdout)["labels"]["safe"] > 0


def test_the_guards_labels_are_true_and_false(job, safety_models):
    done = run(
        "classify", "in.jsonl", "clean", "--classifier", "instruction-data-guard", "--json",
        "--model", safety_models.guard, "--base-model", safety_models.base, "--cluster", "cpu",
        "--set", f"adapter={safety_models.defensive}", "--filter-by", "False",
        cwd=job,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not pd.read_parquet(job / "clean")["is_poisoned"].any()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("truncated_field", "pass NAME=VALUE"),
        ("truncated_feild=x", "Did you mean 'truncated_field'"),
    ],
)
def test_a_wrong_setting_is_a_wrong_call(job, setting, words):
    done = run("classify", "in.jsonl", "no", "--classifier", "quality", "--set", setting, cwd=job)
    assert done.returncode == 2
    assert words in done.stderr

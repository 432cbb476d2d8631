"""Every command once, on an input of a few rows, with its result by other means."""

import contextlib
import json
import subprocess
import sys

import dask
import pandas as pd
import pytest
from click.testing import CliRunner

from gpuclassify.classifiers import DomainClassifier
from gpuclassify.commands import client
from gpuclassify.commands import evaluate as evaluate_command
from gpuclassify.commands import train as train_command
from gpuclassify.commands.cli import main
from tests.faults import cases
from tests.faults.cases import CASES, CLASSIFY, TRAIN

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("one_torch_thread")]
MODEL = ("--classifier", "fineweb-edu", "--model", "model")
SCORE = "fineweb-edu-score-float"


def run(*words):
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    return done.stdout


def rows(text):
    return [json.loads(line) for line in text.splitlines()]


def agreement(folder):
    """Cohen's kappa of 18 of 20 equal labels, of which half are each: (0.9 - 0.5) / 0.5."""
    labels = pd.DataFrame({"human": [*"ab"] * 10, "model": [*"ab"] * 9 + [*"ba"]})
    labels.to_json("judged.jsonl", orient="records", lines=True)
    words = ("agreement", "judged.jsonl", "--between", "human", "--between", "model", "--json")
    figures = {figure["figure"]: figure["value"] for figure in json.loads(run(*words))["figures"]}
    assert figures["kappa"] == pytest.approx(0.8)


def compare(folder):
    """Equal settings move no row."""
    cases.classified(folder)
    assert "0.00% of the rows" in run("compare", "in", *MODEL, "--with", "batch_size=2")


def doctor(folder):
    done = json.loads(run("doctor", "--json"))
    found = {check["name"]: check["found"] for check in done["checks"]}
    assert found["Python"].startswith(sys.version.split()[0])
    assert found["dask"] == dask.__version__


def evaluate(folder):
    """The labels are easy: see `cases.annotated`."""
    cases.annotated(folder)
    run(*TRAIN)
    assert "accuracy" in run("evaluate", "out/head", "in.jsonl", "--page", "out/page.html")
    assert "</html>" in (folder / "out/page.html").read_text()


def models(folder):
    (found,) = json.loads(run("models", "domain", "--json"))
    assert found["labels"] == list(DomainClassifier.published_labels)


def plan(folder):
    cases.classified(folder)
    found = json.loads(run("plan", "in", *MODEL, "--no-time", "--part-size", "250B", "--json"))
    assert (found["rows"], found["parts"]) == (8, 2)
    assert found["text_bytes"] == 8 * len("text 0 of 0")


def preview(folder):
    """It shows what `classify` writes."""
    cases.classified(folder)
    shown = rows(run("preview", "in", *MODEL, "--json"))
    run(*CLASSIFY)
    written = cases.rows_of(folder, "parquet").set_index("id")[SCORE]
    assert {row["id"]: row[SCORE] for row in shown} == pytest.approx(written.to_dict(), abs=1e-5)


def report(folder):
    cases.classified(folder)
    run(*CLASSIFY)
    (folder / "out/_report/report.html").unlink()
    found = json.loads(run("report", "out", "--json"))
    assert (found["parts_done"], found["rows_read"], found["rows_written"]) == (2, 8, 8)
    run("report", "out")
    assert (folder / "out/_report/report.html").exists()


def show(folder):
    cases.with_notes(folder)
    words = ("show", "notes", "--input", "in", "--where", "rank == 3", "--json")
    assert [(row["id"], row["text"]) for row in rows(run(*words))] == [
        (13, "text 3 of 0"),
        (23, "text 3 of 1"),
    ]


def slurm_script(folder):
    script = run("slurm-script", "--nodes", "3", "--", "in", "out", *MODEL)
    assert "#SBATCH --nodes=3" in script and "classify in out" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def verify(folder):
    """It finds a byte that changed."""
    cases.classified(folder)
    run(*CLASSIFY)
    assert "2 of 2 parts are done and unchanged" in run("verify", "out")
    path = next((folder / "out").glob("part-*.parquet"))
    path.write_bytes(b"X" + path.read_bytes()[1:])
    assert CliRunner().invoke(main, ["verify", "out"]).exit_code == 1


READ_ONLY = (
    *(agreement, compare, doctor, evaluate, models, plan, preview, report, show),
    *(slurm_script, verify),
)
TRIED = {test.__name__.replace("_", "-"): test for test in READ_ONLY}
WRITTEN = {case.words[0]: case for case in reversed(CASES.values())}


@pytest.mark.parametrize("name", main.list_commands(None))
def test_a_command_gives_its_result(name, tmp_path, monkeypatch):
    """Those that write are `CASES` of the faults: these run undisturbed here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(client, "open_client", lambda *_: None)
    for module in (evaluate_command, train_command):
        monkeypatch.setattr(module, "open_client", lambda *_: contextlib.nullcontext())
    assert name in TRIED or name in WRITTEN, (
        f"nothing tries `gpuclassify {name}`: add a case to tests/faults/cases.py, or a function "
        "to READ_ONLY here if the command writes no files that another run continues"
    )
    with dask.config.set(scheduler="sync"):
        if name in TRIED:
            TRIED[name](tmp_path)
            return
        case = WRITTEN[name]
        case.prepare(tmp_path)
        assert CliRunner().invoke(main, [*case.words]).exit_code == case.code
        case.check(tmp_path)

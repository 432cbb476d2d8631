"""Every command reads a dirty input alike: broken lines stop it, or are left out and counted."""

import contextlib
import json
import os
import re

import click
import dask
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from gpuclassify import AnnotationWriter, Clusters, Mix, Pipeline, Thresholds, agreement, sample
from gpuclassify.commands import client
from gpuclassify.commands import evaluate as evaluate_command
from gpuclassify.commands import train as train_command
from gpuclassify.commands.cli import main
from gpuclassify.jobs.input.files import BrokenInputError
from gpuclassify.jobs.input.readers import FileReader
from gpuclassify.jobs.stores.store import WatchedFile
from tests.faults import cases

MODEL = ("--classifier", "fineweb-edu", "--model", "model")
READING = {"--type", "--surrogates", "--on-error", "--annotations", "--annotations-incomplete"}
OUTPUTS = ("out", "out.json", "out.jsonl")
CALLS = {
    "sample": ("in", "out.jsonl", "-n", "9"),
    "show": ("notes", "--input", "in"),
    "agreement": ("in", "--between", "score", "--between", "tokens"),
    "thresholds": (*("in", "out.json", "--score", "score", "--label", "good"),
                   *("--recall", "0.5", "--min-labels", "2")),
    "mix": ("in", "out.json", "--by", "topic", "--tokens", "5"),
    "clusters": ("in", "out.json", "--n-clusters", "2", "--embedding-field", "vector"),
    "select": ("in", "out", "--where", "score >= 0"),
    "buckets": ("in", "out", "--score", "score", "--n", "2"),
    "dedup": ("in", "out", "--method", "exact"),
    "decontaminate": ("in", "out", "--against", "evals.jsonl", "--against-field", "text"),
    "classify": ("in", "out", *MODEL),
    "annotate": ("in", "out", *MODEL),
    "plan": ("in", *MODEL, "--no-time"),
    "preview": ("in", "-n", "100", *MODEL),
    "compare": ("in", *MODEL, "--with", "batch_size=2"),
    "train": ("in", "out/head", "--label-field", "topic", "--backbone", "model"),
    "evaluate": ("head", "in"),
}  # fmt: skip
OF_JOBS = ("select", "buckets", "dedup", "decontaminate", "classify", "annotate")
ROWS, BROKEN = 60, 2


def rows():
    return [
        {"id": n, "text": f"{('mill', 'river')[n % 2]} {n}", "topic": ("mill", "river")[n % 2],
         "score": n / ROWS, "good": n % 3 > 0, "tokens": n % 5, "vector": [n + 0.5, 9.5]}
        for n in range(ROWS)
    ]  # fmt: skip


def write_input(folder):
    """JSON lines with two broken ones, in the second file."""
    lines = [json.dumps(row) for row in rows()]
    (folder / "in").mkdir()
    (folder / "in/0.jsonl").write_text("\n".join(lines[:30]) + "\n")
    lines = [*lines[30:40], '{"id": 1, "te', *lines[40:], "no JSON"]
    (folder / "in/1.jsonl").write_text("\n".join(lines) + "\n")


def numbered(frame):
    return frame.assign(n=frame["id"])


def annotate(folder):
    """Annotate the input, and leave out the broken lines."""
    stages = [
        FileReader("in"),
        lambda frame: frame.assign(n=frame["id"]),
        AnnotationWriter("notes"),
    ]
    summary = Pipeline(stages, on_error="quarantine").run(report=lambda *_: None)
    assert summary.left_out == {"line": BROKEN}


def test_all_commands_that_read_files_have_the_options():
    context = click.Context(main)
    for name in CALLS:
        params = main.get_command(context, name).get_params(context)
        flags = {flag for param in params for flag in (*param.opts, *param.secondary_opts)}
        own = {"--annotations"} if name == "show" else set()  # its sets are arguments
        assert READING - own <= flags, name


@pytest.fixture
def dirty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(client, "open_client", lambda *_: None)
    for module in (evaluate_command, train_command):
        monkeypatch.setattr(module, "open_client", lambda *_: contextlib.nullcontext())
    write_input(tmp_path)
    (tmp_path / "evals.jsonl").write_text(
        '{"text": "what is the name of the river that flows through the town"}\n'
    )
    with dask.config.set(scheduler="sync"):
        yield tmp_path


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("command", CALLS)
def test_a_broken_line_stops_a_command_or_is_left_out_and_counted(command, dirty):
    words = [command, *CALLS[command]]
    if {*MODEL} <= {*words}:
        cases.write_model(dirty)
    if command in ("train", "evaluate"):
        cases.write_backbone(dirty)
    if command == "evaluate":
        clean = ("train", "in/0.jsonl", "head", *CALLS["train"][2:])
        assert CliRunner().invoke(main, clean).exit_code == 0
    if command == "show":  # the broken lines came after the annotations
        text = (dirty / "in/1.jsonl").read_text()
        (dirty / "in/1.jsonl").rename(dirty / "later")
        stages = [FileReader("in"), numbered, AnnotationWriter("notes")]
        Pipeline(stages).run(report=lambda *_: None)
        (dirty / "in/1.jsonl").write_text(text)
        words.append("--annotations-incomplete")
    done = CliRunner().invoke(main, words)
    assert done.exit_code == (2 if command == "compare" else 1), done.output  # compare as diff
    assert "--on-error quarantine" in done.stderr and "1.jsonl" in done.stderr
    done = CliRunner().invoke(main, [*words, "--on-error", "quarantine"])
    assert done.exit_code == (3 if command in OF_JOBS else 0), done.output
    counted = re.search(r"(\d+) lines?|lines? left out: (\d+)", done.output)
    assert counted and int(counted[1] or counted[2]) == BROKEN, done.output


CALLS_ON_ANNOTATIONS = {
    "sample": lambda reader: sample(reader, 100),
    "agreement": lambda reader: agreement(reader, ["score", "tokens"]),
    "thresholds": lambda reader: Thresholds.fit(
        reader, score="score", label="good", recall=0.5, min_labels=2
    ),
    "mix": lambda reader: Mix.plan(reader, by="topic", tokens=5),
    "clusters": lambda reader: Clusters.fit(reader, 2, embedding_field="vector"),
}


@pytest.mark.parametrize("call", CALLS_ON_ANNOTATIONS)
def test_lines_that_annotations_leave_out_stop_nothing(call, dirty, caplog):
    annotate(dirty)
    run = CALLS_ON_ANNOTATIONS[call]
    with pytest.raises(BrokenInputError, match='on_error="quarantine"'):
        run(FileReader("in"))
    found = run(FileReader("in", annotations="notes"))
    assert f"left out, because they cannot be read: {BROKEN} lines" in caplog.text
    (dirty / "clean.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    expected = run(FileReader("clean.jsonl"))
    if call == "sample":
        assert sorted(found["id"]) == sorted(expected["id"])
        assert (found["n"] == found["id"]).all() and found["weight"].sum() == ROWS
    else:
        assert str(found) == str(expected)
    path = dirty / "in/1.jsonl"
    known = path.stat()
    with path.open("r+b") as file:  # a new broken line, unnoticed by size and time
        file.write(b"[")
    os.utime(path, ns=(known.st_atime_ns, known.st_mtime_ns))
    with pytest.raises(BrokenInputError):
        run(FileReader("in", annotations="notes"))


def test_left_out_rows_of_parquet_files_and_whole_files_stop_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    texts = pa.array([b"a", b"b", b"\xff", b"d"]).view(pa.string())
    pq.write_table(pa.table({"id": [0, 1, 2, 3], "text": texts}), "in/0.parquet")
    (tmp_path / "in/1.parquet").write_bytes(b"PAR1 no Parquet")
    stages = [
        FileReader("in"),
        lambda frame: frame.assign(n=frame["id"]),
        AnnotationWriter("notes"),
    ]
    Pipeline(stages, on_error="quarantine").run(report=lambda *_: None)
    with pytest.raises(BrokenInputError):
        sample(FileReader("in"), 9)
    found = sample(FileReader("in", annotations="notes"), 9)
    assert sorted(found["id"]) == [0, 1, 3]
    assert "left out, because they cannot be read: 1 file, 1 row" in caplog.text
    assert sorted(sample(FileReader("in"), 9, on_error="quarantine")["id"]) == [0, 1, 3]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_input_is_not_opened_where_annotations_suffice(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frame, path = pd.DataFrame(rows()), tmp_path / f"in/0.{kind}"
    path.parent.mkdir()
    if kind == "jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.assign(
            text=[np.random.default_rng(n).bytes(20_000).hex() for n in range(ROWS)]
        ).to_parquet(path, row_group_size=10)
    names = {"score": "s", "good": "g", "tokens": "t", "topic": "c"}
    stages = [
        FileReader("in"),
        lambda frame: frame.assign(**{new: frame[old] for old, new in names.items()}, c2="a"),
    ]
    Pipeline([*stages, AnnotationWriter("notes")]).run(report=lambda *_: None)
    read, call = [], WatchedFile._call

    def counted(self, method, *arguments):
        result = call(self, method, *arguments)
        if isinstance(result, bytes) and self._store.root.startswith(str(path.parent)):
            read.append(len(result))
        return result

    monkeypatch.setattr(WatchedFile, "_call", counted)
    reader = FileReader("in", annotations="notes")
    assert Thresholds.fit(reader, score="s", label="g", by="c", recall=0.5, min_labels=2).groups
    assert Mix.plan(reader, by="c", tokens=5, token_field="t").tokens == 5
    assert len(sample(reader.with_fields(["s", "c"]), 5, by="c")) == 10
    words = ["agreement", "in", "--annotations", "notes", "--between", "c", "--between", "c2"]
    assert CliRunner().invoke(main, words, catch_exceptions=False).exit_code == 0
    assert sum(read) <= (0 if kind == "jsonl" else path.stat().st_size // 2)


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_select_without_a_condition_converts(form, dirty):
    (dirty / "in/1.jsonl").unlink()
    frame = pd.DataFrame(rows())
    frame[30:45].to_json("in/1.jsonl.gz", orient="records", lines=True)
    frame[45:].to_parquet("in/2.parquet")
    done = CliRunner().invoke(main, ["select", "in", "out", "--format", form])
    assert done.exit_code == 0, done.output
    files = sorted((dirty / "out").glob(f"part-*.{form}"))
    read = pd.read_parquet if form == "parquet" else lambda path: pd.read_json(path, lines=True)
    found = pd.concat(map(read, files)).sort_values("id", ignore_index=True)
    pd.testing.assert_frame_equal(found[[*frame]], frame, check_dtype=False)


def test_rows_are_counted_by_a_column_that_no_stage_reads(dirty, domain):
    stages = [FileReader("in/0.jsonl"), domain(), AnnotationWriter("notes")]
    Pipeline(stages, source_field="topic").run(report=lambda *_: None)
    report = json.loads((dirty / "notes/_report/report.json").read_text())
    counts = pd.DataFrame(rows()[:30])["topic"].value_counts()
    assert {n: c["read"] for n, c in report["sources"]["topic"].items()} == counts.to_dict()


WRONG = {
    "--epochs": "0",
    "--learning-rate": "-1",
    "--hidden-size": "0",
    "--seed": "-1",
    "--class-weight": "mill=-2",
    "--group": "",
}


@pytest.mark.parametrize("flag", WRONG)
def test_train_checks_its_settings_before_it_starts_a_cluster(flag, dirty, monkeypatch):
    cases.write_backbone(dirty)
    monkeypatch.setattr(train_command, "open_client", lambda *_: pytest.fail("a cluster starts"))
    words = ("train", "in/0.jsonl", *CALLS["train"][1:], "--kind", "mlp", flag, WRONG[flag])
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2 and flag in done.stderr, done.output


@pytest.mark.parametrize(
    ("command", "flag"),
    [("thresholds", "--score"), ("thresholds", "--by"), ("mix", "--by"), ("mix", "--token-field"),
     ("sample", "--by"), ("sample", "--id-field"), ("agreement", "--between"),
     ("clusters", "--embedding-field"),
     ("train", "--label-field"), ("evaluate", "--group"), ("select", "--partition-by")],
)  # fmt: skip
def test_an_empty_name_of_a_column_names_the_option(command, flag, dirty):
    done = CliRunner().invoke(main, [command, *CALLS[command], flag, ""])
    assert done.exit_code == 2 and f"'{flag}': '' is no column" in done.stderr, done.output


@pytest.mark.parametrize("width", ["-5", "0", "inf", "1"])
def test_a_width_without_a_score_is_refused(width, dirty):
    done = CliRunner().invoke(main, ["sample", *CALLS["sample"], "--width", width])
    assert done.exit_code == 2 and "--width" in done.stderr, done.output

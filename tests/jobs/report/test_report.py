"""A job's report, its page, and its progress while it runs."""

import io
import json
import shutil
import time
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from rich.console import Console

from gpuclassify import DomainClassifier, FineWebEduClassifier
from gpuclassify.jobs.input.readers import JsonlReader
from gpuclassify.jobs.ledger.records import parse_record
from gpuclassify.jobs.output.writers import ParquetWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.report.progress import JobProgress
from gpuclassify.jobs.report.report import join_bins, page, report_of, score_bins, write_report
from gpuclassify.jobs.report.summary import JobSummary, count_scores, largest_scores
from gpuclassify.jobs.stores.opening import open_store
from gpuclassify.pages.sections import (
    Cell,
    Fold,
    Histogram,
    PagePart,
    ReportPart,
    Section,
    Table,
    Text,
    Tile,
)
from tests.replicas import sample_texts

pytestmark = pytest.mark.usefixtures("one_torch_thread")
TEXTS = [*sample_texts(50, seed=4), None, "<b>&</b>" + "long " * 800]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, checkpoint):
    """The folder of a job that left two lines out."""
    folder = tmp_path_factory.mktemp("<report>")
    records = [json.dumps({"id": row, "text": text}) for row, text in enumerate(TEXTS)]
    (folder / "in.jsonl").write_text("\n".join([*records, "<script>", "[]"]))
    Pipeline(
        [
            JsonlReader(f"{folder}/in.jsonl", part_bytes=800),
            DomainClassifier(model=checkpoint("domain"), confidence_field="sure", autocast=False),
            FineWebEduClassifier(model=checkpoint("fineweb-edu"), autocast=False),
            ParquetWriter(f"{folder}/out", output_bytes=0),
        ],
        on_error="quarantine",
    ).run()
    return folder


@pytest.fixture(scope="module")
def report(finished):
    return json.loads((finished / "out/_report/report.json").read_text())


def test_the_report_agrees_with_the_rows(finished, report):
    rows = pd.concat(map(pd.read_parquet, sorted((finished / "out").glob("*.parquet"))))
    assert (report["rows_read"], report["rows_written"]) == (52, len(rows))
    assert report["labels"]["domain_pred"] == rows["domain_pred"].value_counts().to_dict()
    for name, column in (("sure", "sure"), ("fineweb-edu-score-float",) * 2):
        *bins, last = report["scores"][name]
        for low, high, count in bins:
            assert count == ((rows[column] >= low) & (rows[column] < high)).sum(), (low, high)
        assert last[2] == (rows[column] >= last[0]).sum()
        assert sum(count for *_, count in report["scores"][name]) == rows[column].notna().sum()
    lengths = [len(text) for text in TEXTS if text is not None]
    for low, high, count in report["text_lengths"]["text"]:
        assert count == sum(low <= length < high for length in lengths)
    assert 1 <= report["truncated_texts"] <= 2  # the long one, by one model or both
    assert report["left_out"] == {"line": 2}
    assert [problem["content"] for problem in report["problems"]] == ["<script>", "[]"]


def test_the_report_tells_speed_times_settings_and_how_to_reproduce(finished, report, checkpoint):
    assert report["rows_per_second"] == pytest.approx(52 / report["busy_seconds"])
    steps = np.diff([time for time, _ in report["throughput"]], append=np.nan)[0]
    rows = sum(rate * steps for _, rate in report["throughput"])
    assert rows == pytest.approx(52, rel=0.01)
    assert {"read", "model", "write"} <= set(report["worker_seconds"])
    assert report["settings"]["stage 1 DomainClassifier"]["confidence_field"] == "sure"
    assert report["versions"]["pyarrow"] == pa.__version__
    assert f"DomainClassifier(model={str(checkpoint('domain'))!r}" in report["code"]
    assert report["parts_done"] == report["parts"]


def test_an_unfinished_job_has_a_report_too(finished, tmp_path):
    shutil.copytree(finished / "out", tmp_path / "out")
    records = sorted((tmp_path / "out/_gpuclassify/records").iterdir())
    records[0].unlink()
    found = write_report(open_store(str(tmp_path / "out")))
    assert found["parts_done"] == found["parts"] - 1
    assert f"{len(records) - 1} of {len(records)} parts done" in (
        (tmp_path / "out/_report/report.html").read_text()
    )
    with pytest.raises(FileNotFoundError, match="is no output of a job"):
        report_of(open_store(str(tmp_path)))


def test_pauses_between_runs_do_not_count_as_work(finished, tmp_path):
    shutil.copytree(finished / "out", tmp_path / "out")
    ends = []
    for number, path in enumerate(sorted((tmp_path / "out/_gpuclassify/records").iterdir())):
        record = parse_record(path.read_bytes())
        ends.append(record.finished - record.run_began)
        if number < 3:
            continue
        later = {name: getattr(record, name) + 86_400 for name in ("finished", "run_began")}
        path.write_bytes(replace(record, **later).as_json())
    after = report_of(open_store(str(tmp_path / "out")))
    assert after["busy_seconds"] == pytest.approx(max(ends[:3]) + max(ends[3:]), abs=0.01)
    assert max(time for time, _ in after["throughput"]) <= after["busy_seconds"]


def test_summaries_and_the_report_tell_one_working_time(finished, tmp_path):
    def stop(done, total, summary):
        seen.append(summary)
        if done == 2:
            raise KeyboardInterrupt

    seen = []
    reader = JsonlReader(f"{finished}/in.jsonl", part_bytes=1_000)
    job = Pipeline([reader, str_lengths, ParquetWriter(f"{tmp_path}/out")], on_error="quarantine")
    with pytest.raises(KeyboardInterrupt):
        job.run(report=stop)
    again = job.run()
    report = report_of(open_store(str(tmp_path / "out")))
    seconds = seen[-1].elapsed_seconds + again.elapsed_seconds
    assert report["busy_seconds"] == pytest.approx(seconds, abs=1e-4)
    assert again.rows_per_second == again.run_rows / again.elapsed_seconds
    assert 0 < again.run_rows == again.rows_read - seen[-1].rows_read < again.rows_read == 52


class Tags(HTMLParser):
    """Collect all tags, and check that they are closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.outside = [], [], []

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append(tag)
        self.outside += [v for k, v in attributes if k in ("src", "href", "action", "data")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_needs_nothing_from_elsewhere_and_escapes_what_it_shows(finished):
    text = (finished / "out/_report/report.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.outside == []
    assert "script" not in tags.seen
    assert "http" not in text.replace("text/html", "")
    assert "&lt;script&gt;" in text or "no JSON object" in text
    assert tags.seen.count("svg") == 2 + 1 + 2  # scores, lengths, speed and times


class Additions(ReportPart):
    """Adds a block of each kind, and takes over a column of labels and a stage's examples."""

    reasons = {"own": "for a reason of its own"}

    def entries(self, directory, job, stages):
        return {"added": len(stages)}

    def page(self, report):
        blocks = [
            Text("heading <i>", "heading"),
            Text("copy <i>", "preformatted"),
            Table(("name <i>", "number"), [(Cell("one <i>", "note <i>"), "1"), ("two", None)], {1}),
            Histogram([(0.0, 0.5, 3), (0.5, 1.0, 4)], "title <i>", "side", 2),
            Fold("more <i>", [Text("hidden <i>")]),
        ]
        sections = [Section(f"{report['added']} stages", blocks), Section("wide", [], True)]
        column, stage = "domain_pred", "DomainClassifier"
        return PagePart("Added", [Tile("17", "tiles <i>")], sections, [column], [stage], False)


def test_parts_of_a_report_add_entries_and_sections(finished, report):
    made = json.loads(json.dumps(report_of(open_store(str(finished / "out")), (Additions(),))))
    assert made == {**report, "reported": made["reported"], "added": 2}
    made["stages"]["DomainClassifier"]["dropped"] = {"own": 5, "other": 6}
    text, plain = page(made, (Additions(),)), page(report)
    assert "<i>" not in text
    escaped = ("tiles", "heading", "copy", "name", "one", "note", "title", "more", "hidden")
    assert all(f"{word} &lt;i&gt;" in text for word in escaped)
    assert "dropped: 5 for a reason of its own, 6 other" in text
    assert text.index("<h2>2 stages") < text.index("<h2>Scores: sure") < text.index("<h2>wide")
    for shown in ("Labels: domain_pred", "Examples: DomainClassifier", "Where the time went"):
        assert shown in plain and shown not in text
    tags = Tags()
    tags.feed(text)
    assert tags.open == []


def test_a_job_without_rows_has_a_page(report):
    nothing = {"labels": {"a": {}}, "scores": {"b": []}, "text_lengths": {"c": [[0, 1, 0]]}}
    times = dict.fromkeys(report["worker_seconds"], 0.0)
    empty = {
        "rows_read": 0,
        "rows_written": 0,
        "throughput": [],
        "worker_seconds": times,
        "tokens": 0,
    }
    empty |= {"stages": {}, "funnel": [], "examples": {}, "agreements": {}, "sources": {}}
    text = page({**report, **nothing, **empty, "output": "a & b"})
    assert text.count("<svg") == 2  # lengths and times
    assert "a &amp; b" in text
    assert "nan" not in text


def test_many_bins_are_joined_and_many_labels_counted(report):
    bins = [(n / 20, (n + 1) / 20, n) for n in range(95)]
    joined = join_bins(bins, most=40)
    assert len(joined) == 32
    assert joined[0] == (0.0, 3 / 20, 0 + 1 + 2)
    assert (joined[-1][1], sum(count for *_, count in joined)) == (95 / 20, sum(range(95)))
    labels = {f"label {n}": 50 - n for n in range(50)}
    text = page({**report, "labels": {"kind": labels}, "labelled": {"kind": 2_000}})
    assert "20 more labels are in report.json." in text
    assert "50 (2.5%)" in text and "Shares are of 2,000 rows labelled." in text


SCORES = {
    "shares": ([0.0, 0.31, 0.5, 1.0, 1.0], 1),
    "only 1": ([1.0, 1.0], 1),
    "only 0": ([0.0, 0.0], 0.05),
    "whole numbers": ([0.0, 2.0, 5.0], 5),
    "above 1": ([0.5, 1.0, 1.02], 1.05),
    "below 0": ([-1.0, -0.5, 0.0], 0),
}


@pytest.mark.contract
@pytest.mark.parametrize(("scores", "end"), SCORES.values(), ids=SCORES)
def test_the_last_bin_of_scores_includes_its_upper_edge(scores, end):
    """As in numpy: shares end at 1, not at 1.05."""
    table = pa.table({"s": pa.array(scores, pa.float32())})
    found = score_bins(count_scores(table, ["s"])["s"], largest_scores(table, ["s"])["s"])
    edges = np.array([found[0][0], *(high for _, high, _ in found)])
    np.testing.assert_allclose(np.diff(edges), 0.05)
    counted, _ = np.histogram(scores, edges)
    np.testing.assert_array_equal(counted, [count for *_, count in found])
    assert edges[-1] == pytest.approx(end)


# Progress.


@pytest.fixture
def summary():
    return JobSummary(
        rows_read=3_000, resumed_rows=1_000, resumed_parts=10, elapsed_seconds=20,
        totals={"tokens": 900_000}, resumed_tokens=100_000, left_out={"line": 2},
    )  # fmt: skip


def test_a_terminal_gets_a_live_line(summary):
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    with JobProgress("domain", console) as bar:
        bar.parts(30, 100, summary)
    text = console.file.getvalue()
    assert (
        "30/100 parts (10 were there already), 3,000 rows read, 100 rows/s, 40k tokens/s, "
        "1:10 left, left out: 2 lines"
    ) in text
    assert "since the start" in text


def test_a_log_gets_a_line_now_and_then_and_one_at_the_end(summary):
    console = Console(file=io.StringIO())
    with JobProgress("[/red]", console, log_every_seconds=0.05) as lines:
        started = time.monotonic()
        for done in range(31):
            lines.parts(done, 30, summary)
        while "30/30" not in console.file.getvalue() and time.monotonic() < started + 60:
            time.sleep(0.01)
        logged, seconds = len(console.file.getvalue().splitlines()), time.monotonic() - started
    written = console.file.getvalue().splitlines()
    assert 1 <= logged <= 1 + seconds / 0.05
    assert len(written) > logged  # the last one comes at the end
    assert written[-1].startswith("[/red]: 100% 30/30 parts")
    assert "40k tokens/s, 20.0 s of working time, left out: 2 lines" in written[-1]


def test_python_s_log_gets_the_lines_where_there_is_no_terminal(finished, caplog, capsys):
    caplog.set_level("INFO", logger="gpuclassify")
    stages = [JsonlReader(f"{finished}/in.jsonl"), str_lengths, ParquetWriter(f"{finished}/logged")]
    Pipeline(stages, on_error="quarantine").run()
    [line] = [text for text in caplog.messages if "parts" in text]
    assert line.startswith("str_lengths: 100% 1/1 parts, 52 rows read, ")
    assert capsys.readouterr() == ("", "")


def str_lengths(frame):
    return frame.assign(length=frame["text"].str.len())

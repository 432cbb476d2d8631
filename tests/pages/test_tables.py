"""What an interpreter and a notebook show of plans, summaries and classifiers."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest

from gpuclassify import DomainClassifier, Embedder
from gpuclassify.corpus.dedup.job import DedupSummary
from gpuclassify.corpus.dedup.summary import DuplicatesSummary, Group
from gpuclassify.jobs.plan import ClassifierPlan, Plan, TimePlan
from gpuclassify.jobs.report.summary import JobSummary
from gpuclassify.pages import html_table, text_table
from gpuclassify.pages.sections import Bars, Section, Table, Text, sections_page

HOSTILE = "<script>alert('&')</script>"
SUMMARY = JobSummary(
    files=[f"out/part-{n}.parquet" for n in range(500)],
    rows_read=1_000_000,
    rows_written=250_000,
    elapsed_seconds=100.0,
    totals={"tokens": 5e8},
    columns={"label": {f"label {n}": 100 - n for n in range(26)} | {HOSTILE: 500}},
    left_out={"line": 3},
    output_bytes=2**30,
    resumed_parts=2,
    resumed_rows=10_000,
    output=f"out/{HOSTILE}",
)
COUNTED = DuplicatesSummary(
    documents=100,
    duplicates=25,
    in_groups=40,
    groups=15,
    sources={HOSTILE: (60, 20), "other": (40, 5)},
    largest=[Group(9, 1, HOSTILE * 20)] * 20,
)
MODEL = ClassifierPlan(
    name=HOSTILE, model="owner/model", limit_tokens=512, limit_chars=2000, mean_tokens=300.0,
    median_tokens=250, p95_tokens=900, most_tokens=2000,
    truncated_share=0.1, tokens=3e9, device="cpu", dtype="float32", weights_bytes=2**29,
    batch_bytes=2**20,
)  # fmt: skip
PLAN = Plan(
    rows=10, is_exact=True, text_bytes=10.0, input_bytes=2**20, null_share=0.0, parts=3,
    largest_part_text_bytes=8.0, largest_part_rows=4.0, sample_rows=10,
    left_out={}, classifiers=(MODEL,),
    time=TimePlan(60.0, 40.0, 200.0, 10, 5.0, "tokens", (HOSTILE,) * 20), worker_bytes=2**30,
    warnings=(HOSTILE,),
)  # fmt: skip
SHOWN = {
    "job": SUMMARY,
    "duplicates": COUNTED,
    "deduplication": DedupSummary(COUNTED, SUMMARY, {}),
    "plan": PLAN,
    "classifier": DomainClassifier(filter_by=[HOSTILE], min_confidence=0.5),
    "embedder": Embedder(prompt=HOSTILE * 50),
}


class Cells(HTMLParser):
    """Tags in order, and the text of the cells."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.texts += [""] * (tag in ("th", "td"))

    def handle_data(self, data):
        if self.texts:
            self.texts[-1] += data


@pytest.mark.parametrize("name", SHOWN)
def test_a_repr_is_short(name):
    lines = repr(SHOWN[name]).splitlines()
    assert len(lines) <= 16
    assert sum(map(len, lines)) <= 1_200


@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_shows_a_table_with_every_text_escaped(name):
    page = SHOWN[name]._repr_html_()
    cells = Cells(page)
    assert set(cells.tags) == {"div", "strong", "table", "tr", "th", "td"}
    assert any("<script>" in text for text in cells.texts)
    assert page.count("color") == page.count("color: inherit")  # which is light or dark


def test_a_job_tells_its_rows_speed_and_labels():
    lines = [
        "rows       1,000,000 read, 250,000 written (25.0%)",
        f"output     out/{HOSTILE}: 500 files, 1.00 GiB",
        "this run   990,000 rows in 1:40, 9.9k rows/s, 5M tokens/s",
        "earlier    2 parts, 10,000 rows",
        "left out   3 lines",
        f"label      {HOSTILE}: 500, label 0: 100, label 1: 99, label 2: 98, label 3: 97,",
        "           and 22 more",
    ]
    assert repr(SUMMARY).splitlines() == lines
    assert Cells(SUMMARY._repr_html_()).texts[:2] == ["rows", lines[0][11:]]


def test_an_empty_job_has_a_repr():
    assert repr(JobSummary()).startswith("rows       0 read, 0 written\n")


def test_a_plan_is_one_line_until_it_is_printed():
    assert repr(PLAN) == f"Plan(10 rows in 3 parts: {HOSTILE}, about 1:00, between 0:40 and 3:20)"
    assert repr(replace(PLAN, time=None)) == f"Plan(10 rows in 3 parts: {HOSTILE})"
    assert len(str(PLAN).splitlines()) > 30
    texts = Cells(PLAN._repr_html_()).texts
    printed = " ".join(str(PLAN).split())
    assert all(" ".join(text.split()) in printed for text in texts)


def test_a_classifier_shows_its_own_settings_and_those_that_are_given():
    cells = Cells(SHOWN["classifier"]._repr_html_()).texts
    shown = dict(zip(cells[::2], cells[1::2], strict=True))
    assert shown["model"] == "'nvidia/domain-classifier'"
    assert shown["max_chars"] == "2000"
    assert shown["min_confidence"] == "0.5"
    assert "batch_size" not in shown


def test_a_page_of_tables_escapes_its_texts_and_says_where_a_table_has_no_rows():
    names = (HOSTILE, "rows")
    table = Table(names, [["a", "12"]], is_cross=True)
    bars = Bars(("name", "value"), [("a", (1.0, 0.5), "0.50×")])
    full = Section(HOSTILE, [table, bars, Text(HOSTILE)])
    page = sections_page("Table", [HOSTILE], [full, Section("empty", [Table(names, [])])])
    assert "<script" not in page and page.count("&lt;script&gt;") == 4
    assert page.count("<table") == 1 and page.count("None.") == 1
    assert '<td class="number">12</td>' in page and "width: 50.0%" in page


def test_long_lines_are_wrapped_below_their_text():
    (first, second) = text_table([("name", "word " * 25)]).splitlines()
    assert first.startswith("name       word")
    assert second.startswith(" " * 11 + "word")


def test_html_keeps_line_breaks_and_spaces():
    page = html_table("a & b", [("<", "1  2\n3")])
    assert "a &amp; b" in page
    assert "&lt;</th>" in page
    assert "1  2\n3</td>" in page
    assert "pre-wrap" in page

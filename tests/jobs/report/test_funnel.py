"""Rows dropped by each filter of a job, and examples, against unfiltered runs and pandas."""

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from gpuclassify import DomainClassifier, FineWebEduClassifier
from gpuclassify.frames import Texts
from gpuclassify.jobs.input.readers import JsonlReader
from gpuclassify.jobs.ledger.records import RECORDS
from gpuclassify.jobs.output.writers import ParquetWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.report.summary import count_sources, fold_rare
from gpuclassify.mapping.runners import NonFiniteOutputError
from gpuclassify.mapping.stage_counts import TextOutcomes, beginning
from gpuclassify.workers.run_context import add_counts
from tests.replicas import sample_texts

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SPECIAL = '<script>alert("x")</script> & \u202egnp.exe\u2066 \x07\x00 \ufeff'
SAMPLES = sample_texts(60, seed=4)
TEXTS = [*SAMPLES, None, "", None, *SAMPLES[:8], SPECIAL]
MINIMUM, LEAST_SCORE = 0.15, 1.0


@pytest.fixture(scope="module")
def documents():
    hosts = [f"host {row % 3}" if row % 7 else None for row in range(len(TEXTS))]
    return pd.DataFrame({"id": range(len(TEXTS)), "text": TEXTS, "host": hosts})


@pytest.fixture(scope="module")
def mappers(checkpoint):
    """Mappers for the domain and the educational value, with their settings."""

    def make(domain=(), education=()):
        shared = {"autocast": False}
        models = {name: checkpoint(name) for name in ("domain", "fineweb-edu")}
        return [
            DomainClassifier(
                model=models["domain"], confidence_field="sure", **shared, **dict(domain)
            ),
            FineWebEduClassifier(model=models["fineweb-edu"], **shared, **dict(education)),
        ]

    return make


@pytest.fixture(scope="module")
def scored(documents, mappers):
    """Every row with the columns of both mappers, without filters."""
    first, second = mappers()
    return second(first(documents))


@pytest.fixture(scope="module")
def wanted(scored):
    return [*scored["domain_pred"].value_counts().index[:4]]


@pytest.fixture
def run(documents, tmp_path):
    """The summary and the report of a job over the documents in several parts."""
    documents.to_json(tmp_path / "in.jsonl", orient="records", lines=True)

    def run(*stages, **options):
        reader = JsonlReader(f"{tmp_path}/in.jsonl", part_bytes=1_500)
        summary = Pipeline([reader, *stages, ParquetWriter(f"{tmp_path}/out")], **options).run()
        return summary, json.loads((tmp_path / "out/_report/report.json").read_text())

    return run


def domain_reasons(scored, wanted):
    """The reason why each row is dropped, computed by pandas."""
    reasons = pd.Series("kept", scored.index)
    reasons[scored["sure"] < np.float32(MINIMUM)] = "confidence"
    reasons[~scored["domain_pred"].isin(wanted)] = "label"
    return reasons.mask(scored["text"].isna(), "null")


def counts_of(values):
    return values.value_counts().to_dict()


def test_each_classifier_tells_what_it_got_labelled_and_dropped_by_source(
    run, mappers, documents, scored, wanted
):
    reasons = domain_reasons(scored, wanted)
    left = scored[reasons == "kept"]
    is_low = left["fineweb-edu-score-float"] < LEAST_SCORE
    filters = {"filter_by": wanted, "min_confidence": MINIMUM}
    stages = mappers(filters, {"min_score": LEAST_SCORE})

    summary, report = run(*stages, source_field="host")

    domain, education = report["stages"].values()
    dropped = counts_of(reasons[reasons != "kept"])
    assert dropped.keys() == {"null", "label", "confidence"}
    assert (domain["read"], domain["kept"]) == (len(scored), len(left))
    assert domain["dropped"] == dropped
    assert domain["labels"] == {"domain_pred": counts_of(scored["domain_pred"])}
    assert (education["read"], education["kept"]) == (len(left), int((~is_low).sum()))
    assert education["dropped"] == {"score": int(is_low.sum())}
    labels = education["labels"]["fineweb-edu-score-label"]
    assert labels == counts_of(left["fineweb-edu-score-label"])
    assert domain["would_drop"] == education["would_drop"] == {}
    assert [step["rows"] for step in report["funnel"]] == [
        summary.rows_read, domain["kept"], summary.rows_written,
    ]  # fmt: skip
    assert summary.stages == report["stages"]
    assert 0 < domain["seconds"] < report["busy_seconds"]
    examples = report["examples"]["DomainClassifier"]["dropped"]
    assert examples.keys() == {"label", "confidence"}  # nulls have no examples
    for reason, pairs in examples.items():
        of_it = set(map(beginning, scored["text"][reasons == reason]))
        assert {text for _, text in pairs} <= of_it
    hosts = documents["host"].fillna("(null)")
    kept = left.index[~is_low]
    expected = {
        host: {"read": int((hosts == host).sum()), "written": int((hosts[kept] == host).sum())}
        for host in hosts.unique()
    }
    assert report["sources"] == {"host": expected} == summary.sources
    with pytest.raises(ValueError, match=r"no column 'hots' in the input .* Did you mean 'host'"):
        run(*stages, source_field="hots")


def test_with_keep_field_all_rows_go_on_and_the_decision_is_counted(run, mappers, scored, wanted):
    filters = {"filter_by": wanted, "min_confidence": MINIMUM, "keep_field": "good"}
    summary, report = run(*mappers(filters))
    domain, education = report["stages"].values()
    reasons = domain_reasons(scored, wanted)
    assert domain["would_drop"] == counts_of(reasons[reasons != "kept"])
    assert domain["dropped"] == {}
    assert domain["kept"] == education["read"] == summary.rows_written == len(scored)
    assert sum(domain["would_drop"].values()) == report["labels"]["good"]["False"]


def test_rows_that_fail_in_a_later_stage_are_counted_by_no_classifier(run, mappers, wanted):
    def refuse(frame):
        if frame["id"].isin([3, 9]).any():
            raise NonFiniteOutputError("a row that cannot be scored")
        return frame[frame["id"] != 11]

    domain, education = mappers({"filter_by": wanted, "keep_field": "good"})
    summary, report = run(domain, refuse, education, on_error="quarantine")
    first, second = report["stages"].values()
    assert summary.left_out == {"row": 2}
    assert first["read"] == summary.rows_read - 2
    assert second["read"] == summary.rows_read - 3 == summary.rows_written
    names = [step["name"] for step in report["funnel"]]
    other = "other stages, left out"
    assert names == ["rows read", other, "DomainClassifier", other, "FineWebEduClassifier"]


# Examples.


def test_examples_are_the_most_and_the_least_certain_and_labels_are_crossed(run, mappers, scored):
    _, report = run(*mappers(), examples=2)
    labels = report["examples"]["DomainClassifier"]["labels"]
    texts = scored.dropna(subset="text").drop_duplicates("text")
    assert labels.keys() == set(texts["domain_pred"])
    for label, rows in texts.groupby("domain_pred"):
        sure = sorted(rows["sure"], reverse=True)
        expected = sure if len(sure) <= 4 else sure[:2] + sure[-2:]
        found = labels[label]
        assert [pair[0] for pair in found] == pytest.approx(expected, abs=1e-3)
        assert {text for _, text in found} <= set(map(beginning, rows["text"]))
    borders = (texts["fineweb-edu-score-float"] - 2.5).abs()
    shown = report["examples"]["FineWebEduClassifier"]["labels"].values()
    assert max(pairs[0][0] for pairs in shown) == pytest.approx(borders.max(), abs=1e-3)
    expected = pd.crosstab(scored["domain_pred"], scored["fineweb-edu-score-label"])
    counts = report["agreements"]["domain_pred and fineweb-edu-score-label"]
    found = pd.DataFrame.from_dict(counts, orient="index").fillna(0).astype(int)
    pd.testing.assert_frame_equal(found, expected, check_like=True, check_names=False)


def test_no_examples_are_kept_where_none_are_wanted_and_the_job_stays_the_same(
    run, mappers, tmp_path
):
    _, report = run(*mappers(), examples=0)
    assert report["examples"] == {}
    contents = [path.read_text() for path in (tmp_path / "out" / RECORDS).iterdir()]
    assert not any(SAMPLES[0][:20] in content for content in contents)
    again, _ = run(*mappers(), examples=3)
    assert contents and again.resumed_parts == again.parts > 3
    with pytest.raises(ValueError, match="examples=-1 must be at least 0"):
        Pipeline(examples=-1)


def test_texts_on_the_page_are_escaped_and_without_invisible_characters(run, mappers, tmp_path):
    run(*mappers({"filter_by": "Games"}), examples=50)
    page = (tmp_path / "out/_report/report.html").read_text()
    assert "&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt; &amp; gnp.exe" in page
    assert "<script" not in page
    assert not any(mark in page for mark in "\u202e\u2066\x07\x00\ufeff")


def test_texts_without_certainties_have_examples_too():
    texts = sample_texts(6)
    labels = pa.array(["safe"] * 5 + [None])
    found = TextOutcomes(Texts(texts), None, labels).examples(1)
    assert found == {
        "labels": {"safe": [[None, beginning(texts[0])], [None, beginning(texts[4])]]},
        "dropped": {},
    }


def test_rare_sources_are_added_up():
    names = pa.array([f"h{n}" for n in range(5) for _ in range(n + 1)])
    counts = count_sources(names, names[:6])
    folded = fold_rare(counts, most=2)
    assert list(folded) == ["h4", "h3", "(other)"]
    assert folded["(other)"] == {"read": 1 + 2 + 3, "written": 6}
    add_counts(folded, counts)
    assert fold_rare(folded, most=1) == {
        "h4": {"read": 10, "written": 0}, "(other)": {"read": 20, "written": 12},
    }  # fmt: skip


# How to reproduce.


def test_the_code_makes_the_same_job_again(run, mappers):
    every = mappers({"filter_by": mappers()[0].labels})  # longer than a repr
    summary, report = run(*every)
    assert report["command"] == ""
    begin, _, call = report["code"].partition("\n\n")
    names = {}
    exec(f"{begin}\njob = {call}", names)
    again = names["job"].run()
    assert (again.resumed_parts, again.rows_written) == (summary.parts, summary.rows_written)

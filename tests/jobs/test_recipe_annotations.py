"""Recipes that write annotations: what they mark is what they would remove, or cut."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from gpuclassify import (
    AnnotationWriter,
    AssignBuckets,
    Deduplicate,
    ExactDuplicates,
    FuzzyDuplicates,
    ParquetWriter,
    Pipeline,
    ScoreBuckets,
    Select,
    add_buckets,
    keep_top,
    read_files,
    score_edges,
)
from gpuclassify.jobs.input.readers import FileReader
from gpuclassify.jobs.stores.store import Store
from tests.replicas import sample_texts

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(params=["parquet", "jsonl"])
def crawl(request, tmp_path):
    texts = sample_texts(60, seed=5, max_words=40)
    words = [f"{text} and one word more" for text in texts[:10]]
    rows = [*texts, *texts[:20], *words, None, None, "", ""]
    frame = pd.DataFrame({"id": [f"d{row}" for row in range(len(rows))], "text": rows})
    frame = frame.sample(frac=1, random_state=0, ignore_index=True)
    (tmp_path / "crawl").mkdir()
    for number, part in enumerate(np.array_split(np.arange(len(frame)), 3)):
        path, some = tmp_path / f"crawl/{number}.{request.param}", frame.iloc[part]
        if request.param == "parquet":
            some.to_parquet(path, index=False, row_group_size=11)
        else:
            some.to_json(path, orient="records", lines=True)
    return tmp_path / "crawl"


def run(job, **options):
    return job.run(report=lambda *_: None, **options)


def reader(crawl, **options):
    return FileReader(str(crawl), **options)


@pytest.fixture
def opened(monkeypatch):
    """Files that are opened from now on."""
    names, reading = [], Store.reading

    def noted(self, *arguments):
        names.append(Path(self.root))
        return reading(self, *arguments)

    monkeypatch.setattr(Store, "reading", noted)
    return names


@pytest.mark.parametrize(
    ("crawl", "method", "on_error", "id_field"),
    [
        ("parquet", ExactDuplicates, "raise", "id"),
        ("jsonl", ExactDuplicates, "quarantine", None),
        pytest.param("parquet", FuzzyDuplicates, "quarantine", None, marks=pytest.mark.slow),
        ("jsonl", FuzzyDuplicates, "raise", "id"),
    ],
    indirect=["crawl"],
)
def test_marks_are_what_a_removal_removes(crawl, tmp_path, method, on_error, id_field):
    settings, options = method(id_field=id_field), {"on_error": on_error}
    if on_error == "quarantine" and next(crawl.iterdir()).suffix == ".jsonl":
        with next(iter(sorted(crawl.iterdir()))).open("r+") as file:
            lines = file.readlines()
            lines.insert(2, "{broken\n")
            file.seek(0)
            file.writelines(lines)
    notes, clean = str(tmp_path / "notes"), str(tmp_path / "clean")
    small = {"part_bytes": 900}
    run(Deduplicate(reader(crawl, **small), settings, ParquetWriter(clean), **options))
    summary = run(Deduplicate(reader(crawl, **small), settings, AnnotationWriter(notes), **options))
    marked = reader(crawl, annotations=notes, part_bytes=2_000)
    chosen = str(tmp_path / "chosen")
    run(Pipeline([marked, Select("not is_duplicate"), ParquetWriter(chosen)], **options))
    expected = read_files(clean).compute().sort_values("id", ignore_index=True)
    found = read_files(chosen, fields=["id", "text"]).compute()
    pd.testing.assert_frame_equal(found.sort_values("id", ignore_index=True), expected)
    assert summary.duplicates.duplicates == (expected.shape[0] < 94) * (94 - len(expected))
    every = str(tmp_path / "every")
    run(Pipeline([marked, ParquetWriter(every)], **options))
    frame = read_files(every).compute()
    groups = frame.dropna(subset="duplicate_group").groupby("duplicate_group")
    listing = pd.read_parquet(tmp_path / "notes/_dedup/duplicates")
    assert len(groups) == listing["group"].nunique()
    assert (groups["is_duplicate"].sum() == groups.size() - 1).all()
    assert ("duplicate_similarity" in frame) == settings.has_similarity


@pytest.mark.parametrize("weight", [None, "bytes"])
def test_buckets_beside_the_input_are_those_of_a_rewrite(crawl, tmp_path, opened, weight):
    def with_score(frame):
        return frame.assign(score=(frame["text"].str.len() % 17).astype(np.float32))

    scores, buckets = str(tmp_path / "scores"), str(tmp_path / "buckets")
    run(Pipeline([reader(crawl), with_score, AnnotationWriter(scores)]))
    options = {"scores": "score", "n": 4, "weight": weight}
    beside = [reader(crawl, annotations=scores), AnnotationWriter(buckets)]
    job = AssignBuckets(beside, **options).prepare()
    opened.clear()
    job.run(report=lambda *_: None)
    assert [path for path in opened if path.parent == crawl] == [] or weight is not None
    rewritten = str(tmp_path / "out")
    run(AssignBuckets([reader(crawl), with_score, ParquetWriter(rewritten)], **options))
    expected = read_files(rewritten).compute().sort_values("id", ignore_index=True)
    frame = read_files(str(crawl), annotations=[scores, buckets])
    found = frame.compute().sort_values("id", ignore_index=True)
    pd.testing.assert_frame_equal(found, expected)


def test_buckets_and_the_best_share_open_no_text(crawl, tmp_path, opened):
    def with_score(frame):
        return frame.assign(score=np.arange(len(frame), dtype=np.float32))

    run(Pipeline([reader(crawl), with_score, AnnotationWriter(str(tmp_path / "notes"))]))
    frame = read_files(str(crawl), annotations=str(tmp_path / "notes"))
    opened.clear()
    edges = score_edges(frame, "score", n=3)
    counts = add_buckets(frame, edges)["bucket"].value_counts().compute()
    best = keep_top(frame, "score", share=0.25)
    assert [path for path in opened if path.parent == crawl] == []
    assert counts.sum() == 94
    expected = frame.compute()["score"].nlargest(24).min()
    assert (best.compute()["score"] >= expected).all()


def test_edges_of_before_annotate_new_files_alone(crawl, tmp_path):
    def with_score(frame):
        return frame.assign(score=np.arange(len(frame), dtype=np.float32))

    scores = str(tmp_path / "scores")
    run(Pipeline([reader(crawl), with_score, AnnotationWriter(scores)]))
    edges = score_edges(read_files(str(crawl), annotations=scores), "score", n=3)
    stages = [ScoreBuckets(edges), AnnotationWriter(str(tmp_path / "buckets"))]
    run(Pipeline([reader(crawl, annotations=scores), *stages]))
    last = sorted(crawl.iterdir())[-1]
    (crawl / f"more{last.suffix}").write_bytes(last.read_bytes())
    run(Pipeline([reader(crawl), with_score, AnnotationWriter(scores)]))
    summary = run(Pipeline([reader(crawl, annotations=scores), *stages]))
    assert summary.rows_read == 31


def test_classifiers_come_before_buckets(crawl, tmp_path):
    stages = [reader(crawl), lambda frame: frame, AnnotationWriter(str(tmp_path / "notes"))]
    with pytest.raises(ValueError, match="annotate the input with them first"):
        run(AssignBuckets(stages, "score"))

"""Jobs that select rows by annotations: what comes out, what is counted, and what is not read."""

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from gpuclassify import (
    AnnotationWriter,
    ApplyThresholds,
    JsonlWriter,
    ParquetWriter,
    Pipeline,
    Select,
    Thresholds,
    read_files,
)
from gpuclassify.commands.cli import main
from gpuclassify.corpus.scores.thresholds import GroupThreshold
from gpuclassify.jobs.input.readers import FileReader
from gpuclassify.jobs.stores.store import WatchedFile

ROWS, FILES, GROUP = 3_000, 3, 100


def with_rank(frame):
    return frame.assign(
        rank=frame["id"].astype("Int64"),
        score=(frame["id"] / ROWS).astype(np.float32),
        label=pd.Series(["a", "b", None], dtype="str").take(frame["id"] % 3).array,
    )


@pytest.fixture(scope="module", params=["parquet", "jsonl"])
def corpus(request, tmp_path_factory):
    """Files of random texts, and a set of their ranks."""
    root = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    texts = [rng.bytes(150).hex() for _ in range(ROWS)]
    (root / "crawl").mkdir()
    for number in range(FILES):
        rows = range(number * ROWS // FILES, (number + 1) * ROWS // FILES)
        path = root / f"crawl/{number}.{request.param}"
        if request.param == "parquet":
            table = pa.table({"id": pa.array(rows), "text": [texts[row] for row in rows]})
            pq.write_table(table, path, row_group_size=GROUP, compression="none")
        else:
            lines = [json.dumps({"id": row, "text": texts[row]}) + "\n" for row in rows]
            path.write_text("".join(lines))
    writer = AnnotationWriter(str(root / "notes"))
    run([FileReader(str(root / "crawl"), part_bytes=50_000), with_rank, writer])
    return root


def run(stages, **options):
    return Pipeline(stages, **options).run(report=lambda *_: None)


def reader(corpus, **options):
    options = {"annotations": str(corpus / "notes"), "part_bytes": 120_000} | options
    return FileReader(str(corpus / "crawl"), **options)


@pytest.mark.parametrize("on_error", ["raise", "quarantine"])
@pytest.mark.parametrize(
    "where",
    ["rank < 30", "label == 'a' and score > 0.9", "id >= 2990 and rank != 2995", "rank < 0",
     "rank == 5 or rank == 1005", "text > 'ff'", "label is None"],
)  # fmt: skip
def test_rows_are_those_of_pandas(corpus, tmp_path, where, on_error):
    whole = (
        read_files(str(corpus / "crawl"), annotations=str(corpus / "notes"))
        .compute()
        .reset_index(drop=True)
    )
    expected = whole.query(where.replace("label is None", "label.isna()"))
    summary = run(
        [reader(corpus), Select(where), ParquetWriter(str(tmp_path / "out"))], on_error=on_error
    )
    assert (summary.rows_read, summary.rows_written) == (ROWS, len(expected))
    if len(expected):
        found = read_files(str(tmp_path / "out")).compute().sort_values("id")
        pd.testing.assert_frame_equal(found.reset_index(drop=True), expected.reset_index(drop=True))


def test_the_report_has_a_funnel_of_conditions(corpus, tmp_path):
    where = "rank >= 30 and label == 'a' and score <= 0.5"
    summary = run([reader(corpus), Select(where), ParquetWriter(str(tmp_path / "out"))])
    counts = [
        (name, stage["read"], stage["kept"], stage["dropped"])
        for name, stage in summary.stages.items()
    ]
    assert counts == [
        ("Select rank >= 30", 3_000, 2_970, {"condition": 30}),
        ("Select label == 'a'", 2_970, 990, {"condition": 990, "unknown": 990}),
        ("Select score <= 0.5", 990, 491, {"condition": 499}),
    ]
    report = json.loads((tmp_path / "out/_report/report.json").read_text())
    assert [step["rows"] for step in report["funnel"]] == [3_000, 2_970, 990, 491]
    page = (tmp_path / "out/_report/report.html").read_text()
    assert "for which the condition is null" in page and "Select rank &gt;= 30" in page


@pytest.fixture
def bytes_read(monkeypatch):
    """How many bytes are read of files of each folder."""
    counts, call = {}, WatchedFile._call

    def counted(self, method, *arguments):
        result = call(self, method, *arguments)
        if isinstance(result, bytes):
            folder = self._store.root.split("/")[-2]
            counts[folder] = counts.get(folder, 0) + len(result)
        return result

    monkeypatch.setattr(WatchedFile, "_call", counted)
    return counts


def test_text_of_row_groups_without_a_row_is_not_read(corpus, tmp_path, bytes_read):
    source = reader(corpus).find_parts()  # whose footers or samples are read in any case
    size = sum(path.stat().st_size for path in (corpus / "crawl").iterdir())
    job = Pipeline([reader(corpus), Select("rank < 30"), ParquetWriter(str(tmp_path / "out"))])
    prepared = job.prepare()
    bytes_read.clear()
    prepared.run(report=lambda *_: None)
    is_parquet = source.parts[0].row_groups is not None
    least = size / ROWS * GROUP if is_parquet else 120_000
    assert 0 < bytes_read["crawl"] < 1.5 * least + 150_000  # footers are of 64 KiB
    bytes_read.clear()
    nothing = Pipeline([reader(corpus), Select("rank < 0"), ParquetWriter(str(tmp_path / "none"))])
    prepared = nothing.prepare()
    bytes_read.clear()
    prepared.run(report=lambda *_: None)
    assert "crawl" not in bytes_read


def test_sets_that_disagree_are_shown(corpus, tmp_path):
    def with_other(frame):
        return frame.assign(other=pd.Series(["a", "b"], dtype="str").take(frame["id"] % 2).array)

    with_other.__qualname__ = "with_other"
    writer = AnnotationWriter(str(tmp_path / "more"))
    run([FileReader(str(corpus / "crawl")), with_other, writer])
    sets = [str(corpus / "notes"), str(tmp_path / "more")]
    out = ParquetWriter(str(tmp_path / "out"))
    summary = run([reader(corpus, annotations=sets), Select("rank < 300"), out])
    assert summary.rows_written == 300
    assert summary.numbers["score"]


def test_output_is_as_of_any_job(corpus, tmp_path):
    out = ParquetWriter(str(tmp_path / "folders"), partition_by="label")
    run([reader(corpus), Select("rank < 300 and label is not None"), out])
    assert {path.name for path in (tmp_path / "folders").glob("label=*")} == {"label=a", "label=b"}
    run([reader(corpus), Select("rank < 3"), JsonlWriter(str(tmp_path / "lines"))])
    lines = [line for path in (tmp_path / "lines").glob("part-*") for line in path.open()]
    assert [json.loads(line)["rank"] for line in sorted(lines)] == [0, 1, 2]
    with pytest.raises(ValueError, match="Did you mean 'rank'"):
        run([reader(corpus), Select("rnk < 3"), ParquetWriter(str(tmp_path / "never"))])
    assert not (tmp_path / "never").exists()


def test_classifying_after_a_selection_reads_only_its_texts(corpus, tmp_path):
    def upper(frame):
        assert (frame["rank"] < 30).all()
        return frame.assign(upper=frame["text"].str.upper())

    summary = run([reader(corpus), Select("rank < 30"), upper, ParquetWriter(str(tmp_path / "o"))])
    assert (summary.rows_read, summary.rows_written) == (ROWS, 30)


def test_rows_read_are_counted_by_source_all_the_same(corpus, tmp_path):
    stages = [reader(corpus), Select("rank < 30"), ParquetWriter(str(tmp_path / "out"))]
    summary = run(stages, source_field="label")
    assert summary.sources["label"]["a"] == {"read": 1_000, "written": 10}


def test_text_is_not_read_where_thresholds_keep_no_row(corpus, tmp_path, bytes_read):
    low = GroupThreshold(100, 50, 2_990 / ROWS, [None, None], {}, 1.0)
    stage = ApplyThresholds(Thresholds("score", "good", "recall", 0.5, {None: low}))
    select = Select("label == 'a'")
    size = sum(path.stat().st_size for path in (corpus / "crawl").iterdir())
    source = reader(corpus).find_parts()
    prepared = Pipeline([reader(corpus), stage, select, ParquetWriter(str(tmp_path / "out"))])
    prepared = prepared.prepare()
    bytes_read.clear()
    summary = prepared.run(report=lambda *_: None)
    is_parquet = source.parts[0].row_groups is not None
    least = size / ROWS * GROUP if is_parquet else 120_000
    assert bytes_read["crawl"] < 1.5 * least + 150_000  # footers are of 64 KiB
    found = read_files(str(tmp_path / "out")).compute()
    assert found["id"].tolist() == [row for row in range(2_990, ROWS) if row % 3 == 0]
    assert [*summary.stages] == ["Select score >= its threshold", "Select label == 'a'"]
    assert (summary.rows_read, summary.rows_written) == (ROWS, len(found))


SCORES = [1.0, 3.0, 5.0, float("nan"), None]
OF_SCORES = {  # and the rows that they keep: NaN is null, which is unknown
    "score != 3": [0, 2],
    "not (score >= 3)": [0],
    "score is None": [3, 4],
    "score is not None": [0, 1, 2],
    "score not in [3, 1]": [2],
    "not (score == score)": [],
    "(score - score) / (score - score) is None": [0, 1, 2, 3, 4],
}


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()], ids=str)
def test_nan_is_null_on_every_path(tmp_path, kind):
    def unchanged(frame):
        return frame

    path, rows = tmp_path / "in.parquet", range(len(SCORES))
    table = pa.table({"id": rows, "score": pa.array(SCORES, kind), "text": [""] * len(rows)})
    pq.write_table(table, path)
    run([FileReader(str(path)), with_rank, AnnotationWriter(str(tmp_path / "notes"))])
    for number, (where, expected) in enumerate(OF_SCORES.items()):
        jobs = {
            "first": ([], {}),
            "later": ([unchanged], {}),
            "counted": ([], {"source_field": "id"}),
        }
        for name, (stages, options) in jobs.items():
            out = str(tmp_path / f"{number}-{name}")
            run([FileReader(str(path)), *stages, Select(where), ParquetWriter(out)], **options)
            assert sorted(pq.read_table(out)["id"].to_pylist()) == expected, (where, name)
        frames = [table.to_pandas(), table.to_pandas(types_mapper=pd.ArrowDtype)]
        for frame in frames:
            assert Select(where)(frame)["id"].tolist() == expected, where
        lazy = Select(where)(read_files(str(path)))
        assert lazy.compute()["id"].tolist() == expected, where
        command = ["show", str(tmp_path / "notes"), "--input", str(path), "--json", "-n", "9"]
        shown = CliRunner().invoke(main, [*command, "--where", where]).stdout
        assert [json.loads(line)["id"] for line in shown.splitlines()] == expected, where


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_shard_without_scores_keeps_no_row_of_a_condition_on_scores(tmp_path, suffix):
    def unchanged(frame):
        return frame

    path = tmp_path / f"in.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.table({"id": [0, 1], "score": pa.nulls(2), "x": [0.5, 1.5]}), path)
    else:
        path.write_text("".join(f'{{"id": {n}, "score": null, "x": {n}.5}}\n' for n in (0, 1)))
    of_scores = {"score > 3": [], "x > 1 or score + 1 > 3": [1], "score is None": [0, 1]}
    for number, (where, expected) in enumerate(of_scores.items()):
        for name, stages in {"first": [], "later": [unchanged]}.items():
            out = tmp_path / f"{number}-{name}"
            run([FileReader(str(path)), *stages, Select(where), ParquetWriter(str(out))])
            table = pq.read_table(out)
            assert table["id"].to_pylist() == expected
            assert b"without values" not in table.schema.metadata[b"pandas"]
        assert Select(where)(read_files(str(path))).compute()["id"].tolist() == expected
    with pytest.raises(TypeError, match="compares 'id', which is int64"):
        Select("id > 'a'")(read_files(str(path)))


def test_text_beyond_the_samples_is_no_number(tmp_path):
    lines = [json.dumps({"id": row, "score": None}) + "\n" for row in range(40_000)]
    (tmp_path / "in.jsonl").write_text("".join(lines) + '{"id": 9, "score": "high"}\n')
    reader = FileReader(str(tmp_path / "in.jsonl"))
    with pytest.raises(TypeError, match="'score', which is large_string, with '3'"):
        run([reader, Select("score > 3"), ParquetWriter(str(tmp_path / "out"))])

"""Jobs that cut scores into buckets: numpy's for the whole recipe, resumed wherever they stop."""

import json
import re
import signal
from pathlib import Path

import dask.dataframe as dd
import job_faults as faults
import numpy as np
import pandas as pd
import pyarrow.dataset as ds
import pytest
import yaml
from click.testing import CliRunner
from distributed import Client
from job_faults import in_process

from gpuclassify import (
    AssignBuckets,
    FastTextClassifier,
    FineWebMixtralEduClassifier,
    FineWebNemotronEduClassifier,
    JsonlReader,
    ParquetReader,
    ParquetWriter,
    Pipeline,
    ScoreBuckets,
    classify,
)
from gpuclassify.commands.cli import main
from gpuclassify.jobs.report.report import report_of
from gpuclassify.jobs.stores.local import LocalStore
from gpuclassify.jobs.stores.opening import open_store
from tests.fasttext_models import WORDS

PAGE = Path(__file__).parents[2].joinpath("docs/recipes/score-buckets.md").read_text("utf-8")
PAGE_SETTINGS = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)

ROWS = 600
SCORES = ["a", "b"]
OTHER_MOMENTS = [("scores", 5), ("edges of buckets", 0), ("buckets", 0)]


@pytest.fixture
def folder(tmp_path):
    random = np.random.default_rng(5)
    frame = pd.DataFrame({"id": range(ROWS)})
    frame["text"] = [f"text {row} " + "ü" * (row % 40) for row in range(ROWS)]
    frame["language"] = random.choice(["de", "fr"], ROWS)
    frame["a"] = random.beta(0.4, 0.3, ROWS).astype(np.float32)
    frame["b"] = random.normal(size=ROWS).astype(np.float32)
    frame.loc[::7, "b"] = np.nan
    (tmp_path / "in").mkdir()
    for number in range(4):
        rows = frame.iloc[number * 150 : (number + 1) * 150]
        rows.to_parquet(tmp_path / f"in/{number}.parquet", row_group_size=50)
    return tmp_path


def numpys_buckets(scores, weights, n=20):
    """Nemotron-CC's: weighted percentiles, `numpy.digitize`; -1 without a score."""
    there = ~np.isnan(scores)
    edges = np.quantile(
        scores[there],
        np.arange(1, n) / n,
        weights=weights[there].astype(np.float64),
        method="inverted_cdf",
    )
    return np.where(there, np.digitize(scores, edges), -1)


def expected(frame, names=SCORES, **options):
    weights = frame["text"].map(lambda text: len(text.encode())).to_numpy()
    columns = {
        f"{name}_bucket": numpys_buckets(frame[name].to_numpy(), weights, **options)
        for name in names
    }
    return frame.assign(**columns, bucket=np.max([*columns.values()], axis=0))


def inputs(folder):
    return pd.read_parquet(folder / "in")


def job(folder, stages=(), part_bytes=3_000, **options):
    reader = ParquetReader(f"{folder}/in", part_bytes=part_bytes)
    writer = ParquetWriter(f"{folder}/out", partition_by="bucket", output_bytes=0)
    return AssignBuckets([reader, *stages, writer], SCORES, **options)


def result(folder, name="out"):
    found = ds.dataset(folder / name, partitioning="hive").to_table().to_pandas()
    return found.sort_values("id", ignore_index=True)


def assert_buckets(folder, wanted):
    found = result(folder)
    pd.testing.assert_frame_equal(found, wanted[found.columns], check_dtype=False)
    assert (folder / "out/_SUCCESS").exists()


def rescored(frame):
    """What `faults.with_scores` makes of it, and its buckets."""
    return expected(frame.assign(a=frame["a"] * 2, b=frame["b"] - 1))


@pytest.mark.parametrize("part_bytes", [3_000, 1 << 30])
def test_buckets_are_numpys_whatever_the_parts_and_the_reports_count_them(folder, part_bytes):
    summary = job(folder, part_bytes=part_bytes).run()
    wanted = expected(inputs(folder))
    assert_buckets(folder, wanted)
    counts = {str(k): v for k, v in wanted["bucket"].value_counts().items()}
    assert summary.columns["bucket"] == counts
    report = report_of(open_store(f"{folder}/out"))
    assert report["labels"]["bucket"] == counts
    assert {path.name for path in (folder / "out").glob("bucket=*")} == {
        f"bucket={k}" for k in counts
    }


def test_the_recipe_of_nemotron_cc_is_numpys_from_the_text_on(
    tmp_path, checkpoint, fasttext_model, monkeypatch
):
    """The settings of the recipe's page, with small models in place of the published ones."""
    monkeypatch.chdir(tmp_path)
    words = [*WORDS["hq"].split(), *WORDS["lq"].split(), "天気"]
    random = np.random.default_rng(2)
    texts = [" ".join(random.choice(words, size=random.integers(1, 12))) for _ in range(80)]
    frame = pd.DataFrame({"id": range(80), "text": texts})
    (tmp_path / "crawl").mkdir()
    frame.to_parquet("crawl/part.parquet", row_group_size=20)
    (recipe,) = [block for block in PAGE_SETTINGS if "fasttext" in block]
    settings = yaml.safe_load(recipe)
    nemotron, mixtral, quality = settings["classifiers"]
    for own in (nemotron, mixtral):
        own["model"] = str(checkpoint(own["classifier"]))
    quality["model"] = str(fasttext_model("chars"))
    Path("nemotron-cc.yaml").write_text(yaml.safe_dump(settings | {"part_size": 100}))
    done = CliRunner().invoke(main, ["buckets", "--config", "nemotron-cc.yaml", "--workers", "1"])
    assert done.exit_code == 0, done.output

    mappers = [
        FineWebNemotronEduClassifier(model=nemotron["model"]),
        FineWebMixtralEduClassifier(model=mixtral["model"]),
        FastTextClassifier(**{k: v for k, v in quality.items() if k != "classifier"}),
    ]
    names = settings["scores"]
    found = result(tmp_path, "buckets")
    np.testing.assert_allclose(found[names], classify(frame, mappers)[names], atol=1e-4)
    wanted = expected(found.drop(columns=[c for c in found if "bucket" in c]), names)
    for column in [*(f"{name}_bucket" for name in names), "bucket"]:
        assert found[column].tolist() == wanted[column].tolist()
    assert set(range(15, 20)) <= set(found["bucket"])
    scored = tmp_path / "buckets/_buckets/scored"
    assert len(list(scored.glob("part-*"))) == 0
    assert (scored / "_report/report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "done"),
    [("buckets", 7), *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHER_MOMENTS)],
)
def test_a_job_that_is_killed_goes_on_in_its_step(folder, tmp_path, monkeypatch, step, done):
    environment = {"SCORED": str(tmp_path / "scored.txt")}
    monkeypatch.setenv("SCORED", environment["SCORED"])
    stages = [faults.with_scores]
    process = in_process(faults.run_until_step, job(folder, stages), step, done, environment)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (folder / "out/_SUCCESS").exists()
    summary = job(folder, stages).run()
    assert summary.parts == 12
    assert summary.resumed_parts == (done if step == "buckets" else 0)
    assert_buckets(folder, rescored(inputs(folder)))
    assert sorted(map(int, (tmp_path / "scored.txt").read_text().split())) == [*range(ROWS)]
    assert not list((folder / "out/_buckets/scored").glob("part-*"))

    again = job(folder, stages).run()
    assert again.resumed_parts == 12
    assert len((tmp_path / "scored.txt").read_text().split()) == ROWS


@pytest.mark.parametrize("parts", [12, pytest.param(5, marks=pytest.mark.slow)])
def test_edges_that_are_damaged_are_found_anew(folder, parts):
    made = job(folder)
    made.run()
    edges = folder / "out/_buckets/edges.json"
    content = edges.read_bytes()
    edges.write_bytes(content[: len(content) // 2])
    for record in sorted((folder / "out/_gpuclassify/records").iterdir())[parts:]:
        record.unlink()
    assert made.run().resumed_parts == parts
    assert edges.read_bytes() == content
    assert_buckets(folder, expected(inputs(folder)))


def test_edges_whose_scores_are_gone_are_refused_and_made_by_starting_over(folder, monkeypatch):
    monkeypatch.setenv("SCORED", str(folder / "scored.txt"))
    made = job(folder, [faults.with_scores])
    made.run()
    edges = folder / "out/_buckets/edges.json"
    edges.write_bytes(b"{}")
    with pytest.raises(ValueError, match=r"edges.json is not what was written.*restart=True"):
        made.run()
    made.run(restart=True)
    assert_buckets(folder, rescored(inputs(folder)))


@pytest.mark.parametrize("removed", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("stages", [[], [faults.with_scores]], ids=["scores", "classifier"])
def test_a_restart_that_is_interrupted_when_it_removes_steps_goes_on(
    folder, monkeypatch, stages, removed
):
    monkeypatch.setenv("SCORED", str(folder / "scored.txt"))
    made = job(folder, stages)
    made.run()
    content = (folder / "out/_buckets/edges.json").read_bytes()
    remove = LocalStore.remove_folder

    def interrupted(store, name):
        if removed:
            remove(store, name)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LocalStore, "remove_folder", interrupted)
        made.run(restart=True)
    made.run()
    assert (folder / "out/_buckets/edges.json").read_bytes() == content
    assert_buckets(folder, rescored(inputs(folder)) if stages else expected(inputs(folder)))
    assert not list((folder / "out/_buckets").glob("scored/part-*"))


def test_edges_serve_the_next_crawl(folder, tmp_path):
    job(folder, n=10, by="language").run()
    edges = tmp_path / "out/_buckets/edges.json"
    first = result(folder)
    crawl = inputs(folder).assign(b=0.5)
    crawl.to_parquet(tmp_path / "crawl.parquet")
    reader = ParquetReader(f"{tmp_path}/crawl.parquet")
    writer = ParquetWriter(f"{tmp_path}/next", partition_by="bucket")
    Pipeline([reader, ScoreBuckets(edges), writer]).run()
    found = pd.concat(map(pd.read_parquet, (tmp_path / "next").glob("*/*.parquet")))
    found = found.sort_values("id")
    assert found["a_bucket"].tolist() == first["a_bucket"].tolist()
    assert found.groupby("language")["b_bucket"].nunique().tolist() == [1, 1]
    for language, rows in first.groupby("language"):
        own = inputs(folder)
        own = own[own["language"] == language]
        weights = own["text"].map(lambda text: len(text.encode())).to_numpy()
        wanted = numpys_buckets(own["a"].to_numpy(), weights, n=10)
        assert rows["a_bucket"].tolist() == wanted.tolist()


def test_lines_that_cannot_be_read_are_left_out_and_told_of(tmp_path):
    rows = [json.dumps({"id": n, "text": "x" * n, "a": n / 7, "b": 1.0}) for n in range(99)]
    (tmp_path / "in").mkdir()
    (tmp_path / "in/0.jsonl").write_text("\n".join([*rows[:50], "{broken", *rows[50:]]))
    reader = JsonlReader(f"{tmp_path}/in/*.jsonl", part_bytes=1_000)
    writer = ParquetWriter(f"{tmp_path}/out")
    for stages in ([], [lambda frame: frame]):
        made = AssignBuckets([reader, *stages, writer], "a", on_error="quarantine")
        for run in range(2):
            summary = made.run(restart=not run)
            assert summary.left_out == {"line": 1}
            assert summary.rows_written == 99
            (problems,) = (tmp_path / "out/_quarantine").iterdir()
            assert "{broken" in problems.read_text()


@pytest.mark.slow
def test_the_command_and_a_client(folder):
    with Client(processes=False, n_workers=1, threads_per_worker=2, dashboard_address=None) as own:
        summary = job(folder).run(own)
    assert_buckets(folder, expected(inputs(folder)))
    assert summary.rows_written == ROWS
    words = ["buckets", f"{folder}/in", f"{folder}/plain", "--score", "a", "--n", "4"]
    options = ["--weight", "none", "--field", "id", "--cluster", "cpu", "--workers", "1"]
    with pytest.raises(SystemExit) as ended:
        main([*words, *options])
    assert not ended.value.code
    found = pd.read_parquet(folder / "plain").sort_values("id")
    assert list(found) == ["id", "a", "a_bucket", "bucket"]
    wanted = numpys_buckets(inputs(folder)["a"].to_numpy(), np.ones(ROWS), n=4)
    assert found["bucket"].tolist() == wanted.tolist()


def test_mistakes_are_named_at_the_call(folder, tmp_path):
    with pytest.raises(ValueError, match=r"no column 'c'; columns are"):
        AssignBuckets(job(folder).stages, "c").prepare()
    with pytest.raises(
        ValueError, match=r"no column 'langage'; columns are .* Did you mean 'language'"
    ):
        job(folder, by="langage").prepare()
    with pytest.raises(TypeError, match="weight='a' holds float32: weights are whole"):
        job(folder, weight="a").prepare()
    with pytest.raises(ValueError, match="bucket_field='a_bucket' is the bucket of one score"):
        job(folder, bucket_field="a_bucket")
    with pytest.raises(TypeError, match="unexpected keyword argument 'bucket'"):
        job(folder, bucket="x")
    frame = dd.from_pandas(inputs(folder), npartitions=2)
    with pytest.raises(TypeError, match=r"begins with a DataFrame.* score_edges\(\)"):
        AssignBuckets([frame, ParquetWriter(f"{tmp_path}/out")], "a").prepare()
    assert not (tmp_path / "out").exists()
    empty = inputs(folder).assign(a=np.nan)
    empty.to_parquet(tmp_path / "empty.parquet")
    stages = [ParquetReader(f"{tmp_path}/empty.parquet"), ParquetWriter(f"{tmp_path}/out")]
    with pytest.raises(ValueError, match=r"\['a'\] have no scores"):
        AssignBuckets(stages, "a").run()

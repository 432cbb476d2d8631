"""Columns, filters and refusals of fastText's classifiers, alone, in chains, jobs and commands."""

import json

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from distributed import Client

from gpuclassify import (
    FastTextClassifier,
    LanguageIdentifier,
    ParquetReader,
    ParquetWriter,
    Pipeline,
    classify,
)
from gpuclassify.commands.classify import classify as classify_command
from gpuclassify.commands.plan import plan
from gpuclassify.commands.preview import preview
from gpuclassify.models.checkpoint import CheckpointError

FRAME = pd.DataFrame(
    {"text": ["theorem proof", None, "click buy free", "größer Straße", "proof buy", ""]},
    index=list("abcdef"),
)


@pytest.fixture
def quality(fasttext_model):
    def make(**options):
        settings = {"score_label": "__label__hq", "score_field": "hq"}
        return FastTextClassifier(model=fasttext_model("chars"), **settings | options)

    return make


def test_labels_keep_their_prefix_and_languages_lose_it(fasttext_model):
    path = fasttext_model("chars")
    labels = FastTextClassifier(model=path).labels
    assert set(labels) == {"__label__hq", "__label__lq", "__label__de"}
    assert LanguageIdentifier(model=path).labels == [label[len("__label__") :] for label in labels]
    found = LanguageIdentifier(model=path)(FRAME)
    assert list(found.columns) == ["text", "language", "language_confidence"]
    assert found["language"].tolist()[:4:2] == ["hq", "lq"]


def test_filters_drop_rows_by_label_confidence_and_score(quality):
    found = quality(confidence_field="sure")(FRAME)
    texts = found.dropna()
    assert quality(filter_by="__label__hq")(FRAME).index.tolist() == [
        *texts.index[texts["fasttext_pred"] == "__label__hq"]
    ]
    for option, column in (("min_confidence", "sure"), ("min_score", "hq")):
        least = float(texts[column].iloc[0])  # which it reaches itself
        kept = quality(**{option: least})(FRAME)
        assert kept.index.tolist() == [*texts.index[texts[column] >= np.float32(least)]]
        marked = quality(**{option: least}, keep_field="keep")(FRAME)
        assert marked.index[marked["keep"]].tolist() == kept.index.tolist()
        assert 0 < len(kept) < len(FRAME)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"score_label": "__label__hg", "score_field": "s"}, ValueError, "mean '__label__hq'"),
        ({"filter_by": "hq"}, ValueError, "no label 'hq'.* Labels are __label__"),
        ({"top_k": 4}, CheckpointError, "has 3 labels: pass at most 3"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused_before_any_work(
    fasttext_model, settings, error, message
):
    classifier = FastTextClassifier(model=fasttext_model("chars"), **settings)
    with pytest.raises(error, match=message):
        classifier(dd.from_pandas(FRAME.reset_index(drop=True), npartitions=2))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"score_field": "s"}, ValueError, "pass score_label="),
        ({"min_score": 0.5}, ValueError, "pass score_label="),
        ({"score_label": "__label__hq"}, ValueError, "no column to fill and no filter"),
        ({"min_confidence": 2}, ValueError, "not from 0 to 1"),
        ({"min_score": {"a": 1}, "score_label": "a"}, TypeError, "pass a number"),
        ({"top_k": 0}, ValueError, "at least 1"),
        ({"device": "cpu"}, TypeError, "no argument 'device'"),
        ({"keep_field": "keep"}, ValueError, "no decision to write"),
        ({"line_labels_field": "l"}, ValueError, 'pass long_text="lines" with it'),
        ({"label_shares_field": "s"}, ValueError, 'pass long_text="lines" with it'),
        ({"long_text": "lines", "top_k": 2}, ValueError, "pass label_shares_field="),
        ({"long_text": "windows"}, ValueError, "one of 'whole', 'lines'"),
    ],
)
def test_settings_without_a_meaning_are_refused_at_once(settings, error, message):
    with pytest.raises(error, match=message):
        FastTextClassifier(model="owner/model", **settings)


def test_the_client_reads_no_model_and_loads_no_torch(run_python, fasttext_model):
    out = run_python(f"""
import sys
import dask.dataframe as dd, pandas as pd
from gpuclassify import FastTextClassifier
ddf = dd.from_pandas(pd.DataFrame({{"text": ["buy", "proof"]}}), npartitions=1)
lazy = FastTextClassifier(model={str(fasttext_model("chars"))!r}, top_k=2)(ddf)
planned = {{"torch", "transformers", "fasttext", "fasttext_pybind"}} & set(sys.modules)
lazy.compute(scheduler="sync")
print(planned, {{"torch", "fasttext", "fasttext_pybind"}} & set(sys.modules))
""")
    assert out.split() == ["set()", "set()"]


def test_a_chain_with_a_network_drops_rows_before_it(fasttext_model, domain):
    language = LanguageIdentifier(model=fasttext_model("chars"), filter_by=["de", "lq"])
    chain = classify(FRAME, [language, domain()])
    expected = language(FRAME)
    assert chain.index.tolist() == expected.index.tolist()
    assert list(chain.columns) == [*expected.columns, "domain_pred"]


@pytest.fixture
def documents(tmp_path):
    texts = ["theorem proof", None, "click buy free", "größer Straße"] * 25
    for part in range(4):
        frame = pd.DataFrame({"id": range(100 * part, 100 * part + 100), "text": texts})
        frame.to_parquet(tmp_path / f"{part}.parquet")
    return tmp_path


@pytest.mark.slow
def test_a_job_on_workers_goes_on_where_it_stopped(documents, quality):
    with Client(n_workers=2, threads_per_worker=2, dashboard_address=None) as client:

        def job(pattern):
            reader = ParquetReader(f"{documents}/{pattern}.parquet")
            return Pipeline([reader, quality(top_k=2), ParquetWriter(f"{documents}/out")])

        summary = job("[0-3]").run(client)
        assert (summary.rows_read, summary.rows_written) == (400, 400)
        again = job("[0-3]").run(client)
        assert again.resumed_parts == 4
    found = pd.read_parquet(documents / "out").sort_values("id")
    expected = quality(top_k=2)(pd.read_parquet(sorted(documents.glob("[0-3].parquet"))))
    assert found["fasttext_pred"].isna().sum() == 100
    np.testing.assert_array_equal(found["hq"], expected["hq"])
    assert [*map(list, found["top_labels"].dropna())] == [
        *map(list, expected["top_labels"].dropna())
    ]


def run(command, *arguments):
    done = CliRunner().invoke(command, [*map(str, arguments)], obj={"debug": False})
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.slow
def test_preview_plan_and_classify_take_fasttext_beside_networks(
    documents, fasttext_model, checkpoint
):
    path = fasttext_model("chars")
    chain = ["--classifier", "language", "--model", f"language:{path}", "--classifier", "domain"]
    chain += ["--model", f"domain:{checkpoint('domain')}", "--device", "cpu"]
    source = documents / "0.parquet"
    shown = [json.loads(line) for line in run(preview, source, *chain, "--json").splitlines()]
    assert {row["language"] for row in shown} == {"hq", "lq", "de", None}
    told = json.loads(run(plan, source, *chain, "--json"))
    first, second = told["classifiers"]
    assert (first["limit_tokens"], second["limit_tokens"]) == (None, 512)
    assert first["weights_bytes"] == path.stat().st_size
    assert first["tokens"] == pytest.approx(25 * (2 + 3 + 2))
    assert "no limit" in run(plan, source, "--classifier", "language", "--model", path)
    options = ["--set", "score_label=__label__hq", "--score-field", "hq", "--min-score", "0.5"]
    options += ["--classifier", "fasttext", "--model", path, "--cluster", "cpu", "--json"]
    summary = json.loads(run(classify_command, source, documents / "out", *options))
    kept = pd.read_parquet(documents / "out")
    assert summary["rows_written"] == len(kept) == 25
    assert (kept["text"] == "theorem proof").all()

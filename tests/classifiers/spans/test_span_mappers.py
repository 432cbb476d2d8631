"""Columns, filters and redaction of span mappers, and what runs them: chains, jobs, pages."""

import json

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from gpuclassify import (
    JsonlReader,
    ParquetWriter,
    PatternSpans,
    Pipeline,
    Route,
    SpanClassifier,
    classify,
    compare,
    merge_spans,
)
from gpuclassify.classifiers.spans.spans import SPANS
from gpuclassify.workers.run_context import collected_stats
from tests.classifiers.spans.test_token_classifiers import (
    HARD,
    assert_equal_spans,
    generated,
    rows_of,
)
from tests.replicas import sample_texts

pytestmark = pytest.mark.usefixtures("one_torch_thread")
TEXTS = [*sample_texts(30, seed=9, max_words=40), *HARD, None, "twice", "twice"]


@pytest.fixture
def spans(token_classifier):
    """Makes a SpanClassifier of a small model, with these options."""

    def make(architecture="bert", **options):
        model = options.pop("model", None) or token_classifier(architecture)
        return SpanClassifier(**{"model": model, "autocast": False, **options})

    return make


def test_columns_follow_from_the_spans_that_count(spans):
    every = spans()(TEXTS)["spans"]
    options = {"count_field": "n", "share_field": "share", "redact": "<{label}>"}
    for kept in ({"labels": ["PER"]}, {"min_score": 0.6}, {"min_score": {"LOC": 0.7}}):
        found = spans(**kept, **options)(TEXTS)
        least = kept.get("min_score", 0)
        for text, all_spans, row in zip(TEXTS, every, found.to_dict("records"), strict=True):
            if text is None:
                assert pd.isna([row[name] for name in ("spans", "n", "share", "redacted")]).all()
                continue
            expected = [
                span
                for span in all_spans
                if span["label"] in kept.get("labels", ["PER", "LOC"])
                and span["score"]
                >= (least.get(span["label"], 0) if isinstance(least, dict) else least)
            ]
            assert list(row["spans"]) == expected
            assert row["n"] == len(expected)
            inside = {n for s in expected for n in range(s["start"], s["end"])}
            assert row["share"] == np.float32(len(inside) / max(1, len(text)))
            assert row["redacted"].count("<PER>") + row["redacted"].count("<LOC>") == len(expected)


def test_outside_spans_a_redacted_text_is_the_same_to_the_byte(spans):
    texts = [*TEXTS, *generated(300, seed=4)]
    for aggregation in ("simple", "first", "none"):
        mapper = spans("roberta", aggregation=aggregation, redact="\u241f")
        for text, row in zip(texts, mapper(texts).to_dict("records"), strict=True):
            if text is None:
                continue
            inside = {n for s in row["spans"] for n in range(s["start"], s["end"])}
            outside = "".join(char for n, char in enumerate(text) if n not in inside)
            assert row["redacted"].replace("\u241f", "") == outside


def test_spans_of_a_text_that_is_null_redact_nothing():
    rows = [[{"start": 0, "end": 1, "label": "PER", "score": 1.0}]] * 2
    frame = pd.DataFrame({"text": ["ab", None], "spans": pd.array(rows, pd.ArrowDtype(SPANS))})
    merged = merge_spans(["spans"], redact="[{label}]", redacted_field="clean")(frame)
    assert merged["clean"].tolist()[0] == "[PER]b"
    assert pd.isna(merged["clean"].iloc[1])


def test_a_function_of_text_and_label_redacts(spans):
    found = spans(redact=lambda text, label: f"{label}{len(text)}")(["some text of several words"])
    pieces, reached = [], 0
    for span in found["spans"][0]:
        pieces += ["some text of several words"[reached : span["start"]]]
        pieces += [f"{span['label']}{span['end'] - span['start']}"]
        reached = span["end"]
    assert found["redacted"][0] == "".join(pieces) + "some text of several words"[reached:]


def test_a_function_is_known_by_its_code_in_every_process(run_python, tmp_path):
    probe = """
import json
import dask.dataframe as dd, pandas as pd
from gpuclassify import PatternSpans, merge_spans

ddf = dd.from_pandas(pd.DataFrame({"text": ["a@b.co"]}), npartitions=1)
def redact(text, label):
    return f"<{label}>"
mapper = PatternSpans(redact=redact)
merged = merge_spans(["pattern_spans"], redact=redact, redacted_field="r")
found = merged(mapper(ddf))
print(found._name, json.dumps([mapper.describe(), merged.describe()]), found.compute()["r"][0])
"""
    one, other = run_python(probe), run_python(f"\n\n\n{probe}")
    assert one == other
    assert one.split()[-1] == "<email>"
    assert run_python(probe.replace("<{label}>", "({label})")).split()[0] != one.split()[0]


def test_filters_drop_rows_or_write_their_decision(spans):
    whole = spans(count_field="n", share_field="share")(TEXTS)
    wanted = ((whole["n"] >= 2) & (whole["share"] <= 0.5)).fillna(False)
    assert 0 < wanted.sum() < len(wanted) - 3
    options = {"min_spans": 2, "max_span_share": 0.5}
    assert spans(**options)(TEXTS)["text"].tolist() == whole["text"][wanted].tolist()
    assert spans(keep_field="keep", **options)(TEXTS)["keep"].tolist() == wanted.tolist()


def test_settings_without_a_meaning_are_refused(spans):
    for options, words in (
        ({"long_text": "lines"}, 'long_text="lines" is for scores of texts'),
        ({"long_text": "ends"}, 'long_text="ends" is for scores of texts'),
        ({"window_aggregation": "max"}, "window_aggregation='max' has no meaning for spans"),
        ({"base_model": "a/b"}, "base_model='a/b' has no meaning for spans"),
        ({"text_template": "{text}!"}, "makes a text that no column has"),
        ({"text_field": ["a", "b"]}, "another mapper for the other one"),
        ({"aggregation": "mean"}, "aggregation='mean' is not one of"),
        ({"min_spans": -1}, "min_spans=-1 must be at least 0"),
        ({"max_span_share": 2}, "max_span_share=2 is not from 0 to 1"),
        ({"keep_field": "k"}, "pass min_spans or max_span_share with it"),
    ):
        with pytest.raises(ValueError, match=words):
            spans(**options)
    with pytest.raises(ValueError, match=r"no label 'PRE' in SpanClassifier.*Did you mean 'PER'"):
        spans(labels=["PRE"])(["a"])
    with pytest.raises(ValueError, match="no label 'ORG'"):
        spans(min_score={"ORG": 0.5})(["a"])


def test_only_texts_with_spans_are_tokenized_again(spans, token_classifier, monkeypatch):
    from gpuclassify.classifiers.spans.token_runner import _WindowedTokens

    mapper, seen = spans(model=token_classifier(outside=3.0)), []
    every = _WindowedTokens._spans

    def note(self, texts, places):
        seen.extend(texts)
        return every(self, texts, places)

    monkeypatch.setattr(_WindowedTokens, "_spans", note)
    found = mapper(sample_texts(40, seed=1))
    with_spans = [row["text"] for row in found.to_dict("records") if len(row["spans"])]
    assert 0 < len(with_spans) < 40
    assert set(with_spans) <= set(seen)
    assert len(seen) < 40


def test_other_columns_are_computed_without_the_model(spans):
    mapper = spans(redact="[{label}]")
    ddf = dd.from_pandas(pd.DataFrame({"text": TEXTS, "n": range(len(TEXTS))}), npartitions=3)
    lazy = mapper(ddf)
    mapper.teardown()
    assert lazy[["n"]].compute()["n"].tolist() == list(range(len(TEXTS)))
    assert not mapper.runner.is_loaded
    assert lazy["redacted"].compute().notna().sum() == len(TEXTS) - 1


def test_heads_on_one_trunk_run_it_once(spans, token_classifier, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    first, second = token_classifier("bert"), tmp_path / "second"
    shutil.copytree(first, second)
    tensors = load_file(second / "model.safetensors")
    tensors["classifier.weight"] = tensors["classifier.weight"].flip(0)
    save_file(tensors, second / "model.safetensors", metadata={"format": "pt"})
    for aggregation in ("simple", "average"):
        mappers = [
            spans(
                model=str(model),
                aggregation=aggregation,
                spans_field=f"s{number}",
                max_seq_length=64,
            )
            for number, model in enumerate((first, second))
        ]
        alone = [mapper(TEXTS)[f"s{n}"].dropna() for n, mapper in enumerate(mappers)]
        with collected_stats() as runs:
            together = classify(pd.DataFrame({"text": TEXTS}), mappers)
        assert runs[0].peak_sharing == [2, 2, 2]
        assert runs[1].batches == 0
        for number, expected in enumerate(alone):
            assert_equal_spans(rows_of(together[f"s{number}"].dropna()), rows_of(expected))
    # What one keeps of a token is not what the other one needs.
    mixed = [spans(spans_field="a"), spans(spans_field="b", aggregation="average")]
    found = classify(pd.DataFrame({"text": TEXTS}), mixed)
    assert_equal_spans(rows_of(found["b"].dropna()), rows_of(mixed[1](TEXTS)["b"].dropna()))


def test_a_route_of_span_mappers(spans, token_classifier):
    mappers = {"a": spans(), "b": spans("roberta")}
    frame = pd.DataFrame({"text": TEXTS, "kind": ["a", "b", None] * 16 + ["a"] * (len(TEXTS) - 48)})
    found = Route(by="kind", to=mappers)(frame)
    for kind, mapper in mappers.items():
        rows = (frame["kind"] == kind) & frame["text"].notna()
        assert_equal_spans(rows_of(found["spans"][rows]), rows_of(mapper(frame[rows])["spans"]))
    assert found["spans"][frame["kind"].isna()].isna().all()


def test_spans_are_compared(spans):
    comparison = compare(TEXTS, spans(), spans(min_score=0.6))
    assert 0 < comparison.changed_labels < 1
    assert comparison.largest_difference == 0
    assert set(comparison.agreement) == {"PER", "LOC"}
    assert all(0 < share < 1 for _, share in comparison.agreement.values())
    assert compare(TEXTS, spans(), spans(engine="padded")).changed_labels == 0
    assert comparison.moved["label_a"].str.contains("PER [0-9]+:[0-9]+").any()


def test_a_job_writes_spans_and_reports_them(spans, tmp_path):
    hostile = "<script>alert('x')</script> \ue000<b>&amp;\u202e joe@example.com </b>"
    texts = [*TEXTS[:30], hostile, None]
    lines = [json.dumps({"text": text}) for text in texts]
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    mapper = spans(redact="[{label}]", min_spans=1)
    merged = merge_spans(["pattern_spans", "spans"], redact="#", redacted_field="clean")
    mappers = [PatternSpans(), mapper, merged]
    summary = Pipeline([JsonlReader(str(file)), *mappers, ParquetWriter(tmp_path / "out")]).run()
    table = pq.read_table(tmp_path / "out").to_pandas()
    expected = mapper(PatternSpans()(pd.DataFrame({"text": pd.Series(texts, dtype="str")})))
    assert len(table) == summary.rows_written == len(expected)
    assert_equal_spans(rows_of(table["spans"]), rows_of(expected["spans"]))
    assert table["redacted"].tolist() == expected["redacted"].tolist()
    report = json.loads((tmp_path / "out/_report/report.json").read_text("utf-8"))
    every = spans()(texts)["spans"].dropna()
    counts = pd.Series([span["label"] for row in every for span in row]).value_counts()
    chars = sum(map(len, filter(None, texts)))
    own = pd.Series([label for row in every for label in {span["label"] for span in row}])
    assert report["spans"]["spans"] == {
        **{"chars": chars, "labelled": len(every)},
        **{"spans": counts.to_dict(), "labels": own.value_counts().to_dict()},
    }
    assert report["spans"]["pattern_spans"]["labels"] == {"email": 1}
    assert report["stages"]["SpanClassifier"]["dropped"]["spans"] >= 0
    page = (tmp_path / "out/_report/report.html").read_text("utf-8")
    assert "with too few spans" in page
    assert "Spans: spans" in page and "spans per thousand characters" in page
    assert f"{1000 * counts['PER'] / chars:.3g}" in page
    assert "<mark>joe@example.com</mark>" in page
    assert "<script>alert" not in page and "&lt;script&gt;" in page
    assert page.count("<mark>") == page.count("</mark>")


def test_a_client_without_the_model_plans_with_labels(monkeypatch):
    ddf = dd.from_pandas(pd.DataFrame({"text": ["a"]}), npartitions=1)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    mapper = SpanClassifier(model="no/where", revision="0" * 40, labels=["PER"], redact="x")
    assert mapper(ddf).columns.tolist() == ["text", "spans", "redacted"]


def test_preview_shows_spans(spans, tmp_path, token_classifier):
    from click.testing import CliRunner

    from gpuclassify.commands.cli import main

    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps({"text": "write to joe@example.com\x1b[31m now"}), encoding="utf-8")
    result = CliRunner().invoke(main, ["preview", str(file), "--classifier", "patterns"])
    assert result.exit_code == 0, result.output
    assert "email joe@example.com" in result.output
    assert "\x1b[31m" not in result.output
    options = ["--classifier", "spans", "--model", token_classifier(), "--labels", "PER"]
    result = CliRunner().invoke(main, ["preview", str(file), *options])
    assert result.exit_code == 0, result.output
    assert "PER " in result.output


def test_spans_in_colour_keep_the_text():
    import pyarrow as pa

    from gpuclassify.commands.preview import _coloured, _span_cells

    text = "a\tjoe@example.com \x00 and 8.8.8.8 🙂"
    found = PatternSpans()([text, None])
    table = pa.Table.from_pandas(found)
    line, null = _coloured(table, "text", ["pattern_spans"], 100)
    coloured = [line.plain[span.start : span.end] for span in line.spans]
    assert coloured == ["joe@example.com", "8.8.8.8"]
    assert line.plain == "a\\tjoe@example.com \\x00 and 8.8.8.8 🙂"
    assert null.plain == "null"
    cells = _span_cells(table, "text", "pattern_spans", 100)
    assert cells == ["email joe@example.com, ip 8.8.8.8", "null"]

"""text_template: texts made of several columns, held against texts that are filled by hand."""

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from gpuclassify import DistributedDataClassifier, DomainClassifier, Embedder, SemanticDuplicates
from gpuclassify.commands.cli import main
from gpuclassify.commands.settings import JobSettings, load_settings
from gpuclassify.settings.options import fill_template, template_fields
from gpuclassify.workers.run_context import collected_stats
from tests.oracle import assert_close, plain_tokenizer, probabilities, raw_outputs, stacked
from tests.replicas import sample_texts

pytestmark = pytest.mark.usefixtures("one_torch_thread")
TEMPLATE = "{url}\n\n{text}"
URLS = [*(f"https://site{n % 3}.org/{n}" for n in range(8)), None, "", "u", "u"]
TEXTS = [*sample_texts(8, max_words=30), "no url", "empty url", None, ""]
FRAME = pd.DataFrame({"id": range(12), "url": URLS, "text": TEXTS})
FILLED = [f"{url or ''}\n\n{text}" for url, text in zip(URLS, TEXTS, strict=True)]
IS_TEXT = FRAME["text"].notna().to_numpy()


@pytest.fixture
def classifier(sequence_classifier):
    def make(**options):
        settings = {"text_template": TEMPLATE, "score_field": "s", "autocast": False}
        return DistributedDataClassifier(
            model=sequence_classifier("bert"), **{**settings, **options}
        )

    return make


@pytest.fixture
def expected(sequence_classifier):
    """Scores of the rows with a text, by transformers, for texts cut to so many characters."""

    def score(max_chars=None):
        texts = [text[:max_chars] for text, is_text in zip(FILLED, IS_TEXT, strict=True) if is_text]
        return probabilities(raw_outputs(sequence_classifier("bert"), texts))

    return score


@pytest.mark.parametrize("max_chars", [None, 40])
@pytest.mark.parametrize("npartitions", [1, 5])
def test_the_model_reads_the_filled_template(classifier, expected, frames, max_chars, npartitions):
    mapper = classifier(max_chars=max_chars)
    found = frames.to_pandas(mapper(frames.lazy(FRAME, npartitions=npartitions)))

    assert_close(stacked(found["s"][IS_TEXT]), expected(max_chars))
    assert found["s"].isna().tolist() == (~IS_TEXT).tolist()
    assert found["text"].dropna().tolist() == FRAME["text"].dropna().tolist()
    assert found["url"].dropna().tolist() == FRAME["url"].dropna().tolist()
    assert mapper.text_fields == ("url", "text")


def test_filling_is_that_of_format():
    values = {"a.b": ["1 %s", None, "3", None], "text": ["{x}", "y", None, ""]}
    template = "100% {{of}} {a.b}{text}{a.b} %s"
    assert template_fields(template) == ("a.b", "text")
    assert fill_template(template, values, "text") == [
        "100% {of} 1 %s{x}1 %s %s",
        "100% {of} y %s",
        None,
        "100% {of}  %s",
    ]


def test_equal_texts_of_different_columns_are_run_apart(classifier):
    frame = pd.DataFrame({"url": ["a", "b", "a", None, ""], "text": ["t"] * 5})
    with collected_stats() as runs:
        found = classifier()(frame)
    assert runs[-1].folded_rows == 2
    scores = stacked(found["s"])
    assert (scores[0] == scores[2]).all() and (scores[3] == scores[4]).all()
    assert np.abs(scores[0] - scores[1]).max() > 0


def test_an_embedders_prompt_stands_before_the_filled_text(sequence_classifier):
    def embed(frame, **options):
        model = sequence_classifier("roberta")
        return stacked(Embedder(model=model, pooling="mean", **options)(frame)["embedding"])

    rows = FRAME[IS_TEXT]
    by_hand = pd.DataFrame({"text": [f"query: {FILLED[row]}" for row in rows.index]})
    assert_close(embed(rows, text_template=TEMPLATE, prompt="query: "), embed(by_hand))


def test_only_the_templates_columns_are_read(classifier, tmp_path):
    FRAME.assign(other="x").to_parquet(tmp_path / "in.parquet")
    lazy = classifier()(dd.read_parquet(tmp_path / "in.parquet"))["s"]
    nodes = lazy.simplify().expr.walk()
    read = {tuple(node.columns) for node in nodes if "ReadParquet" in type(node).__name__}
    assert read == {("url", "text")}
    assert_close(stacked(lazy.compute()[IS_TEXT]), stacked(classifier()(FRAME)["s"][IS_TEXT]))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{url} {txt}", r"has no \{text\}"),
        ("{text", "brace of its own"),
        ("text}", "brace of its own"),
        ("{}{text}", "more or less than a name"),
        ("{text:>9}", "more or less than a name"),
        ("{text!r}", "more or less than a name"),
        ("no column", r"has no \{text\}"),
    ],
)
def test_templates_without_a_meaning_are_refused(template, message):
    with pytest.raises(ValueError, match=message):
        DomainClassifier(text_template=template)


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        ("{urll} {text}", ValueError, r"no text column 'urll'.*mean 'url'\? Pass text_template="),
        ("{0} {text}", ValueError, "no text column '0'"),
        ("{url.host} {text}", ValueError, "no text column 'url.host'"),
        ("{id} {text}", TypeError, r"column 'id' holds int64, not strings: .*astype"),
    ],
)
def test_columns_that_are_not_there_or_no_strings_are_refused_at_the_call(
    classifier, frames, template, error, message
):
    with pytest.raises(error, match=message):
        classifier(text_template=template)(frames.lazy(FRAME))


def test_a_text_alone_is_not_taken_for_every_column(classifier):
    with pytest.raises(ValueError, match="no text column 'url'; columns are \\['text'\\]"):
        classifier()(["a text"])


def test_what_cannot_read_several_columns_says_so(classifier):
    with pytest.raises(ValueError, match="the embedder reads 'url', 'text' and text_field"):
        SemanticDuplicates(embedder=Embedder(text_template=TEMPLATE))


def test_jobs_and_plans_read_the_templates_columns(classifier, expected, tmp_path):
    FRAME.assign(other="x").to_json(tmp_path / "in.jsonl", orient="records", lines=True)
    words = [
        *("classify", str(tmp_path / "in.jsonl"), str(tmp_path / "out"), "--field", "id"),
        *("--classifier", "checkpoint", "--model", classifier().options.model),
        *("--text-template", r"{url}\n\n{text}", "--score-field", "s", "--set", "autocast=false"),
        *("--dump-config", str(tmp_path / "job.yaml")),
    ]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    pipeline = JobSettings.of(load_settings(tmp_path / "job.yaml")).job()

    pipeline.run()
    found = pq.read_table(tmp_path / "out").to_pandas().sort_values("id")
    assert list(found.columns) == ["url", "text", "id", "preds", "s"]
    assert_close(stacked(found["s"][IS_TEXT]), expected())

    tokens = plain_tokenizer(classifier().options.model)
    texts = [text for text, is_text in zip(FILLED, IS_TEXT, strict=True) if is_text]
    (plan,) = pipeline.plan(trial_seconds=None).classifiers
    assert plan.tokens == sum(map(len, tokens(texts)["input_ids"]))

"""`gpuclassify evaluate` judges a saved head by files, as scikit-learn would."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from sklearn import metrics

from gpuclassify import Head, HeadClassifier
from gpuclassify.commands.cli import main
from tests.replicas.annotated import MINILM, annotated_texts


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads") / "topic"
    trained = Head.fit(annotated_texts(150), label_field="topic", backbone=MINILM)
    return trained.save(folder)


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """Other texts, of which a fifth have labels by chance."""
    monkeypatch.chdir(tmp_path)
    frame = annotated_texts(100, seed=9).drop(columns="labels")
    frame.loc[::5, "topic"] = np.random.default_rng(0).permutation(frame.topic[::5])
    frame.rename(columns={"topic": "kind"}).to_json("fresh.jsonl", orient="records", lines=True)
    return frame


def run(*arguments):
    return CliRunner().invoke(main, ["evaluate", *map(str, arguments)])


def test_a_saved_head_is_judged_by_files(head, fresh, tmp_path):
    options = ("--label-field", "kind", "--embeddings", "kept", "--workers", 1)
    done = run(head, "fresh.jsonl", *options, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    given = HeadClassifier(heads={"x": head})(fresh).x_pred
    assert found["rows"] == 100
    assert found["summary"]["accuracy"] == metrics.accuracy_score(fresh.topic, given)
    assert found["summary"]["macro_f1"] == pytest.approx(
        metrics.f1_score(fresh.topic, given, average="macro")
    )
    low, high = found["intervals"]["accuracy"]
    assert low < found["summary"]["accuracy"] < high
    assert found["baseline"] == {"accuracy": fresh.topic.value_counts().max() / 100}

    done = run(head, "fresh.jsonl", *options, "--group", "host", "--page", "page.html")
    assert "100 annotated texts.\n" in done.output
    assert f"accuracy        {found['summary']['accuracy']:.3f}" in done.output
    assert "Caution: 100 annotated texts are few" in done.output
    assert "Page: page.html" in done.output
    assert "Annotate 300 more" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fresh.jsonl", "fresh.jsonl"), "fresh.jsonl has no training.json"),
        (("HEAD", "none.jsonl"), "none.jsonl"),
        (("HEAD", "fresh.jsonl"), "topic"),
        (("HEAD", "fresh.jsonl", "--page", "none/page.html"), "make its directory first"),
    ],
)
def test_a_wrong_call_starts_nothing(head, fresh, arguments, message):
    done = run(*(head if each == "HEAD" else each for each in arguments))
    assert done.exit_code == 2, done.output
    assert message in done.output

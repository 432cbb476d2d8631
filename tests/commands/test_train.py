"""`gpuclassify train` does what Head.fit does, and says how good the head is."""

import json

import pytest
from click.testing import CliRunner

from gpuclassify import Head, HeadClassifier
from gpuclassify.commands.cli import main
from tests.oracle import assert_close
from tests.replicas.annotated import MINILM, annotated_texts


@pytest.fixture(scope="module")
def annotated():
    return annotated_texts(240)


@pytest.fixture
def run(annotated, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frame = annotated.drop(columns="labels")
    frame.loc[:4, "topic"] = None
    frame.to_json("annotated.jsonl", orient="records", lines=True)
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert/config.json").write_text(json.dumps({"model_type": "bert"}))

    def run(*arguments):
        return CliRunner().invoke(main, ["train", *map(str, arguments)])

    return run


@pytest.mark.slow
def test_a_head_is_trained_on_files(run, annotated, tmp_path):
    options = ("--label-field", "topic", "--backbone", MINILM, "--group", "host", "--seed", 3)
    done = run("annotated.jsonl", "head", *options, "--workers", 1)
    assert done.exit_code == 0, done.output
    head = Head.load("head")
    assert str(head.evaluation) in done.output
    held_out = head.record["data"]["test"]
    assert f"{held_out} texts are too few for an evaluation" in done.output
    assert "5 rows without a text or a label left out" in done.output
    assert "Page: head/evaluation.html" in done.output
    assert (tmp_path / "head/evaluation.html").exists()
    expected = Head.fit(annotated[5:], label_field="topic", backbone=MINILM, group="host", seed=3)
    for name, tensor in expected.network.tensors().items():
        assert_close(head.network.tensors()[name], tensor, 2e-2)
    result = HeadClassifier(heads={"topic": "head"}, overwrite=True)(annotated)
    assert (result.topic_pred == annotated.topic).mean() > 0.9

    done = run("annotated.jsonl", "head", *options, "--workers", 1, "--json")
    assert json.loads(done.stdout)["summary"] == head.evaluation.summary

    more = ("--class-weight", "sport=3", "--class-weight", "money=2", "--validation")
    done = run("annotated.jsonl", "head", *options, "--workers", 1, *more, "annotated.jsonl")
    assert done.exit_code == 0, done.output
    record = Head.load("head").record
    assert record["settings"]["class_weight"] == {"sport": 3.0, "money": 2.0}
    assert record["data"]["validation"] == 235


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("annotated.jsonl",), "name the annotated files, and then the head's directory"),
        (("none.jsonl", "head"), "none.jsonl"),
        (("annotated.jsonl", "annotated.jsonl/head"), "is a file"),
        (("annotated.jsonl", "bert"), "bert holds another model"),
        (("annotated.jsonl", "bert", "--kind", "pooler"), "bert holds another model"),
        (("annotated.jsonl", "head", "--label-field", "tpoic"), "tpoic"),
        (("annotated.jsonl", "head", "--kind", "svm"), "'svm' is not one of"),
        (("annotated.jsonl", "head", "--class-weight", "spam"), "LABEL=NUMBER"),
        (("annotated.jsonl", "head", "--validation", "none.jsonl"), "none.jsonl"),
    ],
)
def test_a_wrong_call_starts_nothing(run, tmp_path, arguments, message):
    done = run("--label-field", "topic", "--backbone", MINILM, *arguments)
    assert done.exit_code == 2
    assert message in done.output
    assert not (tmp_path / "head").exists()

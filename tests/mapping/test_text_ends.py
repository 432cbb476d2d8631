"""long_text="ends": head and tail of a text, held against parts that are cut by hand."""

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from gpuclassify import (
    AegisClassifier,
    DistributedDataClassifier,
    DomainClassifier,
    FineWebEduClassifier,
    classify,
)
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.workers.run_context import collected_stats
from tests.loaders import LOADERS
from tests.oracle import assert_close, plain_tokenizer, probabilities, stacked
from tests.replicas import sample_texts

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SIZE, CHARS = 24, 90
LONG = sample_texts(9, seed=3, min_words=60, max_words=150)
TEXTS = [
    *("", "short", *sample_texts(6, seed=4, max_words=8), *LONG),
    *(LONG[0][:CHARS], LONG[0][: CHARS + 1], LONG[0][: 2 * CHARS], LONG[0][: 2 * CHARS + 1]),
    "天" * 200,
]
FRAME = pd.DataFrame({"text": [*TEXTS, None, TEXTS[-2]]})
ROWS = [*range(len(TEXTS)), None, len(TEXTS) - 2]
IS_TEXT = FRAME["text"].notna().to_numpy()


def parts_of(directory, text):
    """The ids of each part that is read, and how many tokens the whole text has."""
    head = plain_tokenizer(directory)
    tail = plain_tokenizer(directory, truncation_side="left")
    cut = {"truncation": True, "max_length": SIZE}
    parts = [head(text[:CHARS], **cut)["input_ids"]]
    if len(text) > 2 * CHARS:
        parts.append(tail(text[-CHARS:], **cut)["input_ids"])
    special = head.num_special_tokens_to_add()
    return parts, len(head(text)["input_ids"]) + (len(parts) - 1) * special


def outputs_of(directory, text):
    """Logits of each part, by plain transformers one part at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    with torch.inference_mode():
        parts, _ = parts_of(directory, text)
        return np.stack([model(torch.tensor([ids])).logits[0].numpy() for ids in parts])


def at_ends(model, **options):
    settings = {"max_seq_length": SIZE, "end_chars": CHARS, "autocast": False, **options}
    return DistributedDataClassifier(model=model, long_text="ends", **settings)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("how", ["mean", "max", "first"])
@pytest.mark.parametrize("seen_field", [None, "seen"])
def test_both_ends_are_scored_and_aggregated(sequence_classifier, frames, how, loader, seen_field):
    model = sequence_classifier("bert")
    options = {"windows_field": "n", "truncated_field": "cut", "seen_field": seen_field}
    mapper = at_ends(model, score_field="s", window_aggregation=how, loader=loader, **options)

    found = frames.to_pandas(mapper(frames.lazy(FRAME)))[IS_TEXT]

    rows = [row for row in ROWS if row is not None]
    scores = [probabilities(outputs_of(model, text)) for text in TEXTS]
    aggregate = {"mean": np.mean, "max": np.max, "first": lambda s, axis: s[0]}[how]
    assert_close(stacked(found["s"]), np.stack([aggregate(scores[row], axis=0) for row in rows]))
    assert found["n"].tolist() == [len(scores[row]) for row in rows]
    read = [parts_of(model, text) for text in TEXTS]
    ran = [sum(map(len, parts[:1] if how == "first" else parts)) for parts, _ in read]
    shares = [own / whole for own, (_, whole) in zip(ran, read, strict=True)]
    assert found["cut"].tolist() == [shares[row] < 1 for row in rows]
    assert {1, 2} == set(found["n"]) and {True, False} == set(found["cut"])
    if seen_field:
        assert_close(found["seen"].to_numpy(), [shares[row] for row in rows])


@pytest.mark.parametrize("architecture", ["roberta", "xlm-roberta", "modernbert"])
def test_other_tokenizers_read_the_same_ends(sequence_classifier, architecture):
    model = sequence_classifier(architecture)
    found = at_ends(model, score_field="s", window_aggregation="max")(FRAME)[IS_TEXT]
    scores = [probabilities(outputs_of(model, FRAME["text"][row])) for row in found.index]
    assert_close(stacked(found["s"]), np.stack([own.max(axis=0) for own in scores]))


def test_regressions_and_published_families_read_ends(checkpoint):
    model = checkpoint("fineweb-edu")
    settings = {"max_seq_length": SIZE, "end_chars": CHARS, "autocast": False}
    mapper = FineWebEduClassifier(
        model=model, long_text="ends", window_aggregation="max", **settings
    )
    found = mapper(FRAME)["fineweb-edu-score-float"][IS_TEXT]
    scores = [outputs_of(model, FRAME["text"][row]).max() for row in found.index]
    assert_close(found.to_numpy(), np.clip(scores, 0, 5))


def test_texts_are_not_shared_with_mappers_that_read_them_whole(sequence_classifier):
    model = sequence_classifier("bert")
    frame = pd.DataFrame({"text": ["x" * 250, "the river"]})  # one unknown word, which fits
    whole = DistributedDataClassifier(model=model, score_field="a", label_field=None)
    ends = at_ends(model, score_field="s", windows_field="n", label_field="of_ends")
    found = classify(frame, [whole, ends])
    assert found["n"].tolist() == [2, 1]
    assert_close(stacked(found["s"]), stacked(ends(frame)["s"]))


def test_reports_and_plans_tell_what_is_not_read(sequence_classifier, tmp_path):
    import dask.dataframe as dd

    mapper = at_ends(sequence_classifier("bert"))
    with collected_stats() as runs:
        mapper(FRAME)
    is_cut = [
        sum(map(len, parts)) < whole
        for parts, whole in (parts_of(mapper.options.model, text) for text in dict.fromkeys(TEXTS))
    ]
    assert runs[-1].truncated_texts == sum(is_cut)
    frame = dd.from_pandas(FRAME, npartitions=2)
    (plan,) = Pipeline([frame, mapper]).plan(trial_seconds=None).classifiers
    texts = [TEXTS[row] for row in ROWS if row is not None]
    read = [sum(map(len, parts_of(mapper.options.model, text)[0])) for text in texts]
    assert plan.tokens == pytest.approx(sum(read))


def test_the_defaults_are_those_of_finepdfs():
    options = DomainClassifier(model="m", long_text="ends").options
    assert (options.chars_of_ends, options.max_chars) == (10_000, None)
    assert DomainClassifier(model="m").options.chars_of_ends is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"end_chars": 9}, 'pass long_text="ends"'),
        ({"end_chars": 9, "long_text": "windows"}, 'pass long_text="ends"'),
        ({"window_overlap": 3, "long_text": "ends"}, 'pass long_text="windows"'),
        ({"end_chars": 0, "long_text": "ends"}, "end_chars=0 must be at least 1"),
        ({"long_text": "end"}, "Did you mean 'ends'"),
    ],
)
def test_settings_without_a_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DomainClassifier(model="m", **options)
    with pytest.raises(ValueError, match='long_text="ends" has no meaning for a prompt'):
        AegisClassifier(long_text="ends")

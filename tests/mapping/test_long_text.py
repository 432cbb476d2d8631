"""Long texts: cut and told so, or read in windows that are scored and aggregated."""

import numpy as np
import pandas as pd
import pytest
import torch

from gpuclassify import (
    DistributedDataClassifier,
    DomainClassifier,
    FineWebEduClassifier,
    PromptTaskComplexityClassifier,
)
from gpuclassify.inference import engine
from gpuclassify.workers.run_context import advice, collected_stats
from tests.loaders import LOADERS
from tests.oracle import assert_close, plain_tokenizer, probabilities, raw_outputs, stacked
from tests.replicas import sample_texts

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SIZE, OVERLAP = 24, 6
TEXTS = ["", *sample_texts(12, max_words=12), *sample_texts(8, seed=3, min_words=60, max_words=150)]
FRAME = pd.DataFrame({"text": [*TEXTS, None, TEXTS[-1]]})


def window_texts(directory, text):
    """The windows of a text as transformers splits it, decoded without special tokens."""
    tokenizer = plain_tokenizer(directory)
    return tokenizer(
        text, truncation=True, max_length=SIZE, stride=OVERLAP, return_overflowing_tokens=True
    )["input_ids"]


def window_outputs(directory, text):
    """Logits and the text's own tokens of each window, by plain transformers one at a time."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    windows = window_texts(directory, text)
    with torch.inference_mode():
        logits = [model(input_ids=torch.tensor([ids])).logits[0].numpy() for ids in windows]
    tokenizer = plain_tokenizer(directory)
    around = (tokenizer.cls_token_id, tokenizer.sep_token_id)
    own = [sum(number not in around for number in ids) for ids in windows]
    return np.stack(logits), np.array(own)


AGGREGATES = {
    "mean": lambda scores, lengths: scores.mean(axis=0),
    "max": lambda scores, lengths: scores.max(axis=0),
    "first": lambda scores, lengths: scores[0],
    "tokens": lambda scores, lengths: np.average(scores, axis=0, weights=lengths.clip(1)),
}


def windowed(model, **options):
    return DistributedDataClassifier(
        model=model,
        long_text="windows",
        max_seq_length=SIZE,
        window_overlap=OVERLAP,
        autocast=False,
        **options,
    )


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("how", list(AGGREGATES))
def test_windows_are_scored_and_aggregated_like_the_oracle(
    sequence_classifier, frames, how, loader
):
    model = sequence_classifier("bert")
    classifier = windowed(
        model, score_field="scores", window_aggregation=how, windows_field="n", loader=loader
    )

    computed = classifier(frames.lazy(FRAME)).compute(scheduler="sync")

    found = frames.to_pandas(computed)
    outputs = [window_outputs(model, text) for text in TEXTS]
    expected = np.stack([AGGREGATES[how](probabilities(one), n) for one, n in outputs])
    rows = [*range(len(TEXTS)), len(TEXTS) - 1]
    is_text = FRAME["text"].notna().to_numpy()
    assert_close(stacked(found["scores"][is_text]), expected[rows])
    assert found["n"][is_text].tolist() == [len(outputs[row][1]) for row in rows]
    assert computed["n"].dtype == {"pandas": "Int64", "cudf": "int64"}[frames.name]
    assert pd.isna(found["n"].iloc[-2])
    assert found["n"].max() > 4


def test_multi_label_and_regression_models_aggregate_scores(sequence_classifier):
    multi = sequence_classifier("bert", problem_type="multi_label_classification")
    single = sequence_classifier("bert", num_labels=1, problem_type="regression")
    text = TEXTS[-1]

    scores = windowed(multi, score_field="s")(pd.DataFrame({"text": [text]}))["s"]
    outputs, _ = window_outputs(multi, text)
    assert_close(stacked(scores)[0], (1 / (1 + np.exp(-outputs))).mean(axis=0))

    score = windowed(single)(pd.DataFrame({"text": [text]}))["score"]
    outputs, _ = window_outputs(single, text)
    assert_close(score.to_numpy(), outputs.mean(axis=0))


def test_published_families_read_windows(checkpoint):
    frame = pd.DataFrame({"text": TEXTS})
    options = {"long_text": "windows", "max_seq_length": SIZE, "autocast": False}
    education = FineWebEduClassifier(
        model=checkpoint("fineweb-edu"), window_overlap=OVERLAP, **options
    )
    outputs = [window_outputs(checkpoint("fineweb-edu"), text)[0].mean() for text in TEXTS]
    found = education(frame)["fineweb-edu-score-float"].to_numpy()
    assert_close(found, np.clip(outputs, 0, 5))

    prompts = PromptTaskComplexityClassifier(model=checkpoint("prompt-task-complexity"), **options)
    short = PromptTaskComplexityClassifier(
        model=checkpoint("prompt-task-complexity"), max_seq_length=SIZE, autocast=False
    )
    cut = short(frame)["prompt_complexity_score"].to_numpy()
    whole = prompts(frame)["prompt_complexity_score"].to_numpy()
    is_short = [len(text) < 20 for text in TEXTS]
    assert_close(whole[is_short], cut[is_short])
    assert np.abs(whole - cut).max() > 1e-3


def test_a_text_that_fits_gets_the_same_scores_with_and_without_windows(sequence_classifier):
    model = sequence_classifier("bert")
    frame = pd.DataFrame({"text": TEXTS[:13]})
    plain = DistributedDataClassifier(model=model, score_field="s", autocast=False)
    windows = DistributedDataClassifier(
        model=model, score_field="s", autocast=False, long_text="windows"
    )

    np.testing.assert_array_equal(stacked(windows(frame)["s"]), stacked(plain(frame)["s"]))


def test_windows_read_the_whole_text_where_the_class_would_cut_it(checkpoint):
    model = checkpoint("domain")
    assert DomainClassifier(model=model).options.max_chars == 2000
    assert DomainClassifier(model=model, long_text="windows").options.max_chars is None
    assert DomainClassifier(model=model, long_text="windows", max_chars=99).options.max_chars == 99


def test_the_columns_say_what_was_read(sequence_classifier, frames):
    model = sequence_classifier("bert")
    classifier = DistributedDataClassifier(
        model=model,
        max_seq_length=SIZE,
        max_chars=200,
        seen_field="seen",
        truncated_field="cut",
        filter_by="LABEL_0",
        keep_field="keep",
    )

    computed = classifier(frames.lazy(FRAME)).compute(scheduler="sync")

    found = frames.to_pandas(computed)
    tokenizer = plain_tokenizer(model)
    expected = []
    for text in TEXTS:
        tokens = len(tokenizer(text[:200])["input_ids"])
        expected.append(min(SIZE, tokens) / tokens * min(200, len(text)) / max(len(text), 1))
    expected[0] = 1.0
    seen = found["seen"].to_numpy()
    assert_close(seen[: len(TEXTS)], expected)
    assert np.isnan(seen[-2])
    assert found["seen"].dtype == np.float32
    assert computed["cut"].dtype == {"pandas": "boolean", "cudf": "bool"}[frames.name]
    assert found["cut"].iloc[: len(TEXTS)].tolist() == [share < 1 for share in expected]
    assert found["cut"].isna().tolist() == FRAME["text"].isna().tolist()
    assert 3 < found["cut"].sum() < len(TEXTS)
    assert list(found.columns) == ["text", "preds", "keep", "seen", "cut"]


def test_asking_what_was_read_changes_no_score(sequence_classifier):
    model = sequence_classifier("bert")
    options = {"model": model, "max_chars": 100, "score_field": "s", "autocast": False}
    plain = DistributedDataClassifier(**options)(FRAME)
    told = DistributedDataClassifier(truncated_field="cut", **options)(FRAME)

    is_text = FRAME["text"].notna()
    assert_close(stacked(told["s"][is_text]), stacked(plain["s"][is_text]))
    assert_close(
        stacked(plain["s"][is_text]),
        probabilities(raw_outputs(model, [t[:100] for t in FRAME["text"][is_text]])),
    )


def test_which_texts_are_cut_is_known_without_reading_them_whole(sequence_classifier):
    model = sequence_classifier("bert")
    one = plain_tokenizer(model)
    fits = ["the river " * n for n in range(5, 16)]
    texts = [*fits, *(text + " " * 5_000 for text in fits), *TEXTS, "the river " * 5_000]
    options = {"model": model, "max_seq_length": SIZE, "truncated_field": "cut"}

    with collected_stats() as runs:
        found = DistributedDataClassifier(**options)(pd.DataFrame({"text": texts}))

    is_cut = [len(one(text)["input_ids"]) > SIZE for text in texts]
    assert found["cut"].tolist() == is_cut
    assert sum(stats.truncated_texts for stats in runs) == sum(is_cut)
    assert 3 < sum(is_cut[: len(fits)]) < len(fits)


def test_windows_with_everything_read_are_not_called_cut(sequence_classifier):
    classifier = windowed(sequence_classifier("bert"), truncated_field="cut", seen_field="seen")
    found = classifier(pd.DataFrame({"text": TEXTS}))

    assert not found["cut"].any()
    assert (found["seen"] == 1).all()

    first = windowed(sequence_classifier("bert"), truncated_field="cut", window_aggregation="first")
    assert first(pd.DataFrame({"text": TEXTS}))["cut"].tolist() == [
        len(window_texts(sequence_classifier("bert"), text)) > 1 for text in TEXTS
    ]


@pytest.mark.parametrize("long_text", ["windows", "lines"])
def test_a_text_with_several_parts_that_are_computed_again_counts_once(
    sequence_classifier, monkeypatch, long_text
):
    run = engine.run
    monkeypatch.setattr(engine, "run", lambda *args: np.full_like(run(*args), np.nan))
    first, second, third = TEXTS[-3:]
    texts = [f"{first}\n{second}", f"{second}\n{third}"]
    classifier = DistributedDataClassifier(
        model=sequence_classifier("bert"), long_text=long_text, max_seq_length=SIZE, autocast=False
    )
    with collected_stats() as runs:
        classifier(pd.DataFrame({"text": [*texts, None, texts[0]]}))

    assert runs[0].windows > 2
    (sentence,) = advice(runs[0].as_dict())
    assert "the outputs of 2 of 2 texts were not finite" in sentence


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"long_text": "window"}, "Did you mean 'windows'"),
        ({"window_overlap": 3}, 'pass long_text="windows"'),
        ({"windows_field": "n"}, 'pass long_text="windows"'),
        ({"long_text": "windows", "window_overlap": -1}, "at least 0"),
        ({"long_text": "windows", "window_overlap": 16, "max_seq_length": 16}, "no way forward"),
        ({"long_text": "windows", "window_aggregation": "median"}, "'mean', 'max'"),
    ],
)
def test_settings_without_a_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DomainClassifier(**options)

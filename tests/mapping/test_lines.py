"""long_text="lines": every line alone through plain transformers, gathered by a plain loop."""

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest

from gpuclassify import (
    AegisClassifier,
    DistributedDataClassifier,
    DomainClassifier,
    Embedder,
    FineWebEduClassifier,
    ModelMapper,
    PromptClassifier,
    PromptTaskComplexityClassifier,
    TopicClassifier,
)
from gpuclassify.workers.run_context import collected_stats
from tests.oracle import (
    assert_close,
    independent_probabilities,
    plain_tokenizer,
    probabilities,
    raw_outputs,
    stacked,
)
from tests.replicas import sample_texts

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SIZE = 24
MANY = sample_texts(30, seed=7, min_words=2, max_words=40)
BOILERPLATE = "Accept all cookies\nHome | About | Contact\n"
TEXTS = [
    *("\n".join(MANY[start : start + 5]) for start in range(0, 30, 5)),
    *(BOILERPLATE + line + "\r\n\r\n  indented line\t\n \n" for line in MANY[:3]),
    *("", " \n\t\n", "\n", "one line", "one line\n", "a\u2028b\x0cc\x85d", BOILERPLATE * 3),
    MANY[0] * 9 + "\n" + MANY[1],  # whose first line is cut
]
FRAME = pd.DataFrame({"text": [*TEXTS, None, TEXTS[-1]]}, index=[*range(len(TEXTS)), 3, 3])
IS_TEXT = FRAME["text"].notna().to_numpy()
OF_ONE = {"line_min_score": {"LABEL_1": 0.5}}
ROWS = [*range(len(TEXTS)), len(TEXTS) - 1]


def lines_run(text):
    """The lines of a text that are scored."""
    return [line for line in text.splitlines() if line.strip()] or [text]


def by_lines(model, **options):
    settings = {"max_seq_length": SIZE, "autocast": False, "long_text": "lines", **options}
    return DistributedDataClassifier(model=model, **settings)


def tokens_of(model, line):
    return len(plain_tokenizer(model)(line)["input_ids"])


AGGREGATES = {
    "mean": lambda scores, lengths: scores.mean(axis=0),
    "max": lambda scores, lengths: scores.max(axis=0),
    "first": lambda scores, lengths: scores[0],
    "tokens": lambda scores, lengths: np.average(scores, axis=0, weights=lengths),
}


@pytest.mark.parametrize("how", list(AGGREGATES))
@pytest.mark.parametrize("partitions", [1, 4])
def test_scores_of_lines_become_scores_of_texts(sequence_classifier, frames, how, partitions):
    model = sequence_classifier("bert")
    names = {"windows_field": "n", "seen_field": "seen", "truncated_field": "cut"}
    classifier = by_lines(model, score_field="s", window_aggregation=how, **names)

    found = frames.to_pandas(classifier(frames.lazy(FRAME, partitions, sort=False)))

    expected, seen = [], []
    for text in TEXTS:
        lines = lines_run(text)
        lengths = [tokens_of(model, line) for line in lines]
        own = np.maximum(np.minimum(lengths, SIZE) - 2, len(lines) == 1)  # without special ones
        scores = probabilities(raw_outputs(model, lines, SIZE))
        expected.append(AGGREGATES[how](scores, own))
        shares = [min(SIZE, n) / n for n in lengths]
        seen.append(np.average(shares, weights=[max(1, len(line)) for line in lines]))
    assert found.index.tolist() == FRAME.index.tolist()
    there = found[IS_TEXT]
    assert_close(stacked(there["s"]), np.stack(expected)[ROWS])
    assert there["n"].tolist() == [len(lines_run(TEXTS[row])) for row in ROWS]
    assert_close(there["seen"], np.array(seen)[ROWS])
    assert there["cut"].tolist() == [seen[row] < 1 for row in ROWS]
    assert set(there["cut"]) == {True, False}
    assert found[["preds", "s", "n", "cut"]][~IS_TEXT].isna().all(axis=None)


@pytest.mark.parametrize("kind", ["single_label", "multi_label", "regression"])
def test_lines_that_are_kept_and_their_share_and_scores(sequence_classifier, frames, kind):
    is_regression = kind == "regression"
    problem = {"problem_type": kind if is_regression else f"{kind}_classification"}
    model = sequence_classifier("bert", **problem | ({"num_labels": 1} if is_regression else {}))
    activate = {"single_label": probabilities, "multi_label": independent_probabilities}
    every = sorted({line for text in TEXTS for line in lines_run(text)})
    outputs = raw_outputs(model, every, SIZE)
    outputs = activate[kind](outputs) if kind in activate else outputs
    score = dict(zip(every, outputs[:, 0 if is_regression else 1], strict=True))
    ordered = np.unique([*score.values()])
    gap = np.diff(ordered).argmax() if len(ordered) < 9 else len(ordered) // 2
    least = float(ordered[gap : gap + 2].mean())  # between two scores, far from both
    minimum = least if is_regression else {"LABEL_1": least}
    names = {
        "line_scores_field": "lines",
        "kept_text_field": "kept",
        "kept_share_field": "share",
    }
    classifier = by_lines(model, line_min_score=minimum, **names)

    found = frames.to_pandas(classifier(frames.lazy(FRAME, 3, sort=False)))

    there = found[IS_TEXT].reset_index(drop=True)
    shares = []
    for row, own in enumerate(ROWS):
        text = TEXTS[own]
        listed = [score[line] if line.strip() else None for line in text.splitlines()]
        listed = listed if text.strip() else [score[text]]
        given = [None if pd.isna(value) else value for value in there["lines"][row]]
        assert [value is None for value in given] == [value is None for value in listed]
        assert_close(*([v for v in values if v is not None] for values in (given, listed)))
        kept = [
            line
            for line in text.splitlines(keepends=True)
            if not line.strip() or score[line.splitlines()[0]] >= least
        ]
        kept = kept if text.strip() or score[text] >= least else []
        assert there["kept"][row] == "".join(kept)
        run = lines_run(text)
        shares.append(sum(score[line] >= least for line in run) / len(run))
    assert_close(there["share"], shares)
    assert 0 in shares and 1 in shares and len({*shares}) > 2
    assert found[["lines", "kept", "share"]][~IS_TEXT].isna().all(axis=None)
    assert str(found["share"].dtype) == "float32" and found["kept"].dtype == found["text"].dtype
    kept = by_lines(model, line_min_score=minimum, min_kept_share=0.5)(FRAME)
    assert kept["text"].tolist() == [
        TEXTS[row] for row, share in zip(ROWS, shares, strict=True) if share >= 0.5
    ]


def test_lines_that_texts_share_run_once_and_alone_give_the_same(sequence_classifier):
    model = sequence_classifier("bert")
    classifier = by_lines(model, score_field="s", line_scores_field="l", **OF_ONE)
    with collected_stats() as runs:
        together = classifier(FRAME)
    assert sum(run.windows for run in runs) == len({ln for text in TEXTS for ln in lines_run(text)})
    assert sum(run.truncated_texts for run in runs) == 1 + sum(
        any(tokens_of(model, line) > SIZE for line in lines_run(text)) for text in TEXTS[:-1]
    )
    for row in range(0, len(TEXTS), 4):
        alone = classifier(FRAME.iloc[[row]])
        assert_close(stacked(alone["s"])[0], stacked(together["s"].iloc[[row]])[0])


def test_the_published_families_take_lines(checkpoint):
    options = {"long_text": "lines", "max_seq_length": SIZE, "autocast": False}
    frame = pd.DataFrame({"text": TEXTS})
    model = checkpoint("fineweb-edu")
    education = FineWebEduClassifier(
        model=model, line_scores_field="l", min_score=0, keep_field="keep", **options
    )
    found = education(frame)
    raw = [raw_outputs(model, lines_run(text), SIZE)[:, 0] for text in TEXTS]
    means = [np.clip(scores.mean(), 0, 5) for scores in raw]
    assert_close(found["fineweb-edu-score-float"], means)
    listed = [value for own in found["l"] for value in own if not pd.isna(value)]
    assert_close(listed, np.clip(np.concatenate(raw), 0, 5))
    prompts = PromptTaskComplexityClassifier(model=checkpoint("prompt-task-complexity"), **options)
    one = prompts(pd.DataFrame({"text": [MANY[0]]}))["prompt_complexity_score"]
    twice = prompts(pd.DataFrame({"text": [MANY[0] + "\n" + MANY[0]]}))["prompt_complexity_score"]
    assert_close(twice, one)


def test_a_text_is_cut_to_max_chars_before_its_lines_are_found(sequence_classifier):
    model, text = sequence_classifier("bert"), "first line\nsecond line\nthird"
    classifier = by_lines(
        model, max_chars=17, seen_field="seen", kept_text_field="kept", score_field="s", **OF_ONE
    )
    found = classifier(pd.DataFrame({"text": [text]}))
    expected = probabilities(raw_outputs(model, ["first line", "second"], SIZE))
    assert_close(stacked(found["s"])[0], expected.mean(axis=0))
    assert_close(found["seen"], [17 / len(text)])
    assert found["text"].tolist() == [text] and text[:17].endswith(found["kept"][0][-6:])


def test_a_failing_line_is_named_with_its_row(sequence_classifier, monkeypatch):
    from gpuclassify.inference import engine

    run = engine.run

    def broken(*args):
        values = run(*args)
        values[:] = np.nan
        return values

    monkeypatch.setattr(engine, "run", broken)
    monkeypatch.setattr(engine, "run_alone", lambda *_: np.array([np.nan]))
    with pytest.raises(ArithmeticError, match=r"the line 'one line' of row 1 \(index label 'b'\)"):
        by_lines(sequence_classifier("bert"))(
            pd.DataFrame({"text": [None, "\none line\n"]}, index=["a", "b"])
        )


def test_a_plan_counts_every_line(sequence_classifier):
    model = sequence_classifier("bert")
    lengths = by_lines(model).runner.token_lengths(TEXTS)
    every = [[tokens_of(model, line) for line in lines_run(text)] for text in TEXTS]
    assert lengths.whole.tolist() == [sum(own) for own in every]
    assert lengths.windows.tolist() == [min(SIZE, n) for own in every for n in own]
    assert lengths.counts.tolist() == [len(own) for own in every]
    assert by_lines(model).runner.token_lengths([]).whole.tolist() == []


def test_meta_is_the_truth_of_columns_about_lines(sequence_classifier):
    names = {"line_scores_field": "lines", "kept_text_field": "kept", "kept_share_field": "share"}
    classifier = by_lines(sequence_classifier("bert"), truncated_field="cut", **names, **OF_ONE)
    lazy = classifier(dd.from_pandas(FRAME.reset_index(drop=True), npartitions=9))
    found = lazy.compute(scheduler="sync")
    assert found.dtypes.tolist() == lazy.dtypes.tolist()
    assert list(found.columns) == ["text", "preds", "lines", "share", "kept", "cut"]
    plain = classifier(FRAME).dtypes.tolist()
    assert classifier(FRAME.iloc[:0]).dtypes.tolist() == plain
    nulls = classifier(FRAME[~IS_TEXT])
    assert nulls.dtypes.tolist() == plain and nulls["kept"].isna().all()


class Own(ModelMapper):
    new_columns = {"first": "float32"}

    def columns(self, outputs):
        return {"first": outputs[:, 0]}


class OwnLabels(DistributedDataClassifier):
    new_columns = {"first": "float32"}

    def columns(self, outputs):
        return {"first": outputs[:, 0]}


def test_own_columns_get_what_lines_add_up_to_and_have_no_scores_of_lines(sequence_classifier):
    model = sequence_classifier("bert")
    for kind in (Own, OwnLabels):
        made = kind(model=model, long_text="lines", max_seq_length=SIZE, autocast=False)
        expected = [raw_outputs(model, lines_run(text), SIZE)[:, 0].mean() for text in TEXTS]
        assert_close(made(pd.DataFrame({"text": TEXTS}))["first"], expected)
    refused = OwnLabels(model=model, long_text="lines", kept_share_field="s", line_min_score=1)
    with pytest.raises(ValueError, match="line_min_score has no meaning for OwnLabels"):
        refused(FRAME)


LINES = {"long_text": "lines"}


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (DomainClassifier, {"line_min_score": {"News": 0.5}}, 'pass long_text="lines" with it'),
        (DomainClassifier, {"min_kept_share": 0.5}, 'pass long_text="lines" with it'),
        (DomainClassifier, {**LINES, "kept_text_field": "k"}, "pass line_min_score= with it"),
        (DomainClassifier, {**LINES, "line_min_score": 0.5}, "no column to fill and no filter"),
        (DomainClassifier, {**LINES, "window_overlap": 3}, 'pass long_text="windows"'),
        (DomainClassifier, {**LINES, "min_kept_share": 2, "line_min_score": 0}, "from 0 to 1"),
        (TopicClassifier, LINES, "make it None"),
        (Embedder, {**LINES, "model": "m"}, "embeddings are none"),
        (AegisClassifier, LINES, "has no meaning for a prompt"),
        (
            PromptClassifier,
            {**LINES, "model": "m", "prompt": "{text}", "answers": ["a", "b"]},
            "no way to read prompts",
        ),
    ],
)
def test_settings_without_a_meaning_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"line_scores_field": "l"}, "one score a line, and this model scores 3: name one"),
        ({"line_min_score": 0.5, "kept_text_field": "k"}, "names no label.*by label"),
        ({"line_min_score": {"LABEL_9": 1}, "kept_text_field": "k"}, "no label 'LABEL_9'"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused_before_any_work(
    sequence_classifier, options, message
):
    with pytest.raises(ValueError, match=message):
        by_lines(sequence_classifier("bert"), **options)(dd.from_pandas(FRAME, 2, sort=False))

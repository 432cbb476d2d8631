"""Heads are parts of their own: several of them read the outputs of one run."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from gpuclassify import DistributedDataClassifier, DomainClassifier, Signals
from gpuclassify.inference import engine
from gpuclassify.mapping.heads import Head
from gpuclassify.mapping.label_heads import CategoryHead
from gpuclassify.mapping.stage_counts import StageCounts, label_fields
from gpuclassify.workers.run_context import run_context
from tests.oracle import stacked
from tests.replicas import sample_texts

pytestmark = pytest.mark.usefixtures("one_torch_thread")
TEXTS = [*sample_texts(12, seed=4, max_words=40), "river " * 700, None, ""]


class SpreadHead(Head):
    """How far a text's largest output is from its smallest."""

    def fields(self):
        return [pa.field("spread", pa.float32())]

    def columns(self, values):
        return {"spread": values.max(axis=1) - values.min(axis=1)}


class TwoHeads(DistributedDataClassifier):
    def make_heads(self):
        parts = (type(self).__name__, self.options, self.model)
        return (CategoryHead(*parts), SpreadHead(*parts))


@pytest.mark.parametrize("long_text", ["truncate", "windows"])
def test_two_heads_read_one_run_of_the_model(sequence_classifier, monkeypatch, long_text):
    runs = []
    run = engine.run
    monkeypatch.setattr(engine, "run", lambda *given: runs.append(1) or run(*given))
    frame = pd.DataFrame({"text": TEXTS})
    settings = {
        "model": sequence_classifier("bert"),
        "score_field": "scores",
        "long_text": long_text,
        "autocast": False,
    }

    found = TwoHeads(**settings)(frame)

    assert len(runs) == 1
    alone = DistributedDataClassifier(**settings)(frame)
    pd.testing.assert_frame_equal(found.drop(columns="spread"), alone)
    is_text = frame["text"].notna()
    log_scores = np.log(stacked(found["scores"][is_text]))
    if long_text == "truncate":  # a softmax leaves differences of logits as they are
        spread = log_scores.max(axis=1) - log_scores.min(axis=1)
        np.testing.assert_allclose(found["spread"][is_text], spread, atol=1e-4)
    assert found["spread"].isna().tolist() == (~is_text).tolist()


def test_columns_of_two_heads_need_different_names(sequence_classifier):
    class Twice(DistributedDataClassifier):
        def make_heads(self):
            parts = (type(self).__name__, self.options, self.model)
            return (CategoryHead(*parts), CategoryHead(*parts))

    with pytest.raises(ValueError, match=r"output columns need different names.*'preds'"):
        Twice(model=sequence_classifier("bert"))(pd.DataFrame({"text": TEXTS}))


def test_heads_are_asked_for_counts_where_a_job_counts(sequence_classifier, monkeypatch):
    class OwnCounts(CategoryHead):
        def passes(self, values):
            return {"own": np.arange(len(values)) > 0}

        def counts(self, texts):
            return {"words": sum(len((text or "").split()) for text in texts)}

    class Mapper(DistributedDataClassifier):
        def make_heads(self):
            return (OwnCounts(type(self).__name__, self.options, self.model),)

    asked = []
    certainties = CategoryHead.certainties
    record = lambda head, values: asked.append(1) or certainties(head, values)  # noqa: E731
    monkeypatch.setattr(CategoryHead, "certainties", record)
    mapper = Mapper(model=sequence_classifier("bert"), autocast=False, min_confidence=0.0)
    frame = pd.DataFrame({"text": ["one text", "two more words", None]})

    assert len(mapper(frame)) == 1
    assert not asked
    with run_context(stages=StageCounts()) as context:
        mapper(frame)

    (counts,) = context.stages.counts.values()
    assert asked == [1]
    assert counts["words"] == 5
    assert counts["dropped"] == {"null": 1, "own": 1}


def test_pairs_that_a_filter_drops_are_counted_as_texts_are(sequence_classifier):
    mapper = DistributedDataClassifier(
        model=sequence_classifier("bert"), autocast=False, text_field=["a", "b"], min_confidence=1.0
    )
    frame = pd.DataFrame({"a": ["one", "", " ", None], "b": ["two", "", "", "x"]})
    with run_context(stages=StageCounts()) as context:
        assert mapper(frame).empty
    (counts,) = context.stages.counts.values()
    assert counts["dropped"] == {"null": 1, "empty": 1, "blank": 1, "confidence": 1}


@pytest.mark.parametrize(
    "mapper",
    [
        DomainClassifier(labels=["a", "b"], long_text="windows", windows_field="windows"),
        Signals(["gopher"]),
    ],
    ids=["windows", "signals"],
)
def test_counts_are_no_labels_of_a_report(mapper):
    counts = {f.name for f in mapper.schema() if pa.types.is_integer(f.type)}
    assert counts and not counts & {*label_fields([mapper])}


def test_a_class_without_a_column_for_its_decision_cannot_keep_all_rows():
    assert Signals(["gopher"]).keeping("keep") is None

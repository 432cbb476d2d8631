"""Whatever rows, partitions and batches surround a text, it gets the scores that it has alone."""

import contextlib
import functools
import itertools

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.nn.modules.module import register_module_forward_pre_hook

from gpuclassify import DistributedDataClassifier, DomainClassifier
from gpuclassify.inference.memory import BUDGETS
from tests.loaders import OTHER_LOADERS
from tests.oracle import (
    TOLERANCE,
    assert_close,
    assert_labels_agree,
    probabilities,
    raw_outputs,
    stacked,
)
from tests.replicas import sample_texts, write_checkpoint

few_examples = settings(max_examples=10, phases=[Phase.generate])  # to shrink one takes minutes
SIZE, OVERLAP = 24, 6
LONG = ["word " * 700, " ".join(sample_texts(6, seed=22, min_words=60))]
POOL = [*sample_texts(12, seed=21, max_words=60), "", " ", "a", "river", "river ", *LONG]


@pytest.fixture(scope="module")
def mapper_of(sequence_classifier, tmp_path_factory):
    """Makes classifiers of one of two models, one that is packed and one that is padded."""
    category = write_checkpoint(tmp_path_factory.mktemp("company") / "domain", "domain", seed=3)
    model_of = {"bert": sequence_classifier("bert", seed=3), "deberta": category}
    kind_of = {"bert": DistributedDataClassifier, "deberta": DomainClassifier}
    common = {"label_field": "label", "score_field": "scores", "max_chars": None, "autocast": False}

    def make(name, **options):
        return kind_of[name](model=model_of[name], **{**common, **options})

    return make


@pytest.fixture(scope="module")
def alone(mapper_of):
    """Scores of one text in a frame of its own, by transformers' own code."""

    @functools.cache
    def scores(name, text, **options):
        mapper = mapper_of(name, engine="reference", **options)
        return stacked(mapper(pd.DataFrame({"text": [text]})).scores)[0]

    return scores


@contextlib.contextmanager
def scarce_memory(most_tokens):
    """Within it, no batch of several rows with more tokens than these fits, padding included."""

    def refuse(module, given):
        is_batch = isinstance(module, torch.nn.Embedding) and given[0].ndim == 2
        if is_batch and len(given[0]) > 1 and given[0].numel() > most_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    hook = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()
        BUDGETS.clear()


texts = st.none() | st.sampled_from(POOL) | st.text(st.characters(exclude_categories=["Cs"]))


@st.composite
def partitions(draw):
    """A frame in parts, some of them empty, with repeated texts and index labels."""
    rows = draw(st.lists(texts, min_size=12, max_size=30))
    index = draw(st.lists(st.integers(0, 5), min_size=len(rows), max_size=len(rows)))
    columns = {
        "number": range(len(rows)),
        "text": pd.array(rows, dtype="str"),
        "label_before": rows,
    }
    frame = pd.DataFrame(columns, index=pd.Index(index, name="at", dtype="int64"))
    cuts = sorted(draw(st.lists(st.integers(0, len(rows)), min_size=1, max_size=6)))
    return [frame.iloc[a:b] for a, b in itertools.pairwise([0, *cuts, len(rows)])]


def batching(*engines):
    """Settings that change how texts are batched, and nothing else."""
    padded = {
        "batch_size": st.sampled_from([None, None, 1, 2, 7]),
        "sort_by_length": st.booleans(),
        "padding_side": st.sampled_from([None, "left", "right"]),
    }
    cuts = [{"engine": st.sampled_from(engines)}, *({"loader": st.just(x)} for x in OTHER_LOADERS)]
    return st.one_of([st.fixed_dictionaries({**padded, **cut}) for cut in cuts])


budgets = st.integers(1, 300) | st.just(10**9)
engines_of = {
    "bert": ("auto", "packed", "padded", "reference"),
    "deberta": ("auto", "padded", "reference"),
}


def classify(mapper, parts, most_tokens=10**9):
    """Each part as Dask has it, and with its new columns."""
    mapper(pd.DataFrame({"text": ["river", "a river"]}))  # loads and checks with memory enough
    before = dd.from_map(lambda part: part, parts, meta=parts[0].iloc[:0])
    with scarce_memory(most_tokens):
        return [
            dask.compute(*frame.to_delayed(), scheduler="sync")
            for frame in (before, mapper(before))
        ]


def assert_alone(parts, found, labels, expected_of):
    """The rows given, each text with the scores that it has alone, each null with none."""
    for part, result in zip(parts, found, strict=True):
        pd.testing.assert_frame_equal(result[part.columns], part, check_exact=True)
    before, after = pd.concat(parts), pd.concat(found)
    is_text = before.text.notna().to_numpy()
    assert after.scores.notna().to_numpy().tolist() == is_text.tolist()
    assert after.label.notna().to_numpy().tolist() == is_text.tolist()
    if is_text.any():
        expected = np.stack([expected_of(text) for text in before.text[is_text]])
        assert_close(stacked(after.scores[is_text]), expected, TOLERANCE)
        assert_labels_agree(after.label[is_text], labels, expected)


@pytest.mark.parametrize("name", engines_of)
def test_what_a_text_gets_alone_is_what_transformers_gives(mapper_of, alone, name):
    model = mapper_of(name).options.model
    expected = probabilities(raw_outputs(model, POOL, max_tokens=512))

    assert_close(np.stack([alone(name, text) for text in POOL]), expected)
    assert len(set(expected.argmax(axis=1))) > 1
    assert expected.std(axis=0).max() > 0.1


@pytest.mark.parametrize("name", engines_of)
@few_examples
@given(data=st.data(), parts=partitions(), most_tokens=budgets)
def test_scores_are_those_of_a_text_alone(mapper_of, alone, name, data, parts, most_tokens):
    mapper = mapper_of(name, **data.draw(batching(*engines_of[name])))

    before, after = classify(mapper, parts, most_tokens)

    assert_alone(before, after, mapper.labels, functools.partial(alone, name))


@pytest.mark.parametrize("name", engines_of)
@few_examples
@given(
    data=st.data(),
    parts=partitions(),
    most_tokens=budgets,
    how=st.sampled_from(["mean", "max", "first", "tokens"]),
)
def test_windows_of_a_text_are_those_of_the_text_alone(
    mapper_of, alone, name, data, parts, most_tokens, how
):
    windows = {
        "long_text": "windows",
        "max_seq_length": SIZE,
        "window_overlap": OVERLAP,
        "window_aggregation": how,
    }
    mapper = mapper_of(name, **windows, **data.draw(batching(*engines_of[name])))

    before, after = classify(mapper, parts, most_tokens)

    assert_alone(before, after, mapper.labels, lambda text: alone(name, text, **windows))


@few_examples
@given(parts=partitions(), order=st.randoms(use_true_random=False))
def test_the_order_of_rows_moves_scores_and_changes_none(mapper_of, alone, parts, order):
    frame = pd.concat(parts)
    rows = list(range(len(frame)))
    order.shuffle(rows)
    mapper = mapper_of("bert")

    one, other = mapper(frame), mapper(frame.iloc[rows])

    assert other.number.tolist() == one.number.iloc[rows].tolist()
    assert_alone([frame.iloc[rows]], [other], mapper.labels, functools.partial(alone, "bert"))

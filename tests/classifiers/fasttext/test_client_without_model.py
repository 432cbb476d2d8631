"""A client that cannot read the file plans by labels, which the first partition verifies."""

import shutil

import dask.dataframe as dd
import pandas as pd
import pytest

from gpuclassify import FastTextClassifier, LanguageIdentifier
from gpuclassify.models.checkpoint import CheckpointError

FRAME = pd.DataFrame({"text": ["theorem proof", None, "click buy free", "größer Straße"]})
LAZY = dd.from_pandas(FRAME, npartitions=2)


@pytest.fixture(params=[FastTextClassifier, LanguageIdentifier])
def kind(request):
    return request.param


def test_it_plans_by_the_labels(kind, fasttext_model, tmp_path):
    here = kind(model=fasttext_model("chars"))
    settings = {"filter_by": here.labels[0], "min_confidence": 0.1, "top_k": 2}
    away = kind(model=tmp_path / "away.bin", labels=here.labels, **settings)
    assert away.labels == here.labels
    planned = away(LAZY)
    assert away.describe()["model_revision"] is None
    assert away.model.weights_bytes(None) == {}
    shutil.copy(fasttext_model("chars"), tmp_path / "away.bin")
    found = planned.compute(scheduler="sync")
    expected = kind(model=fasttext_model("chars"), **settings)(LAZY).compute(scheduler="sync")
    pd.testing.assert_frame_equal(found, expected)
    assert 0 < len(found) < len(FRAME)


@pytest.mark.parametrize("change", [lambda own: own[::-1], lambda own: own[:2], lambda own: ["x"]])
def test_other_labels_fail_in_the_first_partition(kind, change, fasttext_model, tmp_path):
    labels = kind(model=fasttext_model("chars")).labels
    wrong = change(labels)
    planned = kind(model=tmp_path / "away.bin", labels=wrong)(LAZY)
    shutil.copy(fasttext_model("chars"), tmp_path / "away.bin")
    told = f"the {len(wrong)} labels= are not those of .*/away.bin, which are {labels[0]}, "
    with pytest.raises(CheckpointError, match=told):
        planned.compute(scheduler="sync")


def test_filters_are_held_against_the_labels_at_once(kind):
    with pytest.raises(ValueError, match=r"no label 'c' in .* Labels are a, b"):
        kind(model="/away.bin", labels=["a", "b"], filter_by="c")(LAZY)


def test_without_labels_the_file_has_to_be_there(kind):
    with pytest.raises(OSError, match=r"/away.bin"):
        kind(model="/away.bin")(LAZY)

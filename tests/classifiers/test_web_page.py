"""WebOrganizer's classifiers read the address of a page, then its text."""

import dask.dataframe as dd
import pandas as pd
import pytest

from gpuclassify import DistributedDataClassifier, FormatClassifier, TopicClassifier
from tests.oracle import assert_close, stacked
from tests.replicas import sample_texts

pytestmark = pytest.mark.usefixtures("one_torch_thread")
KINDS = {"topic": TopicClassifier, "format": FormatClassifier}
FRAME = pd.DataFrame(
    {
        "url": ["http://www.example.com", None, "", *(f"https://a.org/{n}" for n in range(5))],
        "text": [*sample_texts(7, seed=2, max_words=50), None],
    }
)


@pytest.mark.parametrize("family", KINDS)
def test_the_address_stands_before_the_text(checkpoint, family):
    settings = {"model": checkpoint(family), "score_field": "scores", "autocast": False}
    mapper = KINDS[family](**settings, strict=True)
    found = mapper(dd.from_pandas(FRAME, npartitions=3)).compute()
    filled = FRAME["url"].fillna("") + "\n\n" + FRAME["text"]
    expected = DistributedDataClassifier(**settings)(pd.DataFrame({"text": filled}))
    assert found[f"{family}_pred"].tolist()[:-1] == expected["preds"].tolist()[:-1]
    assert_close(stacked(found["scores"][:-1]), stacked(expected["scores"][:-1]))
    assert pd.isna(found[f"{family}_pred"].iloc[-1])
    assert found[f"{family}_pred"].nunique() > 1


def test_pages_without_an_address_are_read_without_a_template(checkpoint):
    mapper = TopicClassifier(model=checkpoint("topic"), text_template=None, autocast=False)
    assert mapper(FRAME[["text"]])["topic_pred"].notna().sum() == 7
    with pytest.raises(ValueError, match="no text column 'url'"):
        TopicClassifier(model=checkpoint("topic"))(FRAME[["text"]])

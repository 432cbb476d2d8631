"""classify() means one mapper after another, with one tokenization for all that can share it."""

import pickle

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask.base import tokenize

from gpuclassify import (
    ContentTypeClassifier,
    DistributedDataClassifier,
    DomainClassifier,
    FineWebEduClassifier,
    PromptClassifier,
    PromptTaskComplexityClassifier,
    QualityClassifier,
    Route,
    classify,
)
from gpuclassify.mapping.chain import Chain
from gpuclassify.workers.run_context import collected_stats
from tests.loaders import LOADERS
from tests.oracle import assert_close, stacked
from tests.replicas import sample_texts, write_sequence_classifier

pytestmark = pytest.mark.usefixtures("one_torch_thread")
TEXTS = [*sample_texts(40, max_words=120), "", None, "twice", "twice"]
FRAME = pd.DataFrame({"id": range(len(TEXTS)), "text": TEXTS}, index=np.arange(len(TEXTS)) // 2)


@pytest.fixture
def mappers(checkpoint):
    """One mapper of every published family, with columns of their own."""

    def make(**options):
        return [
            DomainClassifier(model=checkpoint("domain"), score_field="domain", **options),
            QualityClassifier(model=checkpoint("quality"), score_field="quality", **options),
            ContentTypeClassifier(model=checkpoint("content-type"), **options),
            FineWebEduClassifier(model=checkpoint("fineweb-edu"), **options),
            PromptTaskComplexityClassifier(model=checkpoint("prompt-task-complexity"), **options),
        ]

    return make


def one_after_another(frame, mappers):
    for mapper in mappers:
        frame = mapper(frame)
    return frame


def assert_same_frame(found, expected):
    """Rows, order and columns exactly; numbers within the tolerance."""
    assert list(found.columns) == list(expected.columns)
    assert found.index.tolist() == expected.index.tolist()
    for name in expected.columns:
        assert found[name].dtype == expected[name].dtype, name
        assert found[name].isna().tolist() == expected[name].isna().tolist(), name
        one, other = found[name].dropna(), expected[name].dropna()
        if name in ("domain", "quality"):
            assert_close(stacked(one), stacked(other))
        elif one.dtype == np.float32:
            assert_close(one, other, tolerance=2e-4 if "score-" not in name else 1e-5)
        else:
            assert one.tolist() == other.tolist(), name


@pytest.mark.parametrize("loader", LOADERS)
def test_one_pass_equals_one_after_another(mappers, frames, loader):
    several = mappers(loader=loader, autocast=False)
    lazy = classify(frames.lazy(FRAME, npartitions=4), several)

    found = frames.to_pandas(lazy)

    expected = one_after_another(frames.lazy(FRAME, npartitions=4), several)
    assert_same_frame(found, frames.to_pandas(expected))
    assert lazy.npartitions == 4
    if frames.name == "pandas":
        assert found.dtypes.to_dict() == lazy._meta.dtypes.to_dict()


def test_dropped_rows_are_not_scored_by_those_that_follow(checkpoint):
    quality = QualityClassifier(model=checkpoint("quality"), filter_by="High")
    domain = DomainClassifier(model=checkpoint("domain"))

    with collected_stats() as stats:
        found = classify(FRAME, [quality, domain])

    assert found.equals(domain(quality(FRAME)))
    assert 0 < len(found) < len(FRAME)
    assert [run.rows for run in stats[:2]] == [len(FRAME), len(found)]
    reversed_order = classify(FRAME, [domain, quality])
    assert reversed_order["id"].tolist() == found["id"].tolist()


def test_equal_tokenizers_tokenize_once(checkpoint, tmp_path):
    first = checkpoint("domain")
    options = {"max_seq_length": 512, "max_chars": 2000, "overwrite": True}
    several = [
        DistributedDataClassifier(model=first, label_field=f"label_{n}", **options)
        for n in range(3)
    ]
    other = write_sequence_classifier(tmp_path / "other", "bert")

    with collected_stats() as stats:
        classify(FRAME, [*several, DistributedDataClassifier(model=other, label_field="other")])

    texts = len({text for text in TEXTS if text is not None})
    assert [run.shared_texts for run in stats] == [0, texts, texts, 0]


def test_texts_that_both_leave_whole_are_shared_whatever_the_limits(checkpoint):
    domain = DomainClassifier(model=checkpoint("domain"), max_chars=200)
    quality = QualityClassifier(model=checkpoint("quality"), max_chars=400)
    short = {text for text in TEXTS if text is not None and len(text) <= 200}

    with collected_stats() as stats:
        found = classify(FRAME, [domain, quality])

    assert stats[1].shared_texts == len(short) > 10
    assert found.equals(quality(domain(FRAME)))


def test_one_task_a_partition(mappers):
    lazy = classify(dd.from_pandas(FRAME, npartitions=3), mappers())

    tasks = [key for key in lazy.optimize().__dask_graph__() if "Classifier" in str(key)]
    assert len(tasks) == 3
    assert "DomainClassifier+QualityClassifier" in str(tasks[0])


def test_a_mapper_may_read_another_column(checkpoint):
    frame = FRAME.assign(title=FRAME["text"].str.slice(0, 30))
    domain = DomainClassifier(model=checkpoint("domain"))
    title = DomainClassifier(
        model=checkpoint("domain"), text_field="title", label_field="title_domain"
    )

    found = classify(frame, [domain, title])

    assert found.equals(title(domain(frame)))


def test_a_chain_may_hold_chains(checkpoint):
    domain = DomainClassifier(model=checkpoint("domain"))
    quality = QualityClassifier(model=checkpoint("quality"))
    inner = Chain((domain,))

    assert classify(FRAME, [inner, quality]).equals(classify(FRAME, [domain, quality]))


def test_what_is_wrong_is_refused_at_the_call(checkpoint):
    ddf = dd.from_pandas(FRAME, npartitions=2)
    domain = DomainClassifier(model=checkpoint("domain"))
    with pytest.raises(ValueError, match=r"both write \['domain_pred'\]"):
        classify(ddf, [domain, DomainClassifier(model=checkpoint("domain"), overwrite=True)])
    with pytest.raises(ValueError, match=r"both write \['domain_pred'\]"):
        classify(ddf, [Chain((domain,)), domain])
    with pytest.raises(ValueError, match="no text column 'body'"):
        classify(ddf, [domain, QualityClassifier(model=checkpoint("quality"), text_field="body")])
    with pytest.raises(ValueError, match="no label 'Hihg'"):
        classify(ddf, [domain, QualityClassifier(model=checkpoint("quality"), filter_by="Hihg")])
    with pytest.raises(TypeError, match="takes a list of mappers, got one DomainClassifier"):
        classify(ddf, domain)
    with pytest.raises(TypeError, match="got a str among the mappers"):
        classify(ddf, ["domain"])
    with pytest.raises(ValueError, match="got no mapper"):
        classify(ddf, [])


def test_a_limit_takes_the_first_rows(domain, frames):
    texts = ["one river", "two ovens", "three goals", "four banks"]
    frame = pd.DataFrame({"text": texts, "id": range(4)}, index=[7, 7, 8, 9])
    for dataset in (frames.plain(frame), frames.lazy(frame, npartitions=1)):
        found = classify(dataset, [domain()], limit=3)
        expected = frames.to_pandas(domain()(dataset)).iloc[:3]
        pd.testing.assert_frame_equal(frames.to_pandas(found), expected)
    first = classify(frames.lazy(frame, npartitions=2), [domain()], limit=3)
    assert first.npartitions == 1  # no other partition is read
    assert classify(texts, [domain()], limit=3)["text"].tolist() == texts[:3]
    assert len(classify("one river", [domain()], limit=3)) == 1
    with pytest.raises(ValueError, match="limit=0"):
        classify(texts, [domain()], limit=0)


def test_chains_and_routes_of_settings_that_differ_late_have_keys_of_their_own():
    prompts = ("{text} " + "and so on " * 30 + end for end in "yz")
    one, other = (
        PromptClassifier(model="a/b", prompt=prompt, answers=["a", "b"]) for prompt in prompts
    )
    assert tokenize(Chain((one,))) != tokenize(Chain((other,)))
    assert tokenize(Route("k", {"a": one})) != tokenize(Route("k", {"a": other}))
    assert tokenize(Chain((one,))) == tokenize(pickle.loads(pickle.dumps(Chain((one,)))))

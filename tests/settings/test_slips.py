"""Slips of the hand: each is answered in the user's words, with what to write instead."""

import dask
import dask.dataframe as dd
import pandas as pd
import pytest
from fsspec.registry import known_implementations

from gpuclassify import (
    DistributedDataClassifier,
    DomainClassifier,
    FineWebEduClassifier,
    SemanticDuplicates,
    classify,
    read_files,
    to_parquet,
)
from gpuclassify.corpus.dedup.semantic import embedding_frame
from gpuclassify.hub import HubUnreachableError
from gpuclassify.mapping.chain import Chain
from gpuclassify.workers.retire import message_first
from tests.processes import local_client

pytestmark = pytest.mark.usefixtures("one_torch_thread")
FRAME = pd.DataFrame({"text": ["One text.", "Another."]})
DDF = dd.from_pandas(FRAME, npartitions=1)
INTERNAL = ("TextMapper", "PartitionMap", "ABCMeta", "Chain", "builtins", "__init__")


@pytest.fixture
def domain(checkpoint):
    return DomainClassifier(model=checkpoint("domain"), autocast=False)


@pytest.mark.parametrize(
    ("slip", "cure"),
    [
        (lambda d: DDF.pipe(DomainClassifier), "ddf.pipe(DomainClassifier())"),
        (lambda d: DomainClassifier(FRAME), "DomainClassifier()(ddf)"),
        (lambda d: DomainClassifier("nvidia/x"), "DomainClassifier(model='nvidia/x')"),
        (lambda d: DistributedDataClassifier("x"), "DistributedDataClassifier(model='x')"),
        (lambda d: classify(d, DDF), "classify(ddf, [DomainClassifier()])"),
        (lambda d: classify([d], FRAME), "classify(ddf, [DomainClassifier()])"),
        (lambda d: classify(DDF, DomainClassifier), "pass [DomainClassifier()]"),
        (lambda d: classify(DDF, [d, DomainClassifier]), "write DomainClassifier()"),
        (lambda d: d(None), "got a NoneType: pass a DataFrame"),
        (lambda d: d(["a text", 5]), "text 1 of the list is a int: pass texts"),
    ],
)
def test_a_slip_is_answered_with_what_to_write(domain, slip, cure):
    with pytest.raises(TypeError) as told:
        slip(domain)
    assert cure in str(told.value)
    assert not any(word in str(told.value) for word in INTERNAL)


def test_texts_give_a_frame(domain):
    texts = ["One text.", None, "", "lone \ud800"]
    found = domain(texts)
    assert found["text"].tolist() == texts
    pd.testing.assert_frame_equal(found, domain(pd.DataFrame({"text": texts}, dtype=object)))
    assert domain("One text.")["domain_pred"].tolist() == found["domain_pred"].tolist()[:1]
    assert list(domain([]).columns) == ["text", "domain_pred"]


def test_several_classifiers_take_texts_too(domain, checkpoint):
    education = FineWebEduClassifier(model=checkpoint("fineweb-edu"), text_field="body")
    found = classify(["One text."], [domain, education])
    assert found.equals(
        Chain((domain, education))(
            pd.DataFrame({"text": ["One text."], "body": "One text."}, dtype=object)
        )
    )


@pytest.mark.parametrize("use", [read_files, lambda url: to_parquet(FRAME, url)])
def test_a_missing_package_for_urls_is_named(monkeypatch, use):
    entry = {"class": "no_such_package.Store", "err": "Install no_such_package to access it"}
    monkeypatch.setitem(known_implementations, "nowhere", entry)
    words = r"nowhere://bucket/a.parquet needs no_such_package, .*pip install no_such_package"
    with pytest.raises(ModuleNotFoundError, match=words):
        use("nowhere://user:secret@bucket/a.parquet")


def test_a_missing_backbone_says_what_it_is_for(checkpoint, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubUnreachableError) as told:
        DomainClassifier(model=checkpoint("domain"), base_model="owner/backbone")(DDF)
    (note,) = told.value.__notes__
    assert note.startswith("owner/backbone is the backbone that the model is built on")
    assert "base_model=" in note


@pytest.fixture(scope="module")
def client():
    with local_client() as client:
        yield client


def test_under_distributed_the_message_comes_first_and_the_traceback_below(domain, client):
    with dask.config.set({"dataframe.convert-string": False}):
        texts = pd.DataFrame({"text": ["a", "b", "c", 5]}, dtype=object, index=[7, 8, 9, 10])
        lazy = domain(dd.from_pandas(texts, npartitions=2))
    with pytest.raises(TypeError) as told:
        lazy.compute()
    cure = "row 1 (index label 10) of column 'text' holds a int, not a string: convert the column"
    assert str(told.value).startswith(cure)
    (note,) = told.value.__notes__
    assert note.startswith("Raised in task (")
    assert "frames/pandas.py" in note
    assert "not a string" not in note.splitlines()[-1]
    assert not [entry for entry in told.traceback if "frames" in str(entry.path)]


def test_under_distributed_causes_stand_in_the_note(client):
    with pytest.raises(ValueError, match="what to do") as told:
        client.submit(message_first(fail_with_a_cause)).result()
    assert told.value.__cause__ is None
    assert "KeyError: 'the cause'" in told.value.__notes__[0]


def test_a_command_shows_no_frames_of_a_failed_embedding(client):
    """Commands print notes, so that what their tasks raise has none with frames."""

    class Failing:
        def map_frame(self, frame):
            raise ValueError("what to do")

    settings = SemanticDuplicates(embedder="a/model")
    with pytest.raises(ValueError, match="what to do") as told:
        client.submit(embedding_frame, FRAME, 0, settings, Failing()).result()
    assert not hasattr(told.value, "__notes__")


def test_elsewhere_an_error_keeps_its_frames_and_causes():
    with pytest.raises(ValueError, match="what to do") as told:
        message_first(fail_with_a_cause)()
    assert isinstance(told.value.__cause__, KeyError)
    assert not hasattr(told.value, "__notes__")
    assert told.traceback[-1].name == "fail_with_a_cause"


def fail_with_a_cause():
    try:
        raise KeyError("the cause")
    except KeyError as err:
        raise ValueError("what to do") from err

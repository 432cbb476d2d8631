"""Settings as numpy's scalars and arrays and as columns of frames: the same as Python's own."""

import inspect
import json
from dataclasses import fields

import numpy as np
import pandas as pd
import pytest
from dask.tokenize import tokenize

from gpuclassify import (
    DomainClassifier,
    Embedder,
    FuzzyDuplicates,
    HeadClassifier,
    InstructionDataGuardClassifier,
    JsonlReader,
    JsonlWriter,
    PatternSpans,
    Pipeline,
    PromptClassifier,
    SemanticDuplicates,
    Signals,
    ZeroShotClassifier,
    classify,
    curator,
    get_client,
    keep_top,
    score_edges,
)
from gpuclassify.classifiers import FAMILIES
from gpuclassify.classifiers.questions.answers import Choice, Free
from gpuclassify.jobs.stages import as_chain
from gpuclassify.settings.checks import HubName

MAPPERS = {**FAMILIES, "embedder": Embedder}
QUESTIONS = [name for name, kind in FAMILIES.items() if issubclass(kind, PromptClassifier)]
SETTINGS = {  # of mappers, with Python's value
    "max_chars": (np.int64(9), 9),
    "max_seq_length": (np.uint8(99), 99),
    "batch_size": (np.array(8), 8),
    "autocast": (np.bool_(False), False),
    "overwrite": (np.True_, True),
    "window_overlap": (np.int32(3), 3),
    "min_score": (np.float32(0.5), 0.5),
    "min_confidence": (np.float16(0.25), 0.25),
    "text_field": (np.str_("body"), "body"),
    "normalize": (np.bool_(True), True),
    "keep_raw": (np.bool_(True), True),
}


def all_types(value):
    if isinstance(value, tuple):
        return set().union(*map(all_types, value))
    if isinstance(value, Choice):
        return all_types(value.options)
    return {str, int} if isinstance(value, Free) else {type(value)}


@pytest.mark.parametrize("name", MAPPERS)
def test_mappers_take_numpys_numbers_flags_and_texts(name):
    kind = MAPPERS[name]
    names = [n for n in SETTINGS if n in inspect.signature(kind).parameters]
    if name in ("aegis", "zero-shot", *QUESTIONS):  # has no windows, or only for one answer
        names.remove("window_overlap")
    # Whose texts are of two columns, or counted whole.
    if name in ("qwen3guard-response", "wildguard", "tokens"):
        names.remove("max_chars")
    if "criteria" in kind.defaults:  # which give no answer to keep
        names.remove("keep_raw")
    more = {"long_text": "windows"} if "window_overlap" in names else {}
    if "score_label" in inspect.signature(kind).parameters:  # which min_score is about
        more["score_label"] = "__label__hq"
    if kind is PromptClassifier:
        more |= {"prompt": "{body}", "answers": ["yes", "no"]}
    if kind is ZeroShotClassifier:
        more["labels"] = ["yes", "no"]
    given = {n: SETTINGS[n][0] for n in names}
    own = {n: SETTINGS[n][1] for n in names}
    if kind not in (PatternSpans, Signals):
        more["model"] = "owner/model"
    one, other = (kind(**settings, **more) for settings in (given, own))
    assert len(names) >= (2 if name in ("tokens", "patterns", "signals") else 5)
    assert one == other and repr(one) == repr(other)
    assert tokenize(one.options) == tokenize(other.options)
    values = [getattr(one.options, field.name) for field in fields(one.options)]
    plain = {str, int, float, bool, type(None)}
    assert set().union(*map(all_types, values)) <= plain | {HubName}  # of a class's own model


@pytest.mark.parametrize(
    "as_given",
    [np.array, pd.Series, pd.Index, set, lambda labels: [*map(np.str_, labels)], pd.Categorical],
    ids=["array", "series", "index", "set", "texts", "categories"],
)
def test_labels_may_be_arrays_and_columns(as_given):
    given = DomainClassifier(model="m", filter_by=as_given(["Sports", "Games"]))
    assert given == DomainClassifier(model="m", filter_by=["Games", "Sports"])
    assert all_types(given.options.filter_by) == {str}
    labels = ["b", "a"]
    if as_given is not set:  # which has no order
        given = DomainClassifier(model="m", labels=as_given(labels))
        assert given == DomainClassifier(model="m", labels=labels)


UNORDERED = {
    "answers": lambda given: PromptClassifier(model="m", prompt="{text}", answers=given),
    "fields": lambda given: PromptClassifier(
        model="m", prompt="{text}", answer="{a}", fields={"a": given}
    ),
    "spellings": lambda given: PromptClassifier(
        model="m", prompt="{text}", answers={"a": given, "c": "d"}
    ),
    "labels": lambda given: DomainClassifier(model="m", labels=given),
    "labels of heads": lambda given: HeadClassifier(heads={"a": "b"}, labels={"a": given}),
    "heads": lambda given: HeadClassifier(heads=type(given)([("a", "b"), ("c", "d")])),
    "keep_by": lambda given: FuzzyDuplicates(keep_by=given),
    "mappers": lambda given: classify(["a text"], given),
    "stages": lambda given: Pipeline(given),
    "stages of a recipe": lambda given: as_chain(given),
    "stages of Curator": lambda given: curator.Pipeline("name", stages=given),
    "modules": lambda given: curator.Sequential(given),
    "paths": lambda given: JsonlReader(given),
    "columns": lambda given: JsonlReader("in.jsonl", fields=given),
    "folders": lambda given: JsonlWriter("out/", partition_by=given),
    "scores": lambda given: score_edges(pd.DataFrame({"a": [1.0], "b": [2.0]}), given),
}


@pytest.mark.parametrize("kind", [set, frozenset])
@pytest.mark.parametrize("call", UNORDERED.values(), ids=UNORDERED)
def test_what_has_no_order_is_refused_where_order_matters(call, kind):
    with pytest.raises(TypeError, match=r"without order: pass a list|is a (frozen)?set: options"):
        call(kind(["a", "b"]))


@pytest.mark.parametrize("name", ["answers", "labels", "keep_by", "paths", "columns", "folders"])
def test_the_keys_of_a_dict_have_an_order(name):
    UNORDERED[name](dict.fromkeys(["b", "a"]).keys())


def test_scores_by_label_and_decisions_may_be_numpys():
    given = DomainClassifier(model="m", min_score={np.str_("Games"): np.float32(0.5)})
    assert given == DomainClassifier(model="m", min_score={"Games": 0.5})
    guard = InstructionDataGuardClassifier(filter_by=np.array([True]))
    assert guard == InstructionDataGuardClassifier(filter_by=True)
    assert guard.options.filter_by == (True,) and type(guard.options.filter_by[0]) is bool


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (FuzzyDuplicates, {"char_ngrams": 9, "threshold": 0.5, "verify": True, "seed": 3}),
        (SemanticDuplicates, {"n_clusters": 5, "threshold": 0.5, "max_removed_share": 0.25}),
    ],
)
def test_deduplication_takes_them(kind, settings):
    given = kind(**{name: np.array(value)[()] for name, value in settings.items()})
    assert repr(given) == repr(kind(**settings))
    assert tokenize(given) == tokenize(kind(**settings))
    assert kind(keep_by=pd.Index(["a", "b"])).keep_by == ("a", "b")


def test_jobs_scores_limits_and_clusters_take_them(domain, monkeypatch):
    reader = JsonlReader("in.jsonl", part_bytes=np.int64(99), fields=np.array(["id"]))
    assert repr(reader) == repr(JsonlReader("in.jsonl", part_bytes=99, fields=["id"]))
    assert type(Pipeline(examples=np.int64(3)).examples) is int
    with pytest.raises(ValueError, match="sample_rows=0 must be at least 1"):
        Pipeline().plan(sample_rows=np.int64(0))
    frame = pd.DataFrame({"a": np.arange(20.0), "b": np.arange(20.0)})
    edges = score_edges(frame, frame.columns, n=np.int64(4))
    assert edges == score_edges(frame, ["a", "b"], n=4)
    assert json.dumps(edges.n) == "4"
    assert len(keep_top(frame, "a", share=np.float64(0.25))) == 5
    assert len(classify(["a", "b", "c"], [domain()], limit=np.int64(2))) == 2
    monkeypatch.setattr("gpuclassify.cluster.security.make_security", lambda given: pytest.fail())
    with pytest.raises(ValueError, match="threads_per_worker=0 must be at least 1"):
        get_client("cpu", n_workers=np.int64(1), threads_per_worker=np.int64(0))

"""Saved results: read from any store, and files of strangers refused or harmless."""

import copy
import itertools
import json
import math

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from huggingface_hub import HfFileSystem, constants

from gpuclassify import (
    ApplyThresholds,
    AssignClusters,
    Clusters,
    Mix,
    ScoreBuckets,
    ScoreEdges,
    Thresholds,
    score_edges,
)
from tests.hub_server import Answer, File, HttpServer, HubServer, ranged_answer
from tests.s3_server import S3Server

STEP = 7  # of the changed values: 1 tries all of them, in two minutes
LISTS = pd.ArrowDtype(pa.list_(pa.float32()))
HOSTILE = "\x1b[31m\x9b2J\u202egnp\x00\n"


def rows(count=600):
    rng = np.random.default_rng(3)
    score = rng.uniform(size=count)
    return pd.DataFrame(
        {
            "id": np.arange(count),
            "score": score,
            "good": rng.uniform(size=count) < score,
            "topic": rng.choice(["a", "b"], count),
            "tokens": rng.integers(1, 9, count),
            "embedding": pd.Series([*map(list, rng.normal(size=(count, 2)))], dtype=LISTS),
        }
    )


def thresholds(**options):
    return Thresholds.fit(rows(), score="score", label="good", by="topic", recall=0.7, **options)


RESULTS = {
    "edges": lambda: score_edges(rows(), "score", n=4, by="topic"),
    "thresholds": lambda: thresholds(calibration="sigmoid", small_groups="pool"),
    "isotonic": lambda: thresholds(calibration="isotonic"),
    "clusters": lambda: Clusters.fit(rows(), 3),
    "mix": lambda: Mix.plan(rows(), by=["topic", "good"], tokens=9_000),
}
MAPPERS = {
    ScoreEdges: lambda result: ScoreBuckets(result),
    Thresholds: lambda result: ApplyThresholds(result, keep_field="keep"),
    Clusters: lambda result: AssignClusters(result, distance_field="distance"),
}


class WebServer(HttpServer):
    content = b""

    def _answer(self, call):
        return ranged_answer(self.content, call, {}) if call.query else Answer(200, self.content)


@pytest.fixture(params=["path", "file", "s3", "http", "hf"])
def stored(request, tmp_path, monkeypatch):
    """A function that stores a result as people do; returns its URL and storage options."""

    def store(result):
        if request.param in ("path", "file"):
            url, options = f"{tmp_path}/result.json", None
            if request.param == "file":
                url = f"file://{url}"
            result.save(url)
        elif request.param == "s3":
            server = request.getfixturevalue("s3")
            url, options = f"s3://{server.bucket}/deep/result.json", server.options
            result.save(url, storage_options=options)
        elif request.param == "http":
            server = request.getfixturevalue("web")
            server.content = result.as_json().encode()
            url, options = f"{server.url}/result.json?signature=c0ffee", None
        else:
            server = request.getfixturevalue("hub")
            server.add("owner/name", {"result.json": File(result.as_json().encode())})
            url, options = "hf://datasets/owner/name/result.json", {"endpoint": server.url}
        return url, options

    return store


@pytest.fixture
def s3():
    with S3Server() as server:
        yield server


@pytest.fixture
def web():
    with WebServer() as server:
        yield server


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    HfFileSystem.clear_instance_cache()
    with HubServer([], "datasets") as server:
        yield server
    HfFileSystem.clear_instance_cache()


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_read_from_any_store(name, stored, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = RESULTS[name]()
    url, options = stored(result)
    assert type(result).load(url, storage_options=options) == result
    assert {path.name for path in tmp_path.iterdir()} <= {"result.json"}  # no folder "s3:"
    if options is None and type(result) in MAPPERS:
        frame, make = rows(), MAPPERS[type(result)]
        pd.testing.assert_frame_equal(make(url)(frame), make(result)(frame))
        assert "c0ffee" not in repr(make(url))


def test_what_is_missing_or_cannot_be_written_is_named(web, s3, tmp_path):
    edges = RESULTS["edges"]()
    for url in (f"{tmp_path}/none.json", f"s3://{s3.bucket}/none.json"):
        with pytest.raises(FileNotFoundError, match=r"none\.json"):
            ScoreEdges.load(url, storage_options=s3.options if "://" in url else None)
    for url in (f"{web.url}/a.json?signature=c0ffee", "hf://datasets/owner/name/a.json"):
        with pytest.raises(ValueError, match=r"a\.json cannot be written to") as caught:
            edges.save(url)
        assert "c0ffee" not in str(caught.value)
    web.content = b"[]"
    with pytest.raises(ValueError, match=r"a\.json holds no edges of buckets") as caught:
        ScoreEdges.load(f"{web.url}/a.json?signature=c0ffee")
    assert "c0ffee" not in str(caught.value)


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


WRONG = [
    *(None, True, -1, 0, 3, 10**9, 10**19, -(10**400), 1e308, -0.5, math.nan, math.inf, -math.inf),
    *("", "x", HOSTILE, "[" * 5_000, [], [[]], [1, "x"], {}, {"a": 1}, nested(200)),
]  # fmt: skip


def changed(values, place=()):
    """Every copy of the values with one of them replaced, removed, or under another name."""
    node = values
    for step in place:
        node = node[step]
    for wrong in WRONG if place else ():
        yield with_value(values, place, lambda parent, step, wrong=wrong: {step: wrong})
    names = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for name in [*names][:6]:
        if isinstance(node, dict):
            yield with_value(values, (*place, name), lambda parent, step: {})
            for other in ("x", "null", HOSTILE, f'"{HOSTILE}"', "[" * 5_000, '{"a": 1}'):
                item = node[name]
                yield with_value(values, (*place, name), lambda p, s, o=other, i=item: {o: i})
        yield from changed(values, (*place, name))


def with_value(values, place, new):
    whole = copy.deepcopy(values)
    parent = whole
    for step in place[:-1]:
        parent = parent[step]
    items = new(parent, place[-1])
    if isinstance(parent, dict):
        del parent[place[-1]]
        parent.update(items)
    else:
        parent[place[-1]] = items[place[-1]]
    return whole


@pytest.mark.parametrize("name", RESULTS)
def test_any_other_value_is_refused_by_the_files_name_or_harmless(name, tmp_path):
    result, path, frame = RESULTS[name](), tmp_path / "strange.json", rows(20)
    kind, values = type(result), json.loads(result.as_json())
    del values["digest"]
    outcomes = {"refused": 0, "used": 0}
    for other in itertools.islice(changed(values), 0, None, STEP):
        path.write_text(json.dumps(other))
        try:
            found = kind.load(path)
        except ValueError as err:
            assert f"{path} holds no {kind.what}" in str(err)
            assert str(err).replace("\n", "").isprintable()
            outcomes["refused"] += 1
            continue
        outcomes["used"] += 1
        assert repr(found).replace("\n", "").isprintable()
        if kind not in (ScoreEdges, Clusters):
            assert found.html()
        if kind not in MAPPERS:
            continue
        mapper = MAPPERS[kind](found)
        assert repr(mapper).isprintable()
        try:
            made = mapper(frame)
        except ValueError as err:
            assert "no column" in str(err) or "fitted to" in str(err)
        else:
            assert len(made) == len(frame)
    assert min(outcomes.values()) > 2


@pytest.mark.parametrize("kind", [ScoreEdges, Thresholds, Mix, Clusters])
@pytest.mark.parametrize(
    "content",
    [b"", b"x", b"\xff\xfe", b"[]", b"{}", b'"x"', b"[" * 100_000, b'{"n": ' * 100_000,
     b'{"n": ' + b"9" * 100_000 + b"}", b'{"groups": 3, "cells": 3, "edges": 3}'],
    ids=lambda content: ascii(content[:12]),
)  # fmt: skip
def test_files_that_hold_no_result_are_named(kind, content, tmp_path):
    path = tmp_path / "strange.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path} holds no {kind.what}"):
        kind.load(path)

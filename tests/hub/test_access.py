"""Gated and private models: a token opens them, refusals tell where to ask and show no token."""

import logging
import pickle

import pytest

from gpuclassify import hub
from tests.hub.small_model import CONFIG, GOOD_TOKEN, NAME, OTHER_TOKEN, SHAPES, checkpoint, write


def test_a_gated_model_without_a_token_tells_where_to_ask(server, cache):
    sha = server.add(NAME, checkpoint(), is_gated=True, readers={GOOD_TOKEN}).sha_of()
    pattern = r"acme/topics is gated.*https://huggingface.co/acme/topics.*token= or HF_TOKEN"
    pinned = hub.Identity(NAME, sha, False)
    for read in (hub.resolve, lambda name, cache_dir: hub.download(pinned, cache_dir=cache_dir)):
        with pytest.raises(hub.ModelAccessError, match=pattern):
            read(NAME, cache_dir=cache)
    for read_pinned in (
        hub.read_tensor_shapes,
        lambda *a, **k: hub.read_json(*a, "config.json", **k),
    ):
        with pytest.raises(hub.ModelAccessError, match=pattern):
            read_pinned(pinned, cache_dir=cache)


@pytest.mark.parametrize("kind", ["is_gated", "is_private"])
def test_a_remembered_token_opens_a_model(server, cache, kind):
    server.add(NAME, checkpoint(), **{kind: True}, readers={GOOD_TOKEN})
    hub.remember_token(NAME, f" {GOOD_TOKEN}\n")
    identity = hub.resolve(NAME, cache_dir=cache)
    assert hub.read_json(identity, "config.json", cache_dir=cache) == CONFIG
    assert hub.read_tensor_shapes(identity, cache_dir=cache) == SHAPES
    assert (hub.download(identity, cache_dir=cache) / "model.safetensors").is_file()
    to_storage = [request for request in server.requests if "/store/" in request.path]
    assert to_storage and not any(request.has_token for request in to_storage)


@pytest.mark.parametrize(
    ("kind", "token", "words"),
    [
        ("is_gated", OTHER_TOKEN, "the token in use has no access"),
        ("is_private", None, "private model needs a token"),
        (None, "hf_unknown", "refused access to acme/topics"),
    ],
)
def test_a_token_that_does_not_open_a_model_is_told(server, cache, kind, token, words):
    server.add(NAME, checkpoint(), readers={GOOD_TOKEN}, **({kind: True} if kind else {}))
    if token:
        hub.remember_token(NAME, token)
    with pytest.raises(hub.ModelAccessError, match=words) as caught:
        hub.resolve(NAME, cache_dir=cache)
    assert kind != "is_private" or isinstance(caught.value, hub.ModelNotFoundError)


def test_hf_token_is_used_where_none_is_remembered(server, cache, monkeypatch):
    sha = server.add(NAME, checkpoint(), is_gated=True, readers={GOOD_TOKEN}).sha_of()
    monkeypatch.setenv("HF_TOKEN", GOOD_TOKEN)
    assert hub.resolve(NAME, cache_dir=cache).revision == sha
    monkeypatch.setenv("HF_TOKEN", OTHER_TOKEN)
    with pytest.raises(hub.ModelAccessError, match="the token in use has no access"):
        hub.resolve(NAME, cache_dir=cache)


def failing_reads(server, cache):
    """Every kind of refusal and failure of the Hub, met with a token in hand."""
    sha = server.add("acme/gated", checkpoint(), is_gated=True).sha_of()
    server.add(NAME, {"model.safetensors": b""})
    pinned = hub.Identity("acme/gated", sha, False)
    reads = [
        lambda: hub.resolve("acme/gated", cache_dir=cache),
        lambda: hub.resolve("acme/missing", cache_dir=cache),
        lambda: hub.resolve(NAME, "v9", cache_dir=cache),
        lambda: hub.read_json(pinned, "config.json", cache_dir=cache),
        lambda: hub.read_tensor_shapes(pinned, cache_dir=cache),
        lambda: hub.read_tensor_shapes(hub.resolve(NAME, cache_dir=cache), cache_dir=cache),
        lambda: hub.download(pinned, cache_dir=cache),
    ]
    for name in (NAME, "acme/gated", "acme/missing"):
        hub.remember_token(name, OTHER_TOKEN)
    return reads


def test_tokens_are_in_no_error_log_or_pickle(server, cache, caplog, tmp_path):
    with caplog.at_level(logging.DEBUG):
        for read in failing_reads(server, cache):
            with pytest.raises((OSError, ValueError)) as caught:
                read()
            error = caught.value
            assert error.__cause__ is error.__context__ is None, "the client's errors hold headers"
            assert OTHER_TOKEN not in str(error) + repr(error) + repr(vars(error))
            assert OTHER_TOKEN.encode() not in pickle.dumps(error)
    assert any(request.has_token for request in server.requests)
    assert OTHER_TOKEN not in caplog.text
    identity = hub.resolve(write(tmp_path / "model", checkpoint()))
    assert OTHER_TOKEN not in repr(identity)
    assert OTHER_TOKEN.encode() not in pickle.dumps(identity)

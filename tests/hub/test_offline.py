"""Without a network, or without access, the cache serves what it holds whole."""

import logging
import shutil

import pytest

from gpuclassify import hub
from tests.hub.small_model import NAME, SHAPES, checkpoint


def test_offline_work_uses_the_cache_and_says_what_it_lacks(server, cache, run_elsewhere):
    sha = server.add(NAME, checkpoint()).sha_of()
    hub.download(hub.resolve(NAME, cache_dir=cache), cache_dir=cache)
    server.requests.clear()
    code = f"""
        from gpuclassify import hub
        identity = hub.resolve({NAME!r}, cache_dir={str(cache)!r})
        print(identity.revision)
        print(len(hub.read_tensor_shapes(identity, cache_dir={str(cache)!r})))
        print(hub.read_json(identity, "config.json", cache_dir={str(cache)!r})["hidden_size"])
        print(hub.read_json(identity, "missing.json", cache_dir={str(cache)!r}))
        print((hub.download(identity, cache_dir={str(cache)!r}) / "model.safetensors").is_file())
        pinned = hub.Identity("acme/other", "0" * 40, False)
        for read in (
            lambda: hub.resolve({NAME!r}, "v2", cache_dir={str(cache)!r}),
            lambda: hub.resolve("acme/other"),
            lambda: hub.read_json(pinned, "config.json"),
            lambda: hub.read_tensor_shapes(pinned),
            lambda: hub.download(pinned),
        ):
            try:
                read()
            except hub.HubUnreachableError as err:
                assert "If it is gated, ask for access at https://huggingface.co/" in str(err)
                print("HF_HUB_OFFLINE=1" in str(err) or "outgoing traffic" in str(err))
    """
    told = run_elsewhere(
        code, HF_HUB_OFFLINE="1", HF_ENDPOINT=server.url, HF_HOME=str(cache / "empty")
    )
    assert told == [sha, str(len(SHAPES)), "4", "None", "True", *["True"] * 5]
    assert server.requests == []


def test_a_lost_network_falls_back_to_the_cache(server, cache, unplug, caplog):
    server.add(NAME, checkpoint())
    identity = hub.resolve(NAME, cache_dir=cache)
    folder = hub.download(identity, cache_dir=cache)
    # As another library caches it, under a path that the client library has not seen.
    copied = folder.parents[3] / "copied"
    shutil.copytree(cache, copied, ignore=lambda _, names: {"trees"} & set(names), symlinks=True)
    unplug()
    with caplog.at_level(logging.WARNING, logger="gpuclassify.hub"):
        assert hub.resolve(NAME, cache_dir=cache) == identity
    assert "using the cached commit of acme/topics" in caplog.text
    assert hub.download(identity, cache_dir=cache).is_dir()
    assert (hub.download(identity, cache_dir=copied) / "model.safetensors").is_file()
    assert hub.read_tensor_shapes(identity, cache_dir=copied) == SHAPES
    message = r"acme/topics at main.*ConnectError.*hf download"
    with pytest.raises(hub.HubUnreachableError, match=message):
        hub.resolve(NAME, cache_dir=cache / "empty")


def test_a_partly_cached_model_is_not_handed_out(server, cache, unplug):
    server.add(NAME, checkpoint())
    identity = hub.resolve(NAME, cache_dir=cache)
    hub.read_json(identity, "config.json", cache_dir=cache)
    server.repos[NAME].is_private = True
    with pytest.raises(hub.ModelAccessError, match="private model needs a token"):
        hub.download(identity, cache_dir=cache)
    unplug()
    for read in (hub.download, hub.read_tensor_shapes):
        with pytest.raises(hub.HubUnreachableError, match=r"not \(completely\) in the.*Connect"):
            read(identity, cache_dir=cache)


@pytest.mark.parametrize("outcome", [503, 429, "drop"])
def test_a_hub_that_fails_after_it_knew_the_model_falls_back_to_the_cache(server, cache, outcome):
    words = "acme/topics at main is not" + (".*the Hub answered 503" if outcome == 503 else "")
    server.add(NAME, checkpoint())
    with pytest.raises(hub.HubUnreachableError, match=words):
        server.fail("GET", "/api/models/", *[outcome] * 3)
        hub.resolve(NAME, cache_dir=cache)
    identity = hub.resolve(NAME, cache_dir=cache)
    server.fail("GET", "/api/models/", *[outcome] * 3)
    assert hub.resolve(NAME, cache_dir=cache) == identity

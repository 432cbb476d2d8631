"""Tokens are checked when they are given, and no error, log or pickle shows one."""

import logging
import pickle

import pytest

from gpuclassify import hub
from tests.hub.small_model import NAME, OTHER_TOKEN, checkpoint, write


@pytest.mark.parametrize("token", ["", "  ", "hf_se cret", "hf_se\ncret", "hf_sécret"])
def test_a_malformed_token_is_refused_without_showing_it(token):
    with pytest.raises(ValueError, match="the token given for acme/topics") as caught:
        hub.remember_token(NAME, token)
    assert "cret" not in str(caught.value)
    assert hub.token_for(NAME) is None


def chain(error):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def failing_reads(server, cache):
    """Every kind of refusal and failure of the Hub, met with a token in hand."""
    sha = server.add("acme/gated", checkpoint(), is_gated=True)
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
            links = list(chain(caught.value))
            assert len(links) > 1
            for link in links:
                response = getattr(link, "response", None)
                carried = [dict(response.request.headers)] if response is not None else []
                shown = [str(link), repr(link), repr(vars(link)), repr(carried)]
                assert OTHER_TOKEN not in "".join(shown)
                assert OTHER_TOKEN.encode() not in pickle.dumps(link)
            for link in links[1:]:
                assert link.__traceback__ is None  # its frames would hold the request's headers
    assert any(request.has_token for request in server.requests)
    assert OTHER_TOKEN not in caplog.text
    identity = hub.resolve(write(tmp_path / "model", checkpoint()))
    assert OTHER_TOKEN not in repr(identity)
    assert OTHER_TOKEN.encode() not in pickle.dumps(identity)


def test_the_client_library_would_leak_the_token_that_is_stripped_here(server, cache):
    """Guards the test above: without this module's care the chain does hold the token."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    with pytest.raises(HfHubHTTPError) as caught:
        HfApi().model_info("acme/missing", token=OTHER_TOKEN)
    assert OTHER_TOKEN.encode() in pickle.dumps(caught.value)

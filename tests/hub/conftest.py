"""A Hub of this machine, and an empty cache: no model comes from elsewhere, and no token."""

import os
import textwrap

import pytest
from huggingface_hub import constants

from gpuclassify.hub import calls
from gpuclassify.workers import secrets
from tests.hub.small_model import GOOD_TOKEN, OTHER_TOKEN
from tests.hub_server import HubServer


def use_endpoint(monkeypatch, url):
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture(autouse=True)
def no_tokens(monkeypatch, tmp_path):
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(secrets, "_secrets", {})


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(calls, "FIRST_WAIT_SECONDS", 0.01)


@pytest.fixture
def server(monkeypatch):
    with HubServer(tokens=[GOOD_TOKEN, OTHER_TOKEN]) as running:
        use_endpoint(monkeypatch, running.url)
        yield running


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def unplug(monkeypatch):
    """Cuts the network."""
    return lambda: use_endpoint(monkeypatch, "http://127.0.0.1:9")  # nothing listens there


@pytest.fixture
def run_elsewhere(run_python, monkeypatch):
    """Runs code in a fresh process: the Hub client reads its settings when it is imported."""
    for variable in [name for name in os.environ if name.startswith("HF_")]:
        monkeypatch.delenv(variable)

    def run(code, **environment):
        return run_python(textwrap.dedent(code), HF_HUB_DISABLE_XET="1", **environment).split()

    return run

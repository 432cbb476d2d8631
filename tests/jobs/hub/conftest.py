"""A dataset server, and an environment in which the real client talks to it alone."""

import pytest
from hub_client import TOKEN
from huggingface_hub import HfFileSystem, constants

from gpuclassify.hub import calls
from gpuclassify.workers import secrets
from tests.hub_server import HubServer


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The server; HF_TOKEN and logins of this machine are out of the way, here and in workers."""
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(secrets, "_secrets", {})
    HfFileSystem.clear_instance_cache()
    with HubServer([TOKEN], "datasets") as server:
        yield server
    HfFileSystem.clear_instance_cache()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(calls, "FIRST_WAIT_SECONDS", 0.01)

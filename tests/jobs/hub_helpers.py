"""A dataset server, and an environment in which the real client talks to it alone."""

import contextlib
import pickle
import runpy
import traceback
from pathlib import Path

import dask.dataframe as dd
import pandas as pd
from huggingface_hub import HfFileSystem, constants

from gpuclassify.hub import tokens
from gpuclassify.jobs.hub.writer import push_to_hub

_MODULE = runpy.run_path(str(Path(__file__).parents[1] / "hub_dataset_server.py"))
DatasetServer, File = _MODULE["DatasetServer"], _MODULE["File"]
TOKEN = "hf_thistokenissecret"
REPO = "acme/books"
PARTS = 6


@contextlib.contextmanager
def serving(monkeypatch, tmp_path):
    """The server; HF_TOKEN and logins of this machine are out of the way, here and in workers."""
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(tokens, "_tokens", {})
    HfFileSystem.clear_instance_cache()
    with DatasetServer(TOKEN) as server:
        yield server
    HfFileSystem.clear_instance_cache()


def push_in_process(folder, url):
    """A client, to be killed."""
    constants.HF_HUB_DISABLE_XET = True
    lazy = dd.from_pandas(pd.read_parquet(folder / "frame.parquet"), npartitions=PARTS)
    push_to_hub(lazy, REPO, staging=str(folder / "out"), token=TOKEN, endpoint=url)


def assert_clean(error, secrets):
    """No secret is in an error, in what it was raised from, or in requests that they hold."""
    assert "response" not in vars(error)
    assert error.__cause__ is error.__context__ is None, "the client's errors hold headers"
    told = "".join(traceback.format_exception(error)) + repr(vars(error))
    assert not any(secret in told for secret in secrets)
    assert not any(secret.encode() in pickle.dumps(error) for secret in secrets)

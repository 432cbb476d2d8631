"""Clients of the dataset server: one to be killed, and what the errors of any must not hold."""

import pickle
import traceback

import dask.dataframe as dd
import pandas as pd
from huggingface_hub import constants

from gpuclassify.jobs.pipeline import push_to_hub

TOKEN = "hf_thistokenissecret"
REPO = "acme/books"
PARTS = 6


def push_in_process(folder, url):
    """A client, to be killed."""
    constants.HF_HUB_DISABLE_XET = True
    lazy = dd.from_pandas(pd.read_parquet(folder / "frame.parquet"), npartitions=PARTS)
    options = {"token": TOKEN, "endpoint": url, "output_bytes": 0}
    push_to_hub(lazy, REPO, staging=str(folder / "out"), **options)


def assert_clean(error, secrets):
    """No secret is in an error, in what it was raised from, or in requests that they hold."""
    assert "response" not in vars(error)
    assert error.__cause__ is error.__context__ is None, "the client's errors hold headers"
    told = "".join(traceback.format_exception(error)) + repr(vars(error))
    assert not any(secret in told for secret in secrets)
    assert not any(secret.encode() in pickle.dumps(error) for secret in secrets)

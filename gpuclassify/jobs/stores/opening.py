"""Choose a store by the protocol of a path or URL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from gpuclassify.jobs.stores.http import HttpStore
from gpuclassify.jobs.stores.hub import BucketStore, HubStore
from gpuclassify.jobs.stores.local import LocalStore
from gpuclassify.jobs.stores.store import ObjectStore, Store

_STORES: dict[str, type[Store]] = {
    **dict.fromkeys(("file", "local"), LocalStore),
    **dict.fromkeys(("http", "https"), HttpStore),
    **dict.fromkeys(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"), ObjectStore),
    "hf": HubStore,
}


def store_type(url: str) -> type[Store]:
    """Return `Store` or its subclass for the protocol of a path or URL, without opening it."""
    if url.startswith("hf://buckets/"):
        return BucketStore
    protocol, separator, _ = url.partition("://")
    if "::" in (protocol if separator else url):  # fsspec's chains of URLs
        return Store
    return _STORES.get(protocol, Store) if separator else LocalStore


def open_store(
    path: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    options_name: str = "",
) -> Store:
    """Return a store for a path or URL, such as ``s3://bucket/out``, of the class for its protocol.

    `storage_options` are for fsspec. If they are None, options that this process keeps under
    `options_name` are used, and none without a name.
    """
    url = os.fspath(path)
    options = {} if storage_options is None and not options_name else storage_options
    return store_type(url)(url, options_name, options)

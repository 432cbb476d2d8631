"""Formats and compressions by file name, and URLs without their secrets."""

from __future__ import annotations

import posixpath
import re

PARQUET, JSONL = "parquet", "jsonl"
PARQUET_SUFFIXES = (".parquet", ".pq", ".parq")
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json", ".jsonlines")
# gpuclassify writes files with the first suffix of a codec.
COMPRESSIONS = {
    **{".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz", ".lz4": "lz4"},
    **{".gzip": "gzip", ".zstd": "zstd"},
}
HTTP = ("http://", "https://")
URL = re.compile(r"\b\w++://[^\s'\"]+")  # URL within a text


def file_format(path: str) -> str | None:
    """Return "parquet" or "jsonl" by the extension of a path or URL; None for others.

    JSON lines have the extension ``.jsonl``, ``.ndjson``, ``.json`` or ``.jsonlines``, which may be
    followed by the extension of a compression, as in ``a.jsonl.gz``.
    """
    path = without_query(path).lower()
    if path.endswith(PARQUET_SUFFIXES):
        return PARQUET
    stem = posixpath.splitext(path)[0] if compression(path) else path
    return JSONL if stem.endswith(JSONL_SUFFIXES) else None


def compression(path: str) -> str | None:
    """Return the codec, such as "gzip", by the last extension of a path or URL; None for others."""
    return COMPRESSIONS.get(posixpath.splitext(without_query(path))[1].lower())


def without_query(path: str) -> str:
    """Return an HTTP(S) URL without user, password and query; other URLs and paths unchanged."""
    return redacted(path) if path.startswith(HTTP) else path


def redacted(url: str) -> str:
    """Return a URL of any protocol without user, password and query; a path unchanged.

    Used for messages and records. Except in HTTP(S) URLs, "?" begins a query only if "=" follows.
    """
    return "::".join(map(_redacted, url.split("::")))  # fsspec's chains of URLs


def _redacted(url: str) -> str:
    head, separator, rest = url.partition("://")
    if not separator:
        return url
    query = "[?].*" if url.startswith(HTTP) else "[?][^/?]*=.*"  # "?" may be part of a name
    return f"{head}://{re.sub('^[^/]*@', '', re.sub(query, '', rest, flags=re.DOTALL))}"

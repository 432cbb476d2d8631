"""Ways to deduplicate Parquet files, each run in a process of its own, on one core.

``python -m benchmarks.deduplicators REQUEST`` is that process: REQUEST is a JSON object of the
arguments of a way. Every way reads the documents, writes those that it keeps, and writes the groups
of duplicates: id, group, keep. This file is read in the peers' environment too, so that it imports
nothing at its top that only one of them has.
"""

import json
import os
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

CHARACTERS, WORDS = 24, 5  # of an n-gram
THREADS = ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "NUMBA", "RAYON")
TEXTS = "texts-*.parquet"  # in which no text is null: text-dedup fails on one


def one_thread() -> dict[str, str]:
    """Return environment variables under which libraries start one thread each."""
    return {f"{name}_NUM_THREADS": "1" for name in THREADS} | {"ARROW_IO_THREADS": "1"}


def gpuclassify(documents: Path, out: Path, bands: int, rows: int, verify: bool) -> pd.DataFrame:
    """Deduplicate by n-grams of characters, on Dask's synchronous scheduler."""
    import dask
    import dask.dataframe as dd

    from gpuclassify import FuzzyDuplicates, remove_duplicates

    frame = dd.read_parquet(documents)
    duplicates = FuzzyDuplicates(
        text_field="text",
        id_field="id",
        char_ngrams=CHARACTERS,
        bands=bands,
        rows=rows,
        verify=verify,
    )
    with dask.config.set(scheduler="sync"):
        groups = duplicates(frame).compute()
        found = dd.from_pandas(groups, npartitions=1)
        remove_duplicates(frame, found).to_parquet(out / "kept")
    return groups[["id", "group", "keep"]]


def datasketch(documents: Path, out: Path, bands: int, rows: int, words: bool) -> pd.DataFrame:
    """Deduplicate by `MinHashLSH` with xxHash for SHA-1, batches of one document, and no query.

    Documents that share a band are read from the index's tables, which is faster than asking for
    the neighbours of each document.
    """
    from datasketch import MinHash, MinHashLSH
    from xxhash import xxh32_intdigest

    frames = [pd.read_parquet(path) for path in sorted(documents.iterdir())]
    texts = pd.concat(frames).set_index("id")["text"]
    texts = texts[texts.notna() & (texts != "")]
    ngrams = word_ngrams if words else character_ngrams
    size = bands * rows
    index = MinHashLSH(num_perm=size, params=(bands, rows))
    signatures = MinHash.generator(map(ngrams, texts), num_perm=size, hashfunc=xxh32_intdigest)
    for document, signature in zip(texts.index, signatures, strict=True):
        index.insert(document, signature, check_duplication=False)
    groups = components(table.get(key) for table in index.hashtables for key in table)
    removed = groups.loc[~groups["keep"], "id"]
    (out / "kept").mkdir()
    for number, frame in enumerate(frames):
        frame[~frame["id"].isin(removed)].to_parquet(out / f"kept/{number:05}.parquet")
    return groups


def datatrove(documents: Path, out: Path, bands: int, rows: int, spaces: bool) -> pd.DataFrame:
    """Run the four stages of minhash with FineWeb's n-grams, one worker.

    Words are spaCy's, as published, or whatever stands between spaces, which is faster.
    """
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.pipeline.writers import ParquetWriter
    from datatrove.utils.hashing import HashConfig
    from datatrove.utils.word_tokenizers import WordTokenizer

    class Spaces(WordTokenizer):
        word_tokenize = staticmethod(str.split)
        sent_tokenize = span_tokenize = None

    config = MinhashConfig(WORDS, bands, rows, hash_config=HashConfig(64, "xxhash"))
    reader = ParquetReader(str(documents), id_key="")  # no id of ours: it takes 0 for missing
    signatures, pairs, clusters = (str(out / name) for name in ("signatures", "pairs", "clusters"))
    words = {"language": Spaces()} if spaces else {}
    buffer = {"lines_to_buffer": 10_000}  # 5 records at a time are the default, and slower
    stages: list[tuple[list[Any], int]] = [
        ([reader, MinhashDedupSignature(signatures, config, **words)], 1),
        ([MinhashDedupBuckets(signatures, pairs, config=config, **buffer)], bands),
        ([MinhashDedupCluster(pairs, clusters, config, save_cluster_id=True, **buffer)], 1),
        ([reader, MinhashDedupFilter(clusters), ParquetWriter(str(out / "kept"))], 1),
    ]
    for number, (stage, tasks) in enumerate(stages):
        logs = str(out / f"logs-{number}")
        LocalPipelineExecutor(stage, tasks=tasks, workers=1, logging_dir=logs).run()
    # Places count documents with text, which come first: they are the ids.
    records = (out / "clusters/000000.clusters").read_bytes()
    return groups_of(np.array(list(struct.iter_unpack("<II", records))))


def text_dedup(documents: Path, out: Path, bands: int, rows: int) -> pd.DataFrame:
    """Run text-dedup's minhash command with xxHash and one process, on the files without nulls.

    32-bit hashes, and no process beside its own, took the same time.
    """
    os.environ["HF_HOME"] = str(out / "cache")
    from text_dedup import minhash

    options = {
        "path": "parquet",
        "data_files": str(documents / TEXTS),
        "split": "train",
        "cache_dir": str(out / "cache"),
        "output": str(out / "kept"),
        "column": "text",
        "ngram": WORDS,
        "num_perm": bands * rows,
        "b": bands,
        "r": rows,
        "hash_func": "xxh3",
        "num_proc": 1,
    }
    arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    minhash.main(arguments, standalone_mode=False)
    return groups_of(np.array([(key, minhash.uf.find(key)) for key in list(minhash.uf.parent)]))


def character_ngrams(text: str) -> set[str]:
    """Return the distinct n-grams of characters; a shorter text is one n-gram."""
    return {text[at : at + CHARACTERS] for at in range(max(1, len(text) - CHARACTERS + 1))}


def word_ngrams(text: str) -> set[str]:
    """Return the distinct n-grams of lower-case words; a shorter text is one n-gram."""
    words = text.lower().split()
    return {" ".join(words[at : at + WORDS]) for at in range(max(1, len(words) - WORDS + 1))}


def components(lists: Iterable[Iterable[int]]) -> pd.DataFrame:
    """Return the groups of documents that some list, or a chain of lists, connects."""
    parents: dict[int, int] = {}

    def root(document: int) -> int:
        while parents.setdefault(document, document) != document:
            parents[document] = document = parents[parents[document]]
        return document

    for first, *others in lists:
        for other in others:
            one, two = sorted((root(first), root(other)))
            parents[two] = one
    return groups_of(np.array([(document, root(document)) for document in list(parents)]))


def groups_of(members: np.ndarray) -> pd.DataFrame:
    """Group ids by root, int64 (members, 2); groups of two or more keep their smallest id."""
    frame = pd.DataFrame(members.reshape(-1, 2), columns=["id", "root"])
    by_root = frame.groupby("root")["id"]
    frame["group"] = by_root.transform("min")
    frame["keep"] = frame["id"] == frame["group"]
    return frame.loc[by_root.transform("size") > 1, ["id", "group", "keep"]]


WAYS = {
    "gpuclassify": (gpuclassify, {"verify": False}),
    "gpuclassify, verified": (gpuclassify, {"verify": True}),
    "datatrove": (datatrove, {"spaces": False}),
    "datatrove, words at spaces": (datatrove, {"spaces": True}),
    "text-dedup": (text_dedup, {}),
    "datasketch, words": (datasketch, {"words": True}),
    "datasketch, characters": (datasketch, {"words": False}),
}


def main(arguments: list[str]) -> None:
    """Run the requested way, and write its groups into the request's folder."""
    request: dict[str, Any] = json.loads(arguments[0])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    way, options = WAYS[request["way"]]
    out = Path(request["out"])
    groups = way(Path(request["documents"]), out, request["bands"], request["rows"], **options)
    groups.to_parquet(out / "groups.parquet")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Gather the documents of each set of candidates, and decide which of them stay."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.compute as pc

from gpuclassify.corpus.dedup.corpus import ROW_BITS, partitioning, value_texts
from gpuclassify.frames import backend_of, plain_type, to_pandas

LENGTH = "length"  # name in `keep_by` of the text length, unless the frame has this column
BEGINNING_CHARS = 200  # length of text excerpts in summaries
VERIFIED_BYTES = 1 << 26  # texts verified at a time; n-grams take up to 8 bytes per character


def take_members(
    frame: Any, partition: int, components: pd.DataFrame, settings: Any
) -> pd.DataFrame:
    """Return a partition's candidates for duplicates, with the columns to decide which ones stay.

    The index of `components` has the candidates' document numbers. `settings` is a
    `gpuclassify.corpus.dedup.duplicates.Duplicates`. The pandas result has the columns
    ``document``, the columns of `components` and of `ranking`, ``source`` ("" without a source
    column), ``text`` (only the first 200 characters after leading white space if texts are not
    compared), and, if ids are positions, ``partition_rows`` (number of rows in the partition).
    """
    # A root may have several rows.
    components = components[~components.index.duplicated()].sort_index()
    documents = components.index.to_numpy()
    rows = frame.iloc[documents - (partition << ROW_BITS)]
    texts = backend_of(rows).text_array(rows, settings.text_field)
    columns: dict[str, Any] = {"document": documents}
    columns |= {name: components[name].to_numpy() for name in components.columns}
    columns |= ranking(rows, documents, settings)
    source = settings.source_field
    names = np.full(len(rows), "") if source is None else value_texts(to_pandas(rows)[source])
    columns["source"] = pd.array(names, "str")
    if settings.id_field is None:
        columns["partition_rows"] = len(frame)
    if not settings.verification:
        texts = pc.utf8_slice_codeunits(pc.utf8_ltrim_whitespace(texts), 0, BEGINNING_CHARS)
    columns["text"] = pd.array(texts, dtype="str")
    return pd.DataFrame(columns)


def ranking(rows: Any, documents: np.ndarray, settings: Any) -> dict[str, Any]:
    """Return the columns that documents are sorted by: ``id``, ``rank_0``, ``rank_1``...

    `rows` is a frame of the documents. There is a rank for each name in `keep_by` of `settings`:
    the column's values or, if `rows` lacks it, the lengths of texts in characters. Without
    `id_field`, ids are the document numbers `documents`, int64 (rows,).
    """
    id_field, keep_by = settings.id_field, settings.keep_by
    chosen = rows[[name for name in dict.fromkeys([id_field, *keep_by]) if name in rows.columns]]
    plain = to_pandas(chosen)
    for name, dtype in plain.dtypes.items():
        if isinstance(dtype, pd.CategoricalDtype):  # categories may be in order of appearance
            plain = plain.astype({name: dtype.categories.dtype})
        elif isinstance(dtype, pd.ArrowDtype):  # Arrow does not sort dictionaries
            plain = plain.astype({name: pd.ArrowDtype(plain_type(dtype.pyarrow_dtype))})
    columns: dict[str, Any] = {"id": documents if id_field is None else plain[id_field].array}
    for number, name in enumerate(keep_by):
        if name in plain.columns:
            columns[f"rank_{number}"] = plain[name].array
        else:
            texts = backend_of(rows).text_array(rows, settings.text_field)
            columns[f"rank_{number}"] = pc.utf8_length(texts).to_numpy(zero_copy_only=False)
    return columns


def decide(members: pd.DataFrame, *, own_partitions: int, verification: Any) -> pd.DataFrame:
    """Decide which documents of each set of candidates stay, and return a row for each document.

    `members` are results of `take_members`, with all documents of each set (equal ``root``). With a
    column ``similarity``, the root is the document that stays. Otherwise `verification` has the
    settings for comparing texts; if it is None, one document of each set stays. Documents of
    partitions from `own_partitions` on belong to an earlier corpus, and stay.

    A group is a document that stays and its duplicates. Columns of the result are ``document``,
    ``id``, ``group`` (smallest id in the group; ids of an earlier corpus count only if there are no
    others), ``keep`` (bool), ``similarity`` (float32, to the kept document; NaN if not measured),
    ``compared`` (int8, number of comparisons), ``size`` (int64, documents in the group),
    ``near_border`` (documents near the border of a cluster, in one row per cluster; 0 in others),
    ``is_earlier``, ``source``, ``beginning`` (first 200 characters of a kept text after leading
    white space; "" for others), and ``partition_rows`` if ids are positions.
    """
    members = ranked(members, own_partitions, "root")
    root, is_earlier = members["root"].to_numpy(), members["is_earlier"].to_numpy()
    rows = np.arange(len(members))
    starts = np.flatnonzero(np.diff(root, prepend=-1))
    compared = np.zeros(len(members), np.int8)
    if "similarity" in members:
        first = pd.Series(rows, members["document"]).reindex(root).to_numpy()
        kept, similarity = first, members["similarity"].to_numpy()
    elif verification is None:
        kept = np.repeat(starts, np.diff(starts, append=len(rows)))
        similarity = np.where(kept == rows, 1, np.nan).astype(np.float32)
    else:
        kept, similarity, compared = _verified(members, starts, verification)
    kept = np.where(is_earlier, rows, kept)
    sizes = np.bincount(kept, minlength=len(rows))
    beginnings = members["text"].str.lstrip().str.slice(0, BEGINNING_CHARS)
    by_position = [name for name in members if name == "partition_rows"]
    return pd.DataFrame(
        {
            **members[["document", "id", *by_position]],
            "group": members["id"].take(_smallest(members["id"], kept, is_earlier)).array,
            "keep": kept == rows,
            "similarity": similarity,
            "compared": compared,
            "size": sizes[kept],
            "near_border": members.get("near_border", 0),
            "is_earlier": is_earlier,
            "source": members["source"],
            "beginning": beginnings.where(kept == rows, ""),
        }
    )


def _smallest(ids: pd.Series, kept: np.ndarray, is_earlier: np.ndarray) -> np.ndarray:
    """Return the row of the smallest id in each row's group, preferably of the dataset."""
    order = ids.array.argsort()
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    rank[is_earlier] += len(order)  # used only if a group has no other ids
    smallest = np.full(len(order), 2 * len(order))
    np.minimum.at(smallest, kept, rank)
    return order[smallest[kept] % max(len(order), 1)]


def listed(
    decisions: pd.DataFrame,
    *,
    id_name: str,
    has_similarity: bool,
    has_earlier: bool,
    partitions: int | None,
) -> pd.DataFrame:
    """Return the list of duplicates for users, from the result of `decide`.

    The id column is named `id_name`. If ids are positions, `partitions` is the frame's number of
    partitions, and a column ``partitions`` is added to recognize the same partitions later;
    otherwise `partitions` is None.
    """
    columns = ["id", "group", "keep"]
    columns += ["similarity"] if has_similarity else []
    columns += ["is_earlier"] if has_earlier else []
    listing = decisions.loc[decisions["size"] > 1, columns]
    if partitions is not None:
        rows = decisions.loc[decisions["size"] > 1, "partition_rows"]
        listing["partitions"] = partitioning(partitions, rows)
    return listing.rename(columns={"id": id_name}).reset_index(drop=True)


def ranked(members: pd.DataFrame, own_partitions: int, within: str) -> pd.DataFrame:
    """Sort documents by the column `within`, then with the one to keep first; add ``is_earlier``.

    Among equal values of `within`, documents of an earlier corpus (partitions from `own_partitions`
    on) come first, then the largest ranks (null last), then the smallest id.
    """
    is_earlier = members["document"].to_numpy() >= own_partitions << ROW_BITS
    members = members.assign(is_earlier=is_earlier)
    ranks = [name for name in members.columns if name.startswith("rank_")]
    by = [within, "is_earlier", *ranks, "id", "document"]
    ascending = [name in (within, "id", "document") for name in by]
    return members.sort_values(by, ascending=ascending, na_position="last", ignore_index=True)


def _verified(
    members: pd.DataFrame, starts: np.ndarray, settings: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compare the texts of each set of candidates; sets begin at the rows `starts` of `members`.

    Returns three arrays (rows,) as in `GroupMatches`.
    """
    from gpuclassify.corpus.dedup.matching import match_groups, ngram_sets

    texts = backend_of(members).text_array(settings.compared(members, "text"), "text")
    by_characters = settings.compare_by == "characters"
    size = settings.char_ngrams if by_characters else settings.token_ngrams
    least = settings.threshold if settings.min_similarity is None else settings.min_similarity
    is_earlier, bounds = members["is_earlier"].to_numpy(), np.append(starts, len(members))
    bytes_before = np.append(0, np.cumsum(pc.binary_length(texts)))[bounds]
    cuts = np.flatnonzero(np.diff(bytes_before[:-1] // VERIFIED_BYTES)) + 1
    results = []
    for first, end in pairwise([0, *cuts.tolist(), len(starts)]):  # whole groups
        rows = slice(bounds[first], bounds[end])
        sets = ngram_sets(texts[rows], size, by_characters=by_characters)
        matches = match_groups(
            sets,
            bounds[first : end + 1] - rows.start,
            is_earlier[rows],
            threshold=least,
            measure=settings.measure,
        )
        results.append((matches.kept + rows.start, matches.similarity, matches.compared))
    kept, similarity, compared = map(np.concatenate, zip(*results, strict=True))
    return kept, similarity, compared

"""Drop duplicate documents from a frame, by document number or by id."""

from __future__ import annotations

from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd

from gpuclassify.corpus.dedup.corpus import (
    ROW_BITS,
    Corpus,
    by_partition,
    check_comparable,
    choose_shuffle,
    document_numbers,
    like,
    partitioning,
    read_apart,
    value_texts,
)
from gpuclassify.frames import Frame, LazyFrame, backend_of, to_pandas
from gpuclassify.frames.lazy import as_dask, from_parts

ID = "id"  # default id column, used if it exists
POSITIONS = (ID, "position")  # candidate columns for positions of documents without ids
PARTITIONS = "partitions"  # column that identifies the partitioning; see `partitioning`


class RepeatedIdsError(ValueError):
    """Error for ids that do not identify documents, because one is null or occurs twice."""


def remove_duplicates(dataset: Frame | LazyFrame, duplicates: Frame | LazyFrame) -> Any:
    """Return `dataset` without the documents that `duplicates` has with ``keep`` false.

    The result has the type of `dataset`, lazy for Dask. Order, index, divisions and columns of the
    remaining rows are unchanged. Documents with ``is_earlier`` true are not dropped.

    Parameters
    ----------
    dataset : dask.dataframe.DataFrame, pandas.DataFrame or cudf.DataFrame
    duplicates : same type as `dataset`
        Result of `ExactDuplicates` and the like, possibly written and read again. Its first column
        has ids, and the name of a column of `dataset`; or it has positions, and is called ``id`` or
        ``position``. For positions, `dataset` must have the same partitions as when duplicates were
        found, which the column ``partitions`` verifies.

    Raises
    ------
    TypeError
        Ids cannot be compared with the ids in `dataset`, such as texts with numbers, or an argument
        is not a frame.
    ValueError
        `duplicates` lacks a column, or its ids are of a column that `dataset` does not have, or has
        twice. When computed: positions are of other partitions.
    """
    corpus, listing = Corpus(as_dask(dataset)), as_dask(duplicates)
    id_name = str(listing.columns[0])
    if "keep" not in listing.columns:
        raise ValueError(
            f"duplicates has the columns {list(listing.columns)}: pass what ExactDuplicates, "
            "FuzzyDuplicates or SemanticDuplicates returned, with the column 'keep'"
        )
    check_single(corpus.dataset, id_name)
    has_ids = PARTITIONS not in listing.columns
    if has_ids and id_name not in corpus.dataset.columns:
        raise ValueError(
            f"duplicates names documents by {id_name!r}, which the frame does not have: pass the "
            f"frame with that column. If they are positions, a column {PARTITIONS!r} is missing, "
            "which tells the partitions: pass what was returned, with all its columns"
        )
    meta = removed(listing._meta)
    gone = listing.map_partitions(removed, meta=meta)
    if has_ids:
        gone = _numbers_of(corpus, gone, id_name)
    return like(dataset, drop_documents(corpus.dataset, gone.rename(columns={id_name: "document"})))


def check_single(frame: Frame, name: str) -> None:
    """Raise ValueError if several columns of a frame have this name."""
    count = [*frame.columns].count(name)
    if count > 1:
        raise ValueError(f"{count} columns are called {name!r}: rename all but one")


def drop_documents(dataset: dd.DataFrame, gone: dd.DataFrame) -> dd.DataFrame:
    """Return the dataset, lazily, without the documents that `gone` lists in a column ``document``.

    If `gone` has a column ``partitions``, computing raises ValueError unless the dataset's
    partitions match.
    """
    lists = by_partition(gone, dataset.npartitions).to_delayed(optimize_graph=False)
    drop = dask.delayed(drop_rows, pure=True)
    parts = [
        drop(part, number, numbers, dataset.npartitions)
        for number, (part, numbers) in enumerate(
            zip(read_apart(dataset, None, "removal"), lists, strict=True)
        )
    ]
    divisions = dataset.divisions if dataset.known_divisions else None
    return from_parts(parts, dataset._meta, divisions)


def drop_rows(frame: Frame, partition: int, gone: pd.DataFrame, partitions: int = 0) -> Any:
    """Drop rows from the partition with the number `partition`; return the rest.

    The index of `gone` has the document numbers to drop. If `gone` has a column ``partitions``,
    raises ValueError unless this column fits a frame of `partitions` partitions with this
    partition's number of rows.
    """
    if PARTITIONS in gone and (gone[PARTITIONS] != partitioning(partitions, len(frame))).any():
        count, rows = divmod(int(gone[PARTITIONS].iloc[0]), 1 << ROW_BITS)
        raise ValueError(
            f"duplicates names documents by position in {count:,} partitions, one of {rows:,} "
            f"rows, and partition {partition} of the {partitions:,} here has {len(frame):,}: pass "
            "the frame with its partitions as they were, or find duplicates by id_field="
        )
    is_kept = np.ones(len(frame), bool)
    is_kept[gone.index.to_numpy() - (partition << ROW_BITS)] = False
    return frame if is_kept.all() else backend_of(frame).take_rows(frame, is_kept)


def removed(duplicates: Frame) -> pd.DataFrame:
    """Return the first column (ids or document numbers) of the rows to drop, as a pandas frame.

    Their ``keep`` is false, and so is their ``is_earlier``, if there is such a column. A column
    ``partitions`` is kept, too.
    """
    plain = to_pandas(duplicates)
    goes = ~plain["keep"].astype(bool)
    if "is_earlier" in plain:
        goes &= ~plain["is_earlier"].astype(bool)
    named = [plain.columns[0], *plain.columns.intersection([PARTITIONS])]
    return plain.loc[goes, named].reset_index(drop=True)


def numbered_ids(
    frame: Frame, partition: int, id_field: str, are_texts: bool = False
) -> pd.DataFrame:
    """Return a partition's ids, as texts if `are_texts`, in ``id``, and numbers in ``document``."""
    ids = to_pandas(frame[[id_field]])
    named = _as_texts(ids) if are_texts else ids
    numbers = document_numbers(partition, len(ids))
    return pd.DataFrame({"id": named[id_field].array, "document": numbers})


def refuse_repeated(ids: pd.DataFrame, id_field: str) -> bool:
    """Return True, or raise RepeatedIdsError if an ``id`` is null or occurs twice."""
    is_null = ids["id"].isna()
    wrong = ids[is_null | ids["id"].duplicated(keep=False)].sort_values("document")
    if not len(wrong):
        return True
    first = wrong["id"].iloc[0]
    same = wrong[wrong["id"].isna() if pd.isna(first) else wrong["id"] == first]
    positions = [
        f"row {number & (1 << ROW_BITS) - 1} of partition {number >> ROW_BITS}"
        for number in same["document"].tolist()[:2]
    ]
    shown = first.item() if hasattr(first, "item") else first  # 6 rather than np.int64(6)
    what = "null" if pd.isna(first) else repr(shown)
    # The column ID is the default, so that leaving id_field out does not help.
    or_else = "rename this one" if id_field == ID else "leave id_field out"
    raise RepeatedIdsError(
        f"id_field={id_field!r} must tell documents apart, and {what} is the id of "
        f"{' and of '.join(positions)}: name another column, or {or_else}, so that positions name "
        "documents"
    )


def _numbers_of(corpus: Corpus, gone: dd.DataFrame, id_name: str) -> dd.DataFrame:
    """Return the numbers of the documents whose ids are in `gone`, in a column ``document``."""
    ours, theirs = corpus.dataset._meta[id_name].dtype, gone._meta[id_name].dtype
    check_comparable(id_name, ours, theirs, "in the frame", "in duplicates")
    are_texts = ours != theirs  # such as two string types, or two integer widths
    meta = numbered_ids(corpus.empty([id_name]), 0, id_name, are_texts)
    ids = corpus.map(numbered_ids, [id_name], id_field=id_name, are_texts=are_texts, meta=meta)
    if are_texts:
        gone = gone.map_partitions(_as_texts, meta=_as_texts(gone._meta))
    gone = gone.rename(columns={id_name: "id"})
    return ids.merge(gone, on="id", shuffle_method=choose_shuffle())[["document"]]


def _as_texts(ids: pd.DataFrame) -> pd.DataFrame:
    name = ids.columns[0]
    return pd.DataFrame({name: pd.array(value_texts(ids[name]), "str")})

"""Read labelled texts, embed them, and cache the embeddings in files."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pandas as pd

from gpuclassify.classifiers.embedder import Embedder
from gpuclassify.corpus.training.split import join_groups
from gpuclassify.frames import backend_of, to_pandas
from gpuclassify.hub.saving import sweep, workshop
from gpuclassify.settings.checks import nearest
from gpuclassify.settings.code_digest import value_digest
from gpuclassify.settings.options import StrPath
from gpuclassify.settings.paths import exists

if TYPE_CHECKING:
    from gpuclassify.frames import Frame, LazyFrame

logger = logging.getLogger(__name__)

_TENSOR = "embeddings"
_DIGEST = "sha256"


@dataclass(frozen=True)
class LabelledRows:
    """Labels, groups and embeddings of the rows with a text and a label, in the dataset's order.

    Rows are in one group if they have the same text, or the same value (not null) in the column of
    groups, unless this would make a group too large: see `join_groups`.
    """

    labels: pd.Series  # values of the label column
    groups: np.ndarray  # int64 (rows,)
    vectors: np.ndarray  # float32 (rows, dimensions)
    null_texts: int  # rows left out without a text
    null_labels: int  # rows left out with a text, but without a label


@dataclass(frozen=True)
class LabelColumns:
    """Names of the columns with text, label and group of labelled rows; group may be None."""

    text: str
    label: str
    group: str | None = None

    @property
    def others(self) -> list[str]:
        """Names of the columns with labels and groups, each once."""
        return [self.label] if self.group in (None, self.label) else [self.label, self.group]

    def check(self, frame: Frame) -> None:
        """Raise an error unless `frame` has each column once, and the texts are strings."""
        known = list(map(str, frame.columns))
        arguments = {"text_field": self.text, "label_field": self.label, "group": self.group}
        for argument, name in arguments.items():
            if name is not None and known.count(name) != 1:
                count = known.count(name) or "no"
                raise ValueError(
                    f"{count} column {name!r}; columns are {known}."
                    f"{nearest(name, set(known) - {name})} Pass {argument}= to name yours."
                )
        if self.text in self.others:
            raise ValueError(f"column {self.text!r} holds the texts: name that of labels or groups")
        backend_of(frame).check_text_column(frame, self.text)


def read_labels(
    dataset: Any, columns: LabelColumns, embedder: Embedder, directory: StrPath | None = None
) -> LabelledRows:
    """Read labels and groups of a dataset, and embed its texts.

    The `text_field` of `embedder` is ignored. A Dask dataset is persisted on the workers meanwhile,
    so that it is computed once. `directory` caches embeddings, unless it is None. Logs a warning if
    rows are left out, or if texts remain in several groups.
    """
    is_lazy = dask.is_dask_collection(dataset)
    columns.check(dataset._meta if is_lazy else dataset)
    rows = dataset[[columns.text, *columns.others]]
    if is_lazy:
        rows = rows.persist()
        described = rows.map_partitions(
            _describe, columns, meta=_describe(rows._meta, columns)
        ).compute()
    else:
        described = _describe(rows, columns)
    has_text, has_label = described["has_text"], described["label"].notna()
    used = described[has_text & has_label].reset_index(drop=True)
    null_texts, null_labels = int((~has_text).sum()), int((has_text & ~has_label).sum())
    if used.empty:
        raise ValueError(
            f"none of {len(described)} rows has a text and a label ({null_texts} texts and "
            f"{null_labels} other labels are null): give annotated texts"
        )
    if len(used) < len(described):
        logger.warning(
            "left out %d of %d rows: %d without a text, %d without a label",
            *(len(described) - len(used), len(described), null_texts, null_labels),
        )
    texts = rows.dropna(subset=[columns.text, columns.label])[[columns.text]]
    texts = texts.rename(columns={columns.text: embedder.text_field})
    digests = used[["digest", "digest_end"]].to_numpy()
    vectors = _cached(directory, embedder, digests, lambda: _embed(texts, embedder))
    return LabelledRows(
        used["label"].rename(columns.label),
        _groups(digests, used["group"] if columns.group else None),
        vectors,
        null_texts,
        null_labels,
    )


def _describe(frame: Frame, columns: LabelColumns) -> pd.DataFrame:
    """Return each row's label, group and MD5 of the text (two int64), and whether it has a text."""
    digests, _ = backend_of(frame).text_digests(frame, columns.text)
    plain = to_pandas(frame[columns.others]).reset_index(drop=True)
    has_text = ~to_pandas(frame[[columns.text]].isna()).to_numpy(dtype=bool)[:, 0]
    described = pd.DataFrame({"label": plain[columns.label], "has_text": has_text})
    if columns.group:
        described["group"] = plain[columns.group]
    return described.assign(digest=digests[:, 0], digest_end=digests[:, 1])


def _embed(texts: Frame | LazyFrame, embedder: Embedder) -> np.ndarray:
    field = embedder.options.embedding_field
    rows = embedder(texts)[[field]]
    rows = rows.compute() if dask.is_dask_collection(rows) else rows
    lists = backend_of(rows).list_array(rows, field)
    return lists.flatten().to_numpy(zero_copy_only=False).astype(np.float32).reshape(len(rows), -1)


def _cached(
    directory: StrPath | None, embedder: Embedder, digests: np.ndarray, make: Callable[[], Any]
) -> np.ndarray:
    """Return embeddings from a file in `directory`; without a valid one, call `make` and save them.

    `embedder` and `digests` identify the file. Nothing is saved if `directory` is None.
    """
    from safetensors.numpy import save_file

    if directory is None:
        return make()
    folder = Path(os.fspath(directory)).expanduser()
    path = folder / f"embeddings-{value_digest((embedder, digests))[:32]}.safetensors"
    sweep(folder)
    if exists(path):
        try:
            vectors = _read_vectors(path)
            logger.info("took the embeddings in %s", path)
            return vectors
        except ValueError as err:
            logger.warning("%s is damaged (%s): embedding again", path, err)
    folder.mkdir(parents=True, exist_ok=True)
    vectors = make()
    with workshop(folder) as temporary:
        whole = temporary / path.name
        save_file({_TENSOR: vectors}, whole, metadata={_DIGEST: _digest(vectors)})
        whole.replace(path)
    return vectors


def _read_vectors(path: Path) -> np.ndarray:
    """Read embeddings from a safetensors file; raise ValueError if it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            vectors, kept = file.get_tensor(_TENSOR), (file.metadata() or {}).get(_DIGEST)
    except SafetensorError as err:
        raise ValueError(str(err)) from err
    if kept != _digest(vectors):
        raise ValueError("they have another digest")
    return vectors


def _digest(vectors: np.ndarray) -> str:
    digest = hashlib.sha256(f"{vectors.dtype.str} {vectors.shape}".encode())
    digest.update(np.ascontiguousarray(vectors).data)
    return digest.hexdigest()


def _groups(digests: np.ndarray, values: pd.Series | None) -> np.ndarray:
    texts = np.unique(digests, axis=0, return_inverse=True)[1].reshape(-1)
    if values is None:
        return texts
    codes = pd.factorize(values)[0]  # -1 for null
    groups = np.unique(np.where(codes < 0, len(codes) + texts, codes), return_inverse=True)[1]
    joined, left = join_groups(groups, texts)
    if left:
        logger.warning(
            "%d texts stand in several groups, and are trained on and judged by where these are in "
            "two parts: joined, the groups would be too large for parts to choose and judge by. "
            "Remove duplicates first, or name another column as group=",
            left,
        )
    return joined

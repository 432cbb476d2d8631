"""Decontaminate: find test items of benchmarks in documents, and write them to columns."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuclassify.classifiers.spans.spans import Spans
from gpuclassify.corpus.decontamination.index import (
    ABOUT,
    MOST_WORDS,
    ItemIndex,
    about_index,
    is_sound,
    open_index,
)
from gpuclassify.corpus.decontamination.items import (
    Fields,
    ItemFiles,
    ItemFrame,
    as_items,
    read_items,
)
from gpuclassify.corpus.decontamination.matching import (
    find_passages,
    match_items,
    remove_passages,
)
from gpuclassify.corpus.decontamination.report import (
    ContaminationReport,
    ItemOutcomes,
    count_matches,
    worst_passages,
)
from gpuclassify.frames import Frame, Texts, backend_of
from gpuclassify.jobs.stores.names import HTTP, file_format
from gpuclassify.jobs.stores.opening import open_store
from gpuclassify.jobs.stores.store import Store
from gpuclassify.mapping.columns import check_are_new, check_is_there
from gpuclassify.mapping.partition_map import RowWiseMap
from gpuclassify.mapping.stage_counts import LABEL
from gpuclassify.pages.sections import ReportPart
from gpuclassify.settings.declared import Declared, declared, setting
from gpuclassify.settings.options import StrPath, check_decision
from gpuclassify.settings.paths import user_cache
from gpuclassify.settings.signatures import short
from gpuclassify.workers.run_context import current_run

logger = logging.getLogger(__name__)

SPAN = pa.struct([("start", pa.int64()), ("end", pa.int64())])
MARGIN = 200  # characters, as GPT-3's authors left around a passage
# Settings that change the index.
INDEX_SETTINGS = (
    "against_field",
    "join_fields",
    "against_id",
    "ngram",
    "min_words",
    "max_items",
    "ignore",
)


@declared
class Decontaminate(Declared, RowWiseMap):
    """Mapper that finds test items in documents, and the passages that match.

    Overlap is the fraction of a test item's word n-grams that also occur in the document. Case,
    punctuation, symbols, white space and variants of the same character make no difference;
    characters of scripts without spaces are words. Candidates are found by hash, and then compared
    word by word, so that all matches are exact. A text's result does not depend on other texts.

    The index of the items is built once, in the client, and mapped into memory by
    all workers of a machine.

    Parameters
    ----------
    against : str, path, list of them, or frame
        Test items: files of Parquet or JSON lines, each a benchmark; a frame; or the folder of an
        index, such as ``clean/_decontamination/index`` of a job.
    against_field : str or list of str
        Columns of the items' texts.
    join_fields : bool
        Make one item of a row's texts. Default: each text is an item, so that a question is found
        without its answer.
    against_id : str
        Column that identifies rows. Default: ``id`` where there is one, else the row's number.
    ngram : int
        Words of an n-gram.
    min_words : int
        Minimum words of an item; shorter items are left out, and counted. An item of fewer than
        `ngram` words matches if all of its words occur one after another.
    threshold : float
        Overlap with an item, above 0 and at most 1, from which on a document is contaminated.
    max_items : int
        N-grams in more items than this are boilerplate, and are ignored.
    ignore : str or list of str
        Texts such as licences, whose n-grams are ignored like boilerplate.
    text_field : str
        Column of the text.
    label_field : str
        Output column (boolean): whether the document is contaminated. Null texts give null here and
        in the other output columns, except `keep_field`.
    score_field : str
        Output column (float32) of the largest overlap.
    item_field : str
        Output column of the file and id of the item with the largest overlap; null unless
        contaminated.
    items_field : str
        Output column (list of strings) of all items that reach the threshold, by overlap, largest
        first.
    passages_field : str
        Output column (list of start and end, in characters) of the passages that the items in
        `items_field` share with the text.
    cut : bool
        Write the text without these passages to `kept_text_field`.
    cut_margin : int
        Characters to cut on both sides of a passage.
    kept_text_field : str
        Column of the cut text; pass `text_field` to replace the text. Default: ``kept_text``.
    filter_by : bool
        Keep only rows with this label: False keeps clean documents. Null texts are dropped.
    keep_field : str
        Write the filter's decision to this column, and drop nothing.
    overwrite : bool
        Replace output columns that the dataset already has.
    index_dir : str or path
        Folder or URL of indexes that all workers can reach. Default: a folder of this user on this
        machine.

    Examples
    --------
    >>> clean = Decontaminate(against="evals/*.jsonl", filter_by=False)
    >>> ddf = ddf.pipe(clean)  # doctest: +SKIP
    """

    against: Any = setting(is_object=True, convert=as_items)
    against_field: str | Sequence[str] = setting(default="question", is_tuple=True)
    join_fields: bool = False
    against_id: str | None = setting(default=None, metavar="COLUMN")
    ngram: int = 13
    min_words: int = 8
    threshold: float = setting(default=0.2, is_share=True)
    max_items: int = 10
    ignore: str | Sequence[str] = setting(default=(), is_tuple=True, metavar="TEXT")
    text_field: str = "text"
    label_field: str = "contaminated"
    score_field: str = "contamination"
    item_field: str = "contaminated_by"
    items_field: str | None = None
    passages_field: str | None = None
    cut: bool = setting(
        default=False,
        help="Keep contaminated documents, without the passages: in place of the text, or in "
        "another column.",
    )
    cut_margin: int = setting(default=MARGIN, least=0)
    kept_text_field: str | None = None
    filter_by: bool | None = None
    keep_field: str | None = setting(
        default=None, help="Write whether a document is clean to this column, and drop nothing."
    )
    overwrite: bool = setting(default=False, changes_results=False)
    index_dir: StrPath | None = setting(default=None, is_secret=True)  # a URL may hold credentials

    filter_names: ClassVar[tuple[str, ...]] = ("filter_by",)

    def check_together(self) -> None:
        """Raise ValueError if settings are invalid, or contradict each other."""
        check_decision(self)
        if not self.against_field:
            raise ValueError("against_field=[] names no column: pass that of the items' text")
        if not 1 <= self.min_words <= self.ngram <= MOST_WORDS:
            raise ValueError(
                f"min_words={self.min_words} and ngram={self.ngram}: pass 1 <= min_words <= ngram "
                f"<= {MOST_WORDS}"
            )
        if not self.threshold > 0:
            raise ValueError("threshold=0 would call every document contaminated: pass more")
        if self.kept_text_field is not None and not self.cut:
            raise ValueError(
                f"kept_text_field={self.kept_text_field!r} has nothing to hold: pass cut=True too"
            )

    @property
    def filters(self) -> bool:
        """Whether `filter_by` is set."""
        return self.filter_by is not None

    @property
    def drops_rows(self) -> bool:
        """Whether the filter drops rows; False if `keep_field` gets its decision instead."""
        return self.filters and self.keep_field is None

    @property
    def text_fields(self) -> tuple[str, ...]:
        """Name of the text column, in a tuple."""
        return (self.text_field,)

    @property
    def main_text_fields(self) -> tuple[str, ...]:
        """Name of the column that gets the texts of a call with a list of texts, in a tuple."""
        return (self.text_field,)

    @property
    def cut_field(self) -> str | None:
        """Name of the output column of texts without passages; None unless ``cut=True``."""
        return (self.kept_text_field or "kept_text") if self.cut else None

    def schema(self) -> pa.Schema:
        """Return names and types of the output columns that the settings name."""
        new = [
            pa.field(self.label_field, pa.bool_(), metadata=LABEL),
            pa.field(self.score_field, pa.float32()),
            pa.field(self.item_field, pa.string()),
        ]
        if self.items_field is not None:
            new.append(pa.field(self.items_field, pa.list_(pa.string())))
        if self.passages_field is not None:
            new.append(pa.field(self.passages_field, pa.list_(SPAN)))
        if self.cut_field is not None:
            new.append(pa.field(self.cut_field, pa.string()))
        if self.keep_field is not None:
            new.append(pa.field(self.keep_field, pa.bool_(), nullable=False))
        return pa.schema(new)

    @property
    def report_parts(self) -> tuple[ReportPart, ...]:
        """Section about test items for a job's HTML report, in a tuple."""
        return (ContaminationReport(),)

    def identity(self) -> dict[str, Any]:
        """Return settings that change results, and a digest of test items and index settings."""
        against, items = repr(self.against), f"sha256:{self._key()}"
        return {**super().identity(), "against": against, "items": items}

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        if "_folder" in state and isinstance(self.against, ItemFrame):  # the index has its items
            state["against"] = replace(self.against, frame=None)
        return state

    # Methods for the client.

    def check(self, frame: Frame) -> None:
        """Raise ValueError or TypeError unless columns and their types fit the settings."""
        columns, backend = list(frame.columns), backend_of(frame)
        check_is_there(self.text_field, columns, "text_field")
        backend.check_text_column(frame, self.text_field)
        schema = self.schema()
        names = [name for name in schema.names if name != self._replaced()]
        others = [name for name in columns if name != self._replaced()]
        check_are_new(names, others, [self.text_field], self.overwrite)
        backend.check_new_columns(schema)

    def _replaced(self) -> str | None:
        return self.cut_field if self.cut_field == self.text_field else None

    def prepare(self) -> None:
        """Build the index of test items in its folder, unless the folder has an undamaged one.

        If `against` names the folder of an index, it is used as it is: raises ValueError if its
        settings differ. After `at`, nothing is done.
        """
        if "_folder" not in vars(self):
            self._set("_folder", self._built())

    def keeping(self, field: str) -> Decontaminate:
        """Return a copy that writes the filter's decision to column `field`, and drops no row.

        Raises ValueError if the mapper has no filter.
        """
        made = replace(self, keep_field=field)
        return made.at(vars(self)["_folder"]) if "_folder" in vars(self) else made

    def at(self, folder: Store) -> Decontaminate:
        """Return a copy whose index of test items is in this folder, which need not exist yet."""
        moved = replace(self)
        moved._set("_folder", folder)
        return moved

    def build(self) -> ItemIndex:
        """Read the test items; return their index, not saved, without the n-grams of `ignore`."""
        index = ItemIndex.build(
            read_items(self.against, self.item_columns),
            ngram=self.ngram,
            min_words=self.min_words,
            max_items=self.max_items,
        )
        if self.ignore:
            texts = pa.array(self.ignore, pa.large_string())
            index = index.without(index.document_counts(texts) > 0, "in ignore=")
        return replace(index, about={**index.about, **self._index_settings()})

    def _index_settings(self) -> dict[str, Any]:
        settings = {name: getattr(self, name) for name in INDEX_SETTINGS if name != "ignore"}
        return settings | {"against_field": [*self.against_field]}

    @property
    def item_columns(self) -> Fields:
        """Names of the columns of test items, from the settings."""
        return Fields(tuple(self.against_field), self.join_fields, self.against_id)

    @property
    def saved(self) -> Store | None:
        """Folder of a saved index, if `against` names one instead of test items; else None."""
        if isinstance(self.against, ItemFiles) and len(self.against.paths) == 1:
            path = self.against.paths[0]
            if file_format(path) or (path.startswith(HTTP) and "?" in path):  # a file, not a folder
                return None
            store = open_store(path)
            with contextlib.suppress(NotADirectoryError):  # a file of items
                if not store.is_pattern and store.has(ABOUT):
                    return store
        return None

    def _built(self) -> Store:
        if (saved := self.saved) is not None:
            about = about_index(saved)
            for name, value in self._index_settings().items():
                if (stored := about.get(name)) != value:
                    raise ValueError(
                        f"{saved} is an index of {name}={short(stored)}, not {value!r}: pass "
                        f"{name}={short(stored)}, or the files of items"
                    )
            if self.ignore:
                raise ValueError(f"{saved} is an index, which ignore= cannot change: pass files")
            return saved
        folder = open_store(self.index_dir or str(user_cache("indexes"))).below(self._key()[:32])
        if not is_sound(folder):
            if folder.has(ABOUT):
                logger.warning("%s is not as it was written, and is built again", folder)
            self.build().save(folder)
        return folder

    def _key(self) -> str:
        """Return the SHA-256 of test items and index settings; its first half names the folder."""
        # The digest is pickled with the mapper, because files must not change during a run.
        if "_items" not in vars(self):
            saved = self.saved
            identity = (
                self.against.identity()
                if saved is None
                else {"index": about_index(saved)["digest"]}
            )
            about = [identity, *(getattr(self, name) for name in INDEX_SETTINGS)]
            digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
            self._set("_items", digest)
        return str(vars(self)["_items"])

    def meta(self, frame: Frame) -> Any:
        """Return an empty frame with the columns and dtypes of the result."""
        empty, schema = frame.iloc[:0], self.schema()
        arrays = {new.name: pa.array([], new.type) for new in schema}
        return backend_of(frame).with_columns(empty, arrays, schema, self.meta_dtypes(frame))

    def meta_dtypes(self, frame: Frame) -> Any:
        """Return the dtype for new string columns: the text column's, or the library's default."""
        return backend_of(frame).string_dtype(frame, self.text_field)

    # Methods for workers.

    @property
    def index(self) -> ItemIndex:
        """Index of test items, mapped into memory; `prepare` is called first."""
        self.prepare()
        folder: Store = vars(self)["_folder"]
        try:
            return open_index(folder)
        except FileNotFoundError as err:
            raise FileNotFoundError(
                f"the index of test items is not in {folder}, as seen from this machine: pass "
                "index_dir= with a folder or URL that the client and all workers reach"
            ) from err

    def map_frame(self, frame: Frame, meta_dtypes: object = None) -> Any:
        """Return the frame with the output columns, less the rows that the filter drops."""
        backend, schema = backend_of(frame), self.schema()
        string_dtype = self.meta_dtypes(frame) if meta_dtypes is None else meta_dtypes
        arrays, keep = self.compute(backend.text_array(frame, self.text_field))
        result = backend.with_columns(frame, arrays, schema, string_dtype)
        return backend.take_rows(result, keep) if self.drops_rows else result

    def compute(self, texts: pa.LargeStringArray) -> tuple[dict[str, pa.Array], np.ndarray]:
        """Find test items in texts; return the output columns by name, and a mask of texts to keep.

        The mask is bool (texts,), all true without a filter. It has the filter's decision also with
        `keep_field`, although no row is to be dropped then. Counts and examples for a job's report
        are recorded if a job is running.
        """
        started, index = time.perf_counter(), self.index
        hits = index.hits(texts)
        matches = match_items(index, hits)
        worst, reached = matches.worst(), matches.select(matches.shares >= self.threshold)
        is_null = pc.is_null(texts).to_numpy(zero_copy_only=False)
        shares, items = np.zeros(len(texts)), np.full(len(texts), -1)
        shares[worst.documents] = worst.shares
        items[worst.documents] = worst.items
        label = shares >= self.threshold
        spans = find_passages(index, texts, hits, reached)
        passages = (spans.text_of, spans.starts, spans.ends)
        names = item_names(index, np.where(label, items, -1))
        columns = [
            pa.array(label, mask=is_null),
            pa.array(shares.astype(np.float32), mask=is_null),
            names,
        ]
        if self.items_field is not None:
            columns.append(_lists(reached.documents, item_names(index, reached.items), is_null))
        if self.passages_field is not None:
            values = pa.StructArray.from_arrays([*map(pa.array, passages[1:])], fields=[*SPAN])
            columns.append(_lists(spans.text_of, values, is_null))
        if self.cut:
            columns.append(_cut(texts, spans, self.cut_margin))
        keep = ~is_null & (label == self.filter_by) if self.filters else np.ones(len(texts), bool)
        if self.keep_field is not None:
            columns.append(pa.array(keep))
        arrays = dict(zip(self.schema().names, columns, strict=True))
        if (stages := current_run().stages) is not None:
            there = ~is_null
            outcomes = ItemOutcomes(
                Texts(texts.filter(pa.array(there)).to_pylist()),
                {"label": label[there] == self.filter_by} if self.filters else None,
                pa.array(label[there]),
                worst=worst_passages(
                    *(index, texts, worst.select(worst.shares >= self.threshold)),
                    *(passages, stages.most_examples),
                ),
            )
            positions = np.where(is_null, -1, np.cumsum(there) - 1)
            counts = {"contamination": count_matches(index, matches, reached)}
            seconds = time.perf_counter() - started
            more: dict[str, Any] = {"truncated_texts": 0, "seconds": seconds}
            stages.add(self, outcomes, positions, arrays, **counts, **more)
        return arrays, keep


def item_names(index: ItemIndex, items: np.ndarray) -> pa.Array:
    """Return the names of the test items with these indices, as ``file#id``; null for -1."""
    indices = pa.array(items, mask=items < 0)
    source, name = (index.items[column].take(indices) for column in ("source", "id"))
    mark = pa.scalar("#", pa.large_string())
    joined = pc.binary_join_element_wise(source, name, mark).cast(pa.string())
    return joined.combine_chunks() if isinstance(joined, pa.ChunkedArray) else joined


def _lists(documents: np.ndarray, values: pa.Array, is_null: np.ndarray) -> pa.ListArray:
    """Group values, sorted by `documents`, into a list for each document; null if `is_null`."""
    sizes = np.bincount(documents, minlength=len(is_null))
    offsets = pa.array(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, values, mask=pa.array(is_null))


def _cut(texts: pa.LargeStringArray, passages: Spans, margin: int) -> pa.Array:
    cut = [remove_passages(texts[row].as_py(), spans, margin) for row, spans in passages.by_text()]
    is_cut = passages.counts > 0
    return pc.replace_with_mask(texts, pa.array(is_cut), pa.array(cut, texts.type))
